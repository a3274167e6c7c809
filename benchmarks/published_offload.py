"""Published steps with the optimizer's state on the host, rebuilt as far as they are published, and each step beside itself with the state
in HBM. What cannot be rebuilt for a target that is compiled here is a sentence, not a number.

    python benchmarks/published_offload.py [--only TEXT] [--json FILE]

``change`` is seconds with the state on the host over seconds with it resident, less one. ``ms_per_gib`` is what the publications state: the
difference of the two steps over the difference of their HBM, both compiled. ``exposed`` is the time that the compute lane waits for copies
of the state. As in the published steps the update stands behind the backward pass (``fuse_update="never"``), not inside it. The rows
differ from what was published as ``compiled`` says, so they are held to sign and size. A case that the compiler refuses is a row that
says why."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import published_moe
from jax.sharding import PartitionSpec

import forebay as fb
from forebay.hardware import Hardware
from forebay.records.forecast import Forecast
from forebay.records.verdict import Verdict
from forebay.training.models import llama
from forebay.training.models.presets import preset
from forebay.units import GIB

WORDS = (
    ("TPU 7x, DeepSeek-V3 671 B", "+2.5 %: the rate of its host link is not published, so no number for it"),
    ("TPU v6e x 32, dense 1.1 B", "-9.5 % tokens/s: FSDP over 32 leaves 64 of a TPU's 128 lanes, and libtpu refuses the streamed update"),
    ("MI355X, Llama-3.1-405B", "380 s a step: no compiler for it here; about 1 GB/s is what whole-tree moves through pageable memory give"),
    ("GB200 x 128, activation offload", "+57 % and +2.9 %: batch and flags are not published"),
    ("H200 and B300 x 8, QKV offload", "-3 to -15.5 %: models between 3 and 70 B, batch and kept values are not published"),
    ("GB200 x 4, poolside", "3.7 GB out in 20 ms beside 22.5 ms: hidden where bytes over the link's rate are less than the compute"),
    ("H200 x 8 and H100 x 16, AdamW on the CPU", "the update itself runs on the CPU there; forebay moves the state to the GPU instead"),
)


MOE, DENSE = "MoE 360 B", "dense llama-3.1-70b"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published change, the machine compiled for, and what ``make`` builds: (loss, optimizer, params, batch, keywords of trace)."""

    name: str
    machine: str
    published: str
    compiled: str
    make: Callable[[Hardware], tuple]
    tokens: int
    flops_per_token: float
    common: dict[str, str] = dataclasses.field(default_factory=dict)


def _moe(hardware: Hardware):
    c = published_moe.Moe()
    batch = {"tokens": jax.ShapeDtypeStruct((c.batch, c.seq + 1), jax.numpy.int32)}
    placed = {"mesh": published_moe.mesh_of(hardware.devices), "param_specs": published_moe.specs(c)}
    optimizer = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    return published_moe.make_loss(c), optimizer, published_moe.shapes(c), batch, placed | {"batch_spec": PartitionSpec(published_moe.AXIS)}


def cases() -> Iterator[Case]:
    moe = published_moe.Moe()
    yield Case(
        name=MOE, machine="gb200:64", published="0.33 s exposed of 13.9 s; 8 ms/GiB over 34.6 GiB",
        compiled="48 layers, d 6144, 128 experts top-4, 1024 x 4096; AdamW float32; layer input on the host with and without",
        make=_moe, tokens=moe.batch * moe.seq, flops_per_token=moe.flops_per_token, common={"activation:layer_input": "host"},
    )  # fmt: skip
    config, batch, seq = preset("llama-3.1-70b"), 256, 4096
    yield Case(
        name=DENSE, machine="tpu-v5p:4x4x4", published="+2.5 % (DeepSeek-V3 on 256 TPU7x: 10.5 GB of state a device, 15.7 s)",
        compiled="4 sequences of 4096 a device as published, FSDP over 64, full recompute; AdamW float32: 8.8 GB of state a device",
        make=lambda hardware: (*llama.make(config, batch=batch, seq=seq), {}), tokens=batch * seq,
        flops_per_token=llama.train_flops_per_token(config, seq),
    )  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """One case: the forecasts with the state resident and with forebay's streamed state, or why there is none."""
    hardware = fb.Hardware.named(case.machine)
    loss, optimizer, params, batch, placed = case.make(hardware)
    work = fb.trace(loss, optimizer, params, batch, **placed)

    def judged(rules) -> Verdict:
        plan = fb.Plan.by_hand(work, case.common | rules, hardware=hardware, options={"fuse_update": "never"})
        step, args = fb.train_step(loss, optimizer, plan), (plan.abstract_state(), plan.abstract_batch())
        return fb.judge(step, args, hardware, plan=plan, compiler_options=_options(hardware))

    row = {"row": case.name, "machine": case.machine, "published": case.published, "compiled": case.compiled}
    resident, streamed = judged({}), judged({"optimizer": "host"})
    for verdict in (resident, streamed):
        if not verdict.compiled:
            return row | {"not_compiled": verdict.reason}
    known = {"tokens": case.tokens, "flops_per_token": case.flops_per_token}
    return row | _row(*((verdict, fb.predict(verdict, hardware, **known)) for verdict in (resident, streamed)))


def _options(hardware: Hardware) -> dict:
    return {"xla_gpu_autotune_level": 0} if hardware.target.platform == "cuda" else {}


def _row(resident: tuple[Verdict, Forecast], streamed: tuple[Verdict, Forecast]) -> dict[str, Any]:
    (without, before), (verdict, after) = resident, streamed
    freed = without.hbm.total_bytes - verdict.hbm.total_bytes
    added = after.step_seconds - before.step_seconds
    use = {loop.bound: dict(loop.link_use) for loop in after.loops if len(loop.link_use) == 2}
    return {
        "resident_seconds": before.step_seconds, "host_seconds": after.step_seconds, "change": added / before.step_seconds,
        "exposed_seconds": _exposed_state(after), "ms_per_gib": 1e3 * added / (freed / GIB),
        "resident_hbm_bytes": without.hbm.total_bytes, "hbm_bytes": verdict.hbm.total_bytes, "fits": [without.fits, verdict.fits],
        "state_bytes": verdict.host.argument_bytes, "host_bytes": verdict.host.total_bytes, "loops": use, "mfu": before.mfu,
        "unknown_share": after.unknown_share, "low_seconds": after.low_seconds, "high_seconds": after.high_seconds,
        "path": dict(after.path), "resident_path": dict(before.path), "notes": list(after.notes),
    }  # fmt: skip


def _exposed_state(forecast: Forecast) -> float:
    """Exposed seconds of copies of arguments: the optimizer's state, not what the step itself sends out and back."""
    return sum(copy.exposed_seconds for copy in forecast.copies if not copy.buffer.startswith("offloaded "))


def show(rows: list[dict]) -> None:
    """Print the rows and the sentences."""
    print("\nThe optimizer's state on the host, against the same step with it in HBM (forecast)")
    for r in rows:
        print(f"{r['row']} on {r['machine']}: published {r['published']}")
        print(f"  compiled: {r['compiled']}")
        if "not_compiled" in r:
            print(f"  not compiled: {r['not_compiled']}")
            continue
        print(
            f"  resident {r['resident_seconds']:.3f} s, streamed {r['host_seconds']:.3f} s ({100 * r['change']:+.1f} %, tokens/s "
            f"{100 / (1 + r['change']) - 100:+.1f} %); {r['exposed_seconds']:.3f} s exposed; "
            f"{(r['resident_hbm_bytes'] - r['hbm_bytes']) / GIB:.2f} GiB of HBM given back at {r['ms_per_gib']:.1f} ms/GiB"
        )
        for bound, use in r["loops"].items():
            print(f"  loop bound by {bound}: link full " + ", ".join(f"{way} {100 * share:.0f} %" for way, share in use.items()))
    for name, why in WORDS:
        print(f"{name}: {why}")


def promises(rows: list[dict]) -> dict[str, bool]:
    """What is promised of these rows, and whether it holds. A row that was not compiled keeps no promise."""
    by_name = {r["row"]: r for r in rows if "not_compiled" not in r}

    def near(row: str, key: str, wanted: float, within: float) -> bool:
        return row in by_name and abs(by_name[row][key] - wanted) <= within

    return {
        f"{MOE}: 0.33 s +- 0.15 of copies exposed": near(MOE, "exposed_seconds", 0.33, 0.15),
        f"{MOE}: 8 ms/GiB +- 3": near(MOE, "ms_per_gib", 8, 3),
        f"{DENSE}: +2.5 % +- 1.5": near(DENSE, "change", 0.025, 0.015),
    }


def rows(only: str = "") -> list[dict]:
    """Every case whose name holds ``only``."""
    return [measure(case) for case in cases() if only in case.name]


def keep(path: Path, made: list[dict]) -> None:
    """Put rows into the JSON of ``validation.py``, beside those that are there."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    old = {row["row"]: row for row in record.get("offload", [])}
    record |= {"jax": jax.__version__, "offload": list((old | {row["row"]: row for row in made}).values()), "words": dict(WORDS)}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose name holds this text")
    parser.add_argument("--json", type=Path, help="also put the rows into this file")
    arguments = parser.parse_args()
    found = rows(arguments.only)
    show(found)
    if arguments.json:
        keep(arguments.json, found)
