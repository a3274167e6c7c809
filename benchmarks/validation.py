"""Forecasts held against published step times: predicted, published, error, where the time goes, and the flops-only baseline.

    python benchmarks/validation.py [--json FILE]

Each program is rebuilt (``published_llama``), compiled for the published machine without it, and replayed with the constants of
``forebay/timeline/constants.toml`` as they stand. Beside the error of those constants stands a leave-one-out error: the one
constant that step times can tell (the limit of bf16 matmuls) is set by the other rows alone, and the baseline's one constant
likewise."""

import argparse
import dataclasses
import json
import math
import statistics
from pathlib import Path

import jax
from published_llama import DOTS_BUT_MLP, DOTS_BUT_MLP_IN, MINIMAL_FLASH, Program, build, streamed_optimizer

import forebay
from forebay.compiler import judge
from forebay.hardware import Hardware
from forebay.timeline.constants import Constants, constants_of
from forebay.timeline.predicting import BASELINE_SHARE, predict, read_schedule
from forebay.training.models.llama import train_flops_per_token
from forebay.training.models.presets import preset
from forebay.units import GIB

LIMITS = [0.60 + 0.005 * i for i in range(37)]


def flags() -> dict:
    """The XLA flags of MaxText's published GPU recipes for Llama-2; autotuning needs the GPU and is off here."""
    # jaxlib 0.12 knows the pipelining options by shorter names and with modes; the old ones are accepted in XLA_FLAGS only
    old = jax.__version_info__ < (0, 11)
    name, on = ("xla_gpu_enable_pipelined_{}", True) if old else ("xla_gpu_pipeline_{}", "COLLECTIVE_PIPELINING_MODE_ON")
    return {name.format(kind): on for kind in ("all_gather", "reduce_scatter", "all_reduce")} | {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
        "xla_disable_hlo_passes": "rematerialization",
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published measurement and the program that it timed."""

    name: str
    machine: str
    published_seconds: float
    source: str
    program: Program


_7B = Program(model="llama-2-7b", seq=4096, sequences_per_device=2, fsdp=8, kept=MINIMAL_FLASH, scanned=False)
_70B = Program(model="llama-2-70b", seq=4096, sequences_per_device=2, fsdp=64, kept=DOTS_BUT_MLP_IN)
DGXC = "NVIDIA dgxc-benchmarking"
ROWS = (
    Row(name="Llama-2-7B", machine="h100-sxm:8", published_seconds=0.721, source="JAX-Toolbox, MaxText README", program=_7B),
    Row(name="Llama-2-70B", machine="h100-sxm:64", published_seconds=6.999, source=DGXC, program=_70B),
    Row(
        name="Llama-2-70B x 4", machine="h100-sxm:256", published_seconds=7.153, source=DGXC,
        program=dataclasses.replace(_70B, data=4),
    ),
    Row(
        name="Llama-2-70B x 16", machine="h100-sxm:1024", published_seconds=7.084, source=DGXC,
        program=dataclasses.replace(_70B, data=16),
    ),
    Row(
        name="Llama-2-70B FP8", machine="h100-sxm:64", published_seconds=4.324, source=DGXC,
        program=dataclasses.replace(_70B, kept=DOTS_BUT_MLP, fp8=True),
    ),
)  # fmt: skip


def compiled(built, machine: Hardware, options: dict) -> str:
    """The scheduled HLO of a built program on ``machine``."""
    step, arguments, mesh = built
    with jax.sharding.use_abstract_mesh(mesh):
        verdict = judge(step, arguments, machine, compiler_options=options)
    if not verdict.compiled:
        raise SystemExit(f"{machine.name}: {verdict.reason}")
    return verdict.hlo


def limited(constants: Constants, limit: float) -> Constants:
    """The constants with another limit for bf16 matmuls."""
    matmul = dataclasses.replace(constants.matmul, limit=constants.matmul.limit | {"bf16": limit})
    return dataclasses.replace(constants, matmul=matmul)


def measure(row: Row) -> dict:
    """One row's forecast, the baseline, and the forecast as a function of the bf16 limit."""
    machine = Hardware.named(row.machine)
    schedule = read_schedule(compiled(build(row.program), machine, flags()))
    config = preset(row.program.model)
    constants = constants_of(machine.chip.name, machine.chip.vendor)
    forecast = predict(schedule, machine, tokens=row.program.tokens, flops_per_token=train_flops_per_token(config, row.program.seq))
    curve = [predict(schedule, machine, constants=limited(constants, limit)).step_seconds for limit in LIMITS]
    return {
        "row": row.name, "machine": row.machine, "source": row.source, "published_seconds": row.published_seconds,
        "predicted_seconds": forecast.step_seconds, "low_seconds": forecast.low_seconds, "high_seconds": forecast.high_seconds,
        "error": forecast.step_seconds / row.published_seconds - 1, "baseline_seconds": forecast.baseline_seconds,
        "baseline_error": forecast.baseline_seconds / row.published_seconds - 1, "mfu": forecast.mfu, "path": dict(forecast.path),
        "unknown_share": forecast.unknown_share, "replay_seconds": forecast.replay_seconds,
        "exposed_collective_seconds": forecast.exposed_collective_seconds, "curve": curve,
    }  # fmt: skip


def leave_one_out(rows: list[dict]) -> None:
    """Adds to each row the error with the constant that the other rows choose: for the forecast and for the baseline."""
    for row in rows:
        others = [other for other in rows if other is not row]
        worst = [sum(math.log(o["curve"][i] / o["published_seconds"]) ** 2 for o in others) for i in range(len(LIMITS))]
        best = worst.index(min(worst))
        row["left_out_limit"] = LIMITS[best]
        row["left_out_error"] = row["curve"][best] / row["published_seconds"] - 1
        scale = math.exp(statistics.fmean(math.log(o["published_seconds"] / o["baseline_seconds"]) for o in others))
        row["left_out_baseline_error"] = row["baseline_seconds"] * scale / row["published_seconds"] - 1


def streamed_row() -> dict:
    """The optimizer copies of a 360 B-parameter MoE step on 64 GB200 (published: 34.6 GiB of state, about 0.33 s of copies exposed,
    8 ms/GiB).

    Compiled is the streamed update alone, with float32 moments of the published size: routing and experts do not touch these copies.
    """
    machine = Hardware.named("gb200:64")
    text = compiled(streamed_optimizer(int(34.6 * GIB), machine.devices), machine, {"xla_gpu_autotune_level": 0})
    forecast = predict(text, machine)
    loop = forecast.loops[0]
    return {
        "row": "streamed optimizer, 34.6 GiB", "machine": machine.name, "published_exposed_seconds": 0.33, "published_ms_per_gib": 8.0,
        "exposed_seconds": forecast.exposed_copy_seconds, "ms_per_gib": forecast.exposed_ms_per_gib, "link_use": dict(loop.link_use),
        "bound": loop.bound,
    }  # fmt: skip


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def show(rows: list[dict], streamed: dict) -> None:
    """Print the tables."""
    print(f"jax {jax.__version__}, forebay {forebay.__version__}. Forecasts with the constants as they stand.")
    print(
        f"baseline: executed flops / ({BASELINE_SHARE} x peak). left out: the one constant set by the other rows (forecast: bf16 limit)\n"
    )
    titles = ("row", "machine", "published", "forecast", "low", "high", "error", "baseline", "limit", "left out", "left out baseline")
    widths = (18, 14, 9, 8, 6, 6, 8, 8, 6, 8, 17)
    print("  ".join(t.ljust(w) if i < 2 else t.rjust(w) for i, (t, w) in enumerate(zip(titles, widths, strict=True))))
    for r in rows:
        seconds = [f"{r[key]:.3f}" for key in ("published_seconds", "predicted_seconds", "low_seconds", "high_seconds")]
        errors = [percent(r["error"]), percent(r["baseline_error"]), f"{r['left_out_limit']:.3f}"]
        errors += [percent(r["left_out_error"]), percent(r["left_out_baseline_error"])]
        cells = [r["row"], r["machine"], *seconds, *errors]
        print("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))))
    for key in ("error", "baseline_error", "left_out_error", "left_out_baseline_error"):
        sizes = [abs(r[key]) for r in rows]
        print(f"  {key:24} median {100 * statistics.median(sizes):4.1f} %  largest {100 * max(sizes):4.1f} %")
    show_causes(rows)
    print(
        f"\n{streamed['row']} on {streamed['machine']}: exposed {streamed['exposed_seconds']:.3f} s "
        f"(published about {streamed['published_exposed_seconds']}), {streamed['ms_per_gib']:.1f} ms/GiB "
        f"(published about {streamed['published_ms_per_gib']:.0f}), bound by {streamed['bound']}"
    )
    print("No number for TPU v6e, TPU 7x (the rate of their host link is not published) and MI355X (no compiler for it at hand).")


def show_causes(rows: list[dict]) -> None:
    """Seconds by cause; a row adds up to its forecast."""
    kinds = sorted({k for r in rows for k in r["path"]}, key=lambda k: -sum(r["path"].get(k, 0) for r in rows))
    print("\n" + "seconds by cause".ljust(18) + "".join(k.rjust(20) for k in kinds))
    for r in rows:
        print(r["row"].ljust(18) + "".join(f"{r['path'].get(k, 0):20.4f}" for k in kinds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the rows here")
    arguments = parser.parse_args()
    measured = [measure(row) for row in ROWS]
    leave_one_out(measured)
    offloaded = streamed_row()
    show(measured, offloaded)
    if arguments.json:
        for row in measured:
            del row["curve"]
        record = {"jax": jax.__version__, "rows": measured, "streamed": offloaded}
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
