"""forebay beside MaxText on the same model, batch and chip: HBM of one training step, compiled for TPU v5p, in GB (1e9 bytes) per chip.

    python benchmarks/peers.py [--only TEXT] [--results FOLDER]

MaxText's sums (commit e591f30c, jax 0.10.2; argument + temp) were compiled the same way, without a chip: fp32 weights and Adam, sequences
of 4096, full rematerialisation. They were read from its own compiles and are constants here; "wall" is its time on two cores. forebay's
rows compile its own train step under plans by hand: everything resident, the optimizer's state on the host, the parameters on the host,
each layer's input on the host. Each layer is updated inside the backward pass (``fuse_update="always"``). Both compute in bfloat16 over
float32 masters. AdamW is without clipping, the better of MaxText's variants. Sums are held against sums; XLA:TPU's temp size counts some
buffers twice, and what it allocates stands beside (jax 0.12).
"""

import dataclasses
import sys
import time

import optax
import record

import forebay as fb
from forebay.training.models import llama, presets

GB = 10**9
SEQ = 4096
PLAIN, OPTIMIZER, PARAMETERS, LAYER_INPUT, BOTH = "plain", "optimizer on host", "parameters on host", "layer input on host", "both on host"
RULES = {
    PLAIN: {},
    OPTIMIZER: {"optimizer": "host"},
    PARAMETERS: {"parameter": "host"},
    BOTH: {"parameter": "host", "optimizer": "host"},
    LAYER_INPUT: {"activation:layer_input": "host"},
}
OPTIONS = {"fuse_update": "always"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a slice, and MaxText's sums in GB per chip for each placement (None: not published)."""

    model: str
    machine: str
    per_chip: int
    maxtext_gb: dict[str, float]
    maxtext_wall_seconds: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.machine}, {self.per_chip} per chip"


CASES = (
    Case(
        model="llama-2-7b",
        machine="tpu-v5p:2x2x1",
        per_chip=4,
        maxtext_gb={PLAIN: 44.12, OPTIMIZER: 35.54, PARAMETERS: 45.73, LAYER_INPUT: 37.45},
        maxtext_wall_seconds="106-538",
    ),
    Case(
        model="llama-3.1-8b",
        machine="tpu-v5p:2x2x1",
        per_chip=4,
        maxtext_gb={PLAIN: 50.44, OPTIMIZER: 45.72, PARAMETERS: 50.59},
        maxtext_wall_seconds="75-306",
    ),
    Case(
        model="llama-3.1-70b",
        machine="tpu-v5p:4x4x4",
        per_chip=2,
        maxtext_gb={PLAIN: 47.93, OPTIMIZER: 43.80},
        maxtext_wall_seconds="180-198",
    ),
)


def measure(case: Case, config=None, seq: int = SEQ, only: str = "") -> tuple[list[record.Row], dict]:
    """forebay's rows of one case, and the versions of the compiler. ``config``: another model in place of the case's."""
    hardware = fb.Hardware.named(case.machine)
    optimizer = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    config = config or presets.preset(case.model)
    started = time.perf_counter()
    loss, optimizer, params, batch = llama.make(config, batch=case.per_chip * hardware.devices, seq=seq, optimizer=optimizer)
    work = fb.trace(loss, optimizer, params, batch, name=case.model)
    traced = time.perf_counter() - started
    rows, versions = [], {}
    for form, rules in RULES.items():
        if only not in form:
            continue
        started = time.perf_counter()
        plan = fb.Plan.by_hand(work, rules, hardware=hardware, options=OPTIONS)
        step = fb.train_step(loss, optimizer, plan)
        verdict = fb.judge(step, (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan)
        wall = traced + time.perf_counter() - started
        rows.append(_row(case, form, plan, verdict, wall, rows))
        versions = verdict.versions
    return rows, versions


def _row(case: Case, form: str, plan, verdict, wall: float, before: list[record.Row]) -> record.Row:
    """The row of one plan: held against MaxText's sum, and against what the plan should save of our own plain sum."""
    state = sum(e.bytes_per_device for e in plan.role("optimizer") if e.shape)
    facts = {"wall_seconds": round(wall, 1), "cached": verdict.cached, "optimizer_bytes": state, "parameters": plan.workload["parameters"]}
    maxtext = case.maxtext_gb.get(form)
    notes = [f"MaxText {maxtext:.2f}"] if maxtext else []
    plain = next((r.hbm_bytes for r in before if r.form == PLAIN and r.hbm_bytes), None)
    if form == OPTIMIZER and plain and verdict.compiled:
        facts["of_plain_less_state"] = verdict.hbm.sum_bytes / (plain - state)
        notes.append(f"{facts['of_plain_less_state']:.3f} of (plain - state)")
    if verdict.compiled and verdict.hbm.allocated_bytes is not None:
        facts["allocated_bytes"] = verdict.hbm.allocated_bytes
        notes.append(f"allocated {verdict.hbm.allocated_bytes / GB:.2f}")
    notes.append(f"{wall:.0f} s{' (cached)' if verdict.cached else ''}")
    bound = int(maxtext * GB) if maxtext else None
    made = record.row(case.name, form, verdict, bound_bytes=bound, note=", ".join(notes), facts=facts)
    return dataclasses.replace(made, hbm_bytes=verdict.hbm.sum_bytes) if verdict.compiled else made


def main(argv: list[str]) -> int:
    given = record.arguments(__doc__).parse_args(argv)
    rows, versions = [], {}
    for case in CASES:
        if given.only in case.name:
            made, versions = measure(case)
            rows += made
    record.show("MaxText's work under forebay's plans; at most: MaxText's sum", rows, GB, "GB")
    published = {case.name: {"gb": case.maxtext_gb, "wall_seconds": case.maxtext_wall_seconds} for case in CASES}
    print(f"written to {record.keep('peers', 'tpu-v5p', rows, versions, given.results, maxtext=published)}")
    return 0 if all(r.within is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
