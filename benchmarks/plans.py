"""The searched plan against plans that a person would write, on the same model, machine and batch.

    python benchmarks/plans.py [--only TEXT] [--budget SECONDS] [--results FOLDER]

Every plan is compiled for its machine and its schedule replayed: HBM is *compiled*, step seconds are *forecast*. Full-parameter AdamW
without clipping, float32 masters and moments, bfloat16 compute. "full recompute" is as written: the layer input kept. The searched plan
also trains the model's small twin on this machine, in float32, for ten steps beside the same steps resident. A row holds if the searched
plan fits, no plan by hand that fits is forecast to be faster, and its twin trains the same.
"""

import dataclasses
import json
import sys
import time

import jax
import record
from rich.console import Console
from rich.table import Table

import forebay as fb
from forebay.errors import ForebayError
from forebay.search.proving import judged
from forebay.training.checking import BATCH, HEAD_DIM, SEQ, scaled_down
from forebay.training.models import llama, presets
from forebay.units import GIB

PROJECTIONS = ("q", "k", "v")
NAMED = ("layer_input", "q", "k", "v", "attn_context", "attn_stats", "attn_out", "mlp_gate", "mlp_up")
KEPT_MLP = (*PROJECTIONS, "attn_out", "mlp_gate", "mlp_up")


def _place(names, where: str) -> dict[str, str]:
    return {f"activation:{name}": where for name in names}


BY_HAND = {
    "everything kept": {"activation:?*": "hbm"},
    "full recompute": {},
    "full recompute, optimizer on host": {"optimizer": "host"},
    "all named activations on host": _place(NAMED, "host"),
    "q, k, v kept": _place(PROJECTIONS, "hbm"),
    "q, k, v, out, MLP kept": _place(KEPT_MLP, "hbm"),
}
TWIN_STEPS, TWIN_DEVICES = 10, 8
DOTS = "dots_saveable"  # the model's own policy, without a rule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a machine and the work of one step."""

    model: str
    machine: str
    seq: int
    sequences: int
    host_ram: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.machine}, {self.sequences} x {self.seq}"


CASES = (
    Case(model="llama-3.1-8b", machine="h100-sxm:8", seq=8192, sequences=8),
    Case(model="llama-3.1-8b", machine="h100-sxm:8", seq=32768, sequences=8),
    Case(model="llama-3.1-70b", machine="h100-sxm:8", seq=8192, sequences=8),
    Case(model="llama-3.1-70b", machine="h100-sxm:16", seq=8192, sequences=16),
    Case(model="llama-3.1-70b", machine="h100-sxm:16x8", seq=8192, sequences=128),
    Case(model="qwen-3-8b", machine="rtx-4090:1", seq=4096, sequences=1, host_ram="128GiB"),
    Case(model="llama-2-7b", machine="a100-80:4", seq=4096, sequences=4),
    Case(model="llama-3.1-405b", machine="h200:8x8", seq=8192, sequences=64),
    Case(model="mistral-7b", machine="tpu-v5p:2x2x1", seq=4096, sequences=4),
    Case(model="llama-2-7b", machine="tpu-v5p:2x2x1", seq=4096, sequences=32),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One compiled plan. ``executed_flops`` are those of a device in a step, recomputation included."""

    name: str
    fits: bool | None
    reason: str
    hbm_bytes: int | None
    host_bytes: int | None
    step_seconds: float | None
    executed_flops: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case: the plans by hand, the searched one last. ``twin``: what each check of the twin came to."""

    case: Case
    plans: tuple[Plan, ...]
    search_seconds: float
    candidates: tuple[dict, ...]
    twin: dict[str, str]
    twin_passed: bool
    reasons: tuple[str, ...]
    versions: dict

    @property
    def holds(self) -> bool:
        *by_hand, chosen = self.plans
        rivals = [p.step_seconds for p in by_hand if p.fits and p.step_seconds is not None]
        faster = chosen.step_seconds is not None and all(chosen.step_seconds <= s for s in rivals)
        return bool(chosen.fits) and faster and self.twin_passed


def measure(case: Case, budget_seconds: float, config=None) -> Row:
    """The row of one case; the search first, so that it finds no compile of the plans by hand on disk. ``config``: another model."""
    hardware = fb.Hardware.named(case.machine, host_ram=case.host_ram)
    config = config or presets.preset(case.model)
    work_done = {"tokens": case.seq * case.sequences, "flops_per_token": llama.train_flops_per_token(config, case.seq)}
    began = time.monotonic()
    loss, optimizer, params, batch = llama.make(config, batch=case.sequences, seq=case.seq)
    work = fb.trace(loss, optimizer, params, batch)
    chosen = fb.choose(work, hardware, budget_seconds=budget_seconds, **work_done)
    seconds = time.monotonic() - began
    plans = [_judged(name, work, hardware, rules, work_done) for name, rules in BY_HAND.items()]
    dots = fb.trace(llama.make_loss(config, jax.checkpoint_policies.dots_saveable), optimizer, params, batch)
    plans.append(_judged(DOTS, dots, hardware, {}, work_done))
    answer = _plan("searched", chosen.verdict, chosen.forecast)
    twin = _twin(config, chosen)
    return Row(
        case=case, plans=(*plans, answer), search_seconds=seconds, candidates=chosen.candidates,
        twin={c.name: f"{c.outcome}: {c.detail}" for c in twin.checks}, twin_passed=twin.passed,
        reasons=tuple(chosen.options["reasons"]), versions=dict(chosen.verdict.versions),
    )  # fmt: skip


def _twin(config, plan):
    """The report of ten steps of ``plan`` on the twin of its model."""
    small = dataclasses.replace(scaled_down(config, HEAD_DIM["cpu"]), dtype="float32")
    loss, optimizer, _, batch = llama.make(small, batch=BATCH, seq=SEQ)
    params = llama.init_params(small, jax.random.key(0))
    return fb.check(loss, optimizer, plan, params, batch, steps=TWIN_STEPS, integers=small.vocab)


def _judged(name: str, work, hardware, rules: dict[str, str], work_done) -> Plan:
    try:
        plan = fb.Plan.by_hand(work, rules, hardware=hardware)
    except ForebayError as refused:
        return Plan(name=name, fits=False, reason=str(refused), hbm_bytes=None, host_bytes=None, step_seconds=None, executed_flops=None)
    verdict = judged(plan, hardware).verdict
    return _plan(name, verdict, fb.predict(verdict, hardware, **work_done).to_json() if verdict.compiled else None)


def _plan(name: str, verdict, forecast) -> Plan:
    return Plan(
        name=name, fits=verdict.fits, reason=verdict.reason, hbm_bytes=verdict.hbm and verdict.hbm.total_bytes,
        host_bytes=verdict.host and verdict.host.total_bytes, step_seconds=forecast and forecast["step_seconds"],
        executed_flops=forecast and sum(forecast["flops"].values()),
    )  # fmt: skip


def show(row: Row, console: Console) -> None:
    """Print one row."""
    title = f"{row.case.name}: searched in {row.search_seconds:.0f} s (measured), {'holds' if row.holds else 'DOES NOT HOLD'}"
    title += f"; ten steps of its twin: {'as resident' if row.twin_passed else row.twin} (measured)"
    table = Table(title=title, title_justify="left")
    for heading in ("plan", "fits", "HBM GiB (compiled)", "host GiB", "step s (forecast)", "executed PFLOP"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    number = lambda value, unit: record.NOT_COMPILED if value is None else f"{value / unit:.3f}"  # noqa: E731
    for p in row.plans:
        sizes = (number(p.hbm_bytes, GIB), number(p.host_bytes, GIB), number(p.step_seconds, 1), number(p.executed_flops, 1e15))
        table.add_row(p.name, {True: "yes", False: "no", None: "?"}[p.fits], *sizes)
    console.print(table)


def main() -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each search")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", TWIN_DEVICES)
    console, holds = Console(width=record.WIDTH), True
    for case in (c for c in CASES if given.only in c.name):
        row = measure(case, given.budget)
        show(row, console)
        _keep(row, given.results)
        holds &= row.holds
    return 0 if holds else 1


def _keep(row: Row, folder) -> None:
    """Put a row beside those that other runs of the day have kept, in place of an older one of its case."""
    made = dataclasses.asdict(row) | {"holds": row.holds}
    path = record.path_of("plans", "deviceless", folder)
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    record.keep("plans", "deviceless", (), row.versions, folder)
    kept = json.loads(path.read_text()) | {"rows": [r for r in before if r["case"] != made["case"]] + [made]}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
