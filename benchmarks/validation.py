"""Forecasts held against published step times: predicted, published, error, where the time goes, and the flops-only baseline.

    python benchmarks/validation.py [--json FILE]

Each program is rebuilt (``published_llama``), compiled for the published machine without it, and replayed with the constants of
``forebay/timeline/constants.toml`` as they stand. Beside the error of those constants stands a leave-one-out error: every constant that
was chosen with these rows in view (``REFITTED``: the limit of bf16 matmuls, the share of the HBM rate, the gap between kernels) is
set anew by bounded least squares on the other rows, and the baseline's one constant likewise. The rows with offload follow
(``published_offload``)."""

import argparse
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path

import jax
import published_offload
from published_llama import DOTS_BUT_MLP, DOTS_BUT_MLP_IN, MINIMAL_FLASH, Program, build
from scipy import optimize

import forebay
from forebay.compiler import judge
from forebay.hardware import Hardware
from forebay.records.verdict import Verdict
from forebay.timeline.constants import Constants, constants_of
from forebay.timeline.predicting import BASELINE_SHARE, Schedule, predict, read_schedule, step_seconds
from forebay.training.models.llama import make, train_flops_per_token
from forebay.training.models.presets import preset

REFITTED = {"bf16 limit": (0.60, 0.80), "HBM share": (0.70, 0.95), "gap": (0.5e-6, 5e-6)}
"""The constants that these rows moved, and the bounds of a refit: a little wider than what is published (0.68 to 0.80; 0.87 to 0.89 for a
triad, less for other kernels; one to a few microseconds)."""


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


def compiled(built, machine: Hardware, options: dict) -> Verdict:
    """The compiler's verdict on a built program for ``machine``."""
    step, arguments, mesh = built
    with jax.sharding.use_abstract_mesh(mesh):
        return judge(step, arguments, machine, compiler_options=options)


def refitted(constants: Constants, values) -> Constants:
    """The constants with other values of REFITTED, in that order."""
    limit, share, gap = values
    matmul = dataclasses.replace(constants.matmul, limit=constants.matmul.limit | {"bf16": limit})
    return dataclasses.replace(constants, matmul=matmul, memory_efficiency=share, gap_seconds=gap)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A row with its schedule, to be replayed under any constants."""

    row: Row
    machine: Hardware
    schedule: Schedule
    constants: Constants

    def error(self, values) -> float:
        """The logarithm of forecast over published with other values of REFITTED."""
        seconds = step_seconds(self.schedule, self.machine, constants=refitted(self.constants, values))
        return math.log(seconds / self.row.published_seconds)


def read(row: Row) -> Replayed | dict:
    """Compile a row: its schedule, or the row that says why there is none."""
    machine = Hardware.named(row.machine)
    verdict = compiled(build(row.program), machine, flags())
    if not verdict.compiled:
        return {"row": row.name, "machine": row.machine, "not_compiled": verdict.reason}
    constants = constants_of(machine.chip.name, machine.chip.vendor)
    return Replayed(row=row, machine=machine, schedule=read_schedule(verdict.hlo), constants=constants)


def measure(read: Replayed) -> dict:
    """One row's forecast and the baseline."""
    row, config = read.row, preset(read.row.program.model)
    per_token = train_flops_per_token(config, row.program.seq)
    forecast = predict(read.schedule, read.machine, tokens=row.program.tokens, flops_per_token=per_token)
    return {
        "row": row.name, "machine": row.machine, "source": row.source, "published_seconds": row.published_seconds,
        "predicted_seconds": forecast.step_seconds, "low_seconds": forecast.low_seconds, "high_seconds": forecast.high_seconds,
        "error": forecast.step_seconds / row.published_seconds - 1, "baseline_seconds": forecast.baseline_seconds,
        "baseline_error": forecast.baseline_seconds / row.published_seconds - 1, "mfu": forecast.mfu, "path": dict(forecast.path),
        "unknown_share": forecast.unknown_share, "replay_seconds": forecast.replay_seconds,
        "exposed_collective_seconds": forecast.exposed_collective_seconds,
    }  # fmt: skip


def refit(others: list[Replayed]) -> list[float]:
    """The values of REFITTED that fit ``others`` best within the bounds, from the constants as they stand."""
    now = others[0].constants
    low, high = zip(*REFITTED.values(), strict=True)
    start = (now.matmul.limit["bf16"], now.memory_efficiency, now.gap_seconds)
    # each constant counts from the middle of its bounds in units of their half width, so that a step means as much for each
    middle, half = [[(b + s * a) / 2 for a, b in zip(low, high, strict=True)] for s in (1, -1)]
    back = lambda x: [m + h * v for m, h, v in zip(middle, half, x, strict=True)]  # noqa: E731
    found = optimize.least_squares(
        lambda x: [other.error(back(x)) for other in others], [(v - m) / h for v, m, h in zip(start, middle, half, strict=True)],
        bounds=(-1, 1), diff_step=0.02, xtol=1e-4, ftol=1e-6,
    )  # fmt: skip
    return back(found.x)


def leave_one_out(rows: list[dict], replayed: list[Replayed]) -> None:
    """Adds to each row the error with the constants that the other rows choose: for the forecast and for the baseline."""
    for row, own in zip(rows, replayed, strict=True):
        values = refit([other for other in replayed if other is not own])
        row["left_out"] = dict(zip(REFITTED, values, strict=True))
        row["left_out_error"] = math.exp(own.error(values)) - 1
        others = [other for other in rows if other is not row]
        scale = math.exp(statistics.fmean(math.log(o["published_seconds"] / o["baseline_seconds"]) for o in others))
        row["left_out_baseline_error"] = row["baseline_seconds"] * scale / row["published_seconds"] - 1


def verdicts(rows: list[dict], replay: dict) -> dict[str, bool]:
    """What is promised of these rows and of the replay, and whether it holds. A row that was not compiled keeps no promise."""
    timed = [r for r in rows if "not_compiled" not in r]
    if len(timed) < len(rows) or not rows:
        return {"every row compiled": False}
    left = [abs(r["left_out_error"]) for r in rows]
    return {
        "every H100 row within 10 %": all(abs(r["error"]) <= 0.10 for r in rows),
        "left out: median under 8 %": statistics.median(left) < 0.08,
        "left out: none over 15 %": max(left) <= 0.15,
        "closer than the baseline, fitted to the same rows": statistics.median(left)
        < statistics.median(abs(r["left_out_baseline_error"]) for r in rows),
        "llama-3.1-70b read and replayed in 2 s": replay.get("read_and_replay_seconds", math.inf) < 2.0,
    }


def replay_row() -> dict:
    """How long reading and replaying the whole step of a 70 B model takes."""
    machine = Hardware.named("h100-sxm:16x8")
    loss, optimizer, params, batch = make(preset("llama-3.1-70b"), batch=128, seq=8192)
    plan = forebay.Plan.by_hand(forebay.trace(loss, optimizer, params, batch), {"optimizer": "host"}, hardware=machine)
    verdict = judge(forebay.train_step(loss, optimizer, plan), (plan.abstract_state(), plan.abstract_batch()), machine, plan=plan)
    row = {"row": "llama-3.1-70b", "machine": machine.name}
    if not verdict.compiled:
        return row | {"not_compiled": verdict.reason}
    text, seconds = verdict.hlo, []
    for _ in range(3):  # the best: other work on the machine only makes it slower
        began = time.perf_counter()
        forecast = predict(text, machine)
        seconds.append(time.perf_counter() - began)
    return row | {"read_and_replay_seconds": min(seconds), "step_seconds": forecast.step_seconds}


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def show(rows: list[dict]) -> None:
    """Print the tables of the rows that were compiled."""
    print(f"jax {jax.__version__}, forebay {forebay.__version__}. Forecasts with the constants as they stand.")
    print(
        f"baseline: executed flops / ({BASELINE_SHARE} x peak). left out: {', '.join(REFITTED)} set by the other rows (the baseline: its "
        "one constant)\n"
    )
    titles = ("row", "machine", "published", "forecast", "low", "high", "error", "baseline", *REFITTED, "left out", "left out baseline")
    widths = (18, 14, 9, 8, 6, 6, 8, 8, 10, 9, 7, 8, 17)
    print("  ".join(t.ljust(w) if i < 2 else t.rjust(w) for i, (t, w) in enumerate(zip(titles, widths, strict=True))))
    for r in rows:
        seconds = [f"{r[key]:.3f}" for key in ("published_seconds", "predicted_seconds", "low_seconds", "high_seconds")]
        errors = [percent(r["error"]), percent(r["baseline_error"])]
        errors += [f"{r['left_out'][name]:.3g}" for name in REFITTED]
        errors += [percent(r["left_out_error"]), percent(r["left_out_baseline_error"])]
        cells = [r["row"], r["machine"], *seconds, *errors]
        print("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))))
    for key in ("error", "baseline_error", "left_out_error", "left_out_baseline_error"):
        sizes = [abs(r[key]) for r in rows]
        print(f"  {key:24} median {100 * statistics.median(sizes):4.1f} %  largest {100 * max(sizes):4.1f} %")
    show_causes(rows)


def show_causes(rows: list[dict]) -> None:
    """Seconds by cause; a row adds up to its forecast."""
    kinds = sorted({k for r in rows for k in r["path"]}, key=lambda k: -sum(r["path"].get(k, 0) for r in rows))
    print("\n" + "seconds by cause".ljust(18) + "".join(k.rjust(20) for k in kinds))
    for r in rows:
        print(r["row"].ljust(18) + "".join(f"{r['path'].get(k, 0):20.4f}" for k in kinds))


def steps() -> dict:
    """The rows of step times, printed: measured, left out, and what is promised of them. One that does not compile says so."""
    found = [read(row) for row in ROWS]
    replayed, refused = [f for f in found if isinstance(f, Replayed)], [f for f in found if not isinstance(f, Replayed)]
    rows, replay = [measure(row) for row in replayed], replay_row()
    if len(rows) > 1:
        leave_one_out(rows, replayed)
        show(rows)
    for row in (*refused, *([replay] if "not_compiled" in replay else [])):
        print(f"{row['row']} on {row['machine']} was not compiled: {row['not_compiled']}")
    promised = verdicts(rows + refused, replay)
    tell(promised)
    if "not_compiled" not in replay:
        print(f"\n{replay['row']} on {replay['machine']}: schedule read and replayed in {replay['read_and_replay_seconds']:.2f} s")
    return {"rows": rows + refused, "promised": promised, "replay": replay}


def tell(promised: dict[str, bool]) -> None:
    """Print what is promised and whether it holds."""
    print("\n".join(f"{'yes' if holds else 'NO '} {what}" for what, holds in promised.items()))


def offload() -> dict:
    """The rows with offload, printed."""
    rows = published_offload.rows()
    published_offload.show(rows)
    promised = published_offload.promises(rows)
    tell(promised)
    return {"offload": rows, "offload_promised": promised, "words": dict(published_offload.WORDS)}


PARTS = {"steps": steps, "offload": offload}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here; the other parts of a file that is there are kept")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; by default all")
    arguments = parser.parse_args()
    for name in arguments.only or PARTS:
        made = {"jax": jax.__version__} | PARTS[name]()
        if arguments.json:
            kept = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
            arguments.json.write_text(json.dumps(kept | made, indent=1) + "\n", encoding="utf-8")
