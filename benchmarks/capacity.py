"""What fits where: whole training steps of large models on small machines, compiled for the machine, under plans by hand.

    python benchmarks/capacity.py [--only TEXT] [--results FOLDER]

Full-parameter AdamW without clipping, float32 masters and moments, bfloat16 compute, cuDNN attention, the whole vocabulary and loss.
Parameters and optimizer state stand on the host and are updated inside the backward pass; each layer's input is offloaded; the rest of
a layer is recomputed. Counts of parameters and tokens are those of the traced step. "at most" is the goal of each row; without one,
the machine's budget.
"""

import dataclasses
import sys

import optax
import record

import forebay as fb
from forebay.training.models import llama, presets
from forebay.units import GIB

RULES = {"parameter": "host", "optimizer": "host", "activation:layer_input": "host"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a machine and the work of one step; ``goal_gib`` is what its HBM is held against."""

    model: str
    machine: str
    host_ram: str | None
    sequences: int
    seq: int
    goal_gib: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.machine}"


def dense_140b():
    """A dense decoder in the shape of Llama-3.1-70B, wider: 12288 x 96 layers."""
    base = presets.preset("llama-3.1-70b")
    return dataclasses.replace(base, name="dense-150b", model=12288, mlp=32768, heads=96, kv_heads=8, layers=96)


CASES = (
    Case(model="llama-3.1-70b", machine="h100-sxm:8", host_ram="2TiB", sequences=32, seq=8192, goal_gib=16),
    Case(model="llama-3.1-70b", machine="h100-sxm:1", host_ram="1.25TiB", sequences=8, seq=8192, goal_gib=56),
    Case(model="llama-3.1-8b", machine="rtx-4090:1", host_ram="128GiB", sequences=1, seq=4096),
    Case(model="llama-3.1-405b", machine="h200:4x8", host_ram="2TiB", sequences=32, seq=8192),
    Case(model="dense-150b", machine="h200:1", host_ram="2TiB", sequences=4, seq=8192),
)


def measure(case: Case, config=None) -> tuple[record.Row, dict]:
    """The row of one case, and the versions of the compiler. ``config``: another model in place of the case's."""
    hardware = fb.Hardware.named(case.machine, host_ram=case.host_ram)
    config = config or (dense_140b() if case.model == "dense-150b" else presets.preset(case.model))
    optimizer = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    loss, optimizer, params, batch = llama.make(config, batch=case.sequences, seq=case.seq, optimizer=optimizer)
    work = fb.trace(loss, optimizer, params, batch, name=case.model)
    plan = fb.Plan.by_hand(work, RULES, hardware=hardware)
    step = fb.train_step(loss, optimizer, plan)
    verdict = fb.judge(step, (plan.abstract_state(), plan.abstract_batch()), hardware, plan=plan)
    parameters, tokens = work.parameters, case.sequences * case.seq
    facts = {"parameters": parameters, "tokens_per_step": tokens, "attention": dict(verdict.attention), "rules": RULES}
    note = f"{parameters / 1e9:.1f} B, {tokens:,} tokens a step, {'fits' if verdict.fits else 'does not fit'}"
    if verdict.compiled:
        facts |= _host_facts(plan, verdict, hardware, parameters)
        activations = facts["offloaded_activation_bytes"] / GIB
        note += f", {facts['host_bytes_per_parameter']:.2f} B of host per parameter (+ {activations:.1f} GiB activations)"
    goal = case.goal_gib * GIB if case.goal_gib else verdict.hbm_budget_bytes
    return record.row(case.name, f"{case.sequences} x {case.seq}", verdict, bound_bytes=int(goal), note=note, facts=facts), verdict.versions


def _host_facts(plan, verdict, hardware, parameters: int) -> dict:
    """Host bytes of all devices, without the offloaded activations, for each parameter."""
    offloaded = sum(e.bytes_per_device for e in plan.role("activation") if e.placement == "host")
    total = verdict.host.total_bytes * hardware.devices
    return {
        "host_bytes_all_devices": total,
        "offloaded_activation_bytes": offloaded,
        "host_bytes_per_parameter": (total - offloaded * hardware.devices) / parameters,
        "host_budget_bytes_per_device": verdict.host_budget_bytes,
    }


def main(argv: list[str]) -> int:
    given = record.arguments(__doc__).parse_args(argv)
    rows, versions = [], {}
    for case in CASES:
        if given.only in case.name:
            made, versions = measure(case)
            rows.append(made)
    record.show("Training steps under plans by hand", rows, GIB, "GiB")
    print(f"written to {record.keep('capacity', 'deviceless', rows, versions, given.results)}")
    return 0 if all(r.within and r.fits for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
