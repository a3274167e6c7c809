"""The proof on a real GPU: every form of the runtime run, measured, and held against what was compiled and forecast.

    python benchmarks/gpu_proof.py [--seconds 450] [--only TEXT] [--results FOLDER] [--toy]

Needs one GPU and jax, optax, orbax, scipy, numpy; nothing else. Sizes are chosen from the device's own memory and the host's RAM:

    links      one GiB to the device, to the host, and both at once
    numerics   a small twin, each form against the resident step, on the device
    pairs      a model that fits resident (two fifths of the pool): resident beside each form, so that on and off are measured alike
    overflow   a model whose resident state is 1.25 x the pool: resident must run out, everything on the host must train

Each job is a process of its own, so one that runs out of memory ends alone. ``--seconds`` is a limit for all of them: a job that finds no
time is listed as left out. Every number is marked measured, compiled or forecast. ``--toy`` is the same path at a size for a CPU, where
nothing is proved.
"""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
RESULTS = Path(__file__).parent / "results"
MARK = "gpu_proof: "
LEAST_SECONDS = 15.0
STATE_BYTES, HOST_STATE_BYTES = 16, 12  # of a parameter: fp32 master, two moments, gradient; on the host without the gradient
PAIR_SHARE, OVERFLOW, HOST_SHARE, POOL_SHARE, FRACTION = 0.4, 1.25, 0.5, 0.8, 0.9
MOST_PAIR_PARAMETERS = 2_000_000_000
WARM, MEASURED, TWIN_STEPS = 2, 5, 5
ALL_HOST = {"parameter": "host", "optimizer": "host"}
LOSS_TOLERANCE, UPDATE_TOLERANCE = 1e-4, 1e-2

FORMS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "resident": ({}, {}),
    "optimizer": ({"optimizer": "host"}, {}),
    "activations": ({"activation:layer_input": "host"}, {}),
    "parameters": ({"parameter": "host"}, {}),
    "fused backward": (ALL_HOST, {}),
    "fused backward, no prefetch": (ALL_HOST, {"prefetch": 0}),
    "fused backward off": (ALL_HOST, {"fuse_update": "never"}),
    "everything": (ALL_HOST | {"activation:layer_input": "host"}, {}),
}
PAIRS = (
    *(("optimizer", "resident"), ("activations", "resident"), ("parameters", "resident"), ("fused backward", "fused backward off")),
    *(("fused backward", "fused backward, no prefetch"), ("everything", "resident")),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A decoder and a batch."""

    model: int
    mlp: int
    layers: int
    vocab: int
    batch: int
    seq: int
    dtype: str = "bfloat16"

    @property
    def layer_parameters(self) -> int:
        return 2 * self.model * self.model + 2 * self.model * self.model // 4 + 3 * self.model * self.mlp

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocab * self.model

    def of(self, parameters: float) -> "Size":
        """The same width with as many layers as come nearest to ``parameters``, at least two."""
        return dataclasses.replace(self, layers=max(2, round((parameters - 2 * self.vocab * self.model) / self.layer_parameters)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """``fraction`` is the part of the device that jax's pool takes in the overflow jobs: where the host is smaller than the device, the
    pool is made smaller until a model that fits the host overflows it."""

    twin: Size
    pair: Size
    overflow: Size
    fraction: float
    link_bytes: int
    host_pool_gib: int

    @classmethod
    def from_json(cls, record: dict) -> "Sizes":
        sizes = {name: Size(**record[name]) for name in ("twin", "pair", "overflow")}
        return cls(**sizes, **{name: record[name] for name in ("fraction", "link_bytes", "host_pool_gib")})


def choose_sizes(hbm_bytes: int, host_bytes: int) -> Sizes:
    """Sizes for a device of ``hbm_bytes`` in a host with ``host_bytes``."""
    pool = FRACTION * hbm_bytes
    wide = Size(model=4096, mlp=14336, layers=2, vocab=32000, batch=4, seq=2048)
    base = wide if pool >= 40 * 2**30 else Size(model=2048, mlp=8192, layers=2, vocab=32000, batch=4, seq=2048)
    pair = base.of(min(PAIR_SHARE * pool / STATE_BYTES, HOST_SHARE * host_bytes / HOST_STATE_BYTES, MOST_PAIR_PARAMETERS))
    overflow = base.of(min(OVERFLOW * pool / STATE_BYTES, HOST_SHARE * host_bytes / HOST_STATE_BYTES))
    fraction = min(FRACTION, overflow.parameters * STATE_BYTES / OVERFLOW / hbm_bytes)
    twin = Size(model=512, mlp=1024, layers=4, vocab=2048, batch=4, seq=256, dtype="float32")
    pool_gib = int(POOL_SHARE * host_bytes / 2**30)  # it grows in doubled regions: without a limit the last would be larger than the host
    return Sizes(twin=twin, pair=pair, overflow=overflow, fraction=round(fraction, 3), link_bytes=2**30, host_pool_gib=pool_gib)


def toy_sizes() -> Sizes:
    toy = Size(model=128, mlp=256, layers=3, vocab=256, batch=2, seq=32, dtype="float32")
    return Sizes(twin=toy, pair=toy, overflow=dataclasses.replace(toy, layers=4), fraction=0.5, link_bytes=2**20, host_pool_gib=1)


# ---- what runs in a process of its own


def work_of(size: Size) -> tuple[Any, Any, Any, Any]:
    """Loss, optimizer, traced workload and first parameters' function."""
    import optax

    import forebay as fb
    from forebay.training.models import LlamaConfig, llama

    heads = max(1, size.model // 128)
    config = LlamaConfig(
        vocab=size.vocab, model=size.model, mlp=size.mlp, layers=size.layers, heads=heads, kv_heads=max(1, heads // 4),
        head_dim=size.model // heads, dtype=size.dtype, max_positions=size.seq,
    )  # fmt: skip
    loss_fn, optimizer, params, batch = llama.make(config, batch=size.batch, seq=size.seq, optimizer=optax.adamw(1e-4))
    return loss_fn, optimizer, fb.trace(loss_fn, optimizer, params, batch), lambda key: llama.init_params(config, key)


def tokens(size: Size, step: int) -> dict[str, Any]:
    import numpy as np

    rows = np.random.default_rng(step).integers(0, size.vocab, (size.batch, size.seq + 1), dtype=np.int32)
    return {"tokens": rows}


def job_device(sizes: Sizes | None) -> dict[str, Any]:
    """The device, its memory, and the host's."""
    import importlib.metadata

    import jax

    from forebay.hardware.memory import host_ram_bytes

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")}
    fraction = float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
    limit = stats.get("bytes_limit")
    return {
        "platform": device.platform, "kind": device.device_kind, "hbm_bytes": int(limit / fraction) if limit else None,
        "host_ram_bytes": host_ram_bytes()[0], "versions": versions,
    }  # fmt: skip


def job_links(sizes: Sizes) -> dict[str, Any]:
    """Measured bytes per second of pinned copies; ``both`` is the sum of the two directions while they run together."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    to = {place: one.with_memory_kind(kind) for place, kind in (("device", "device"), ("host", "pinned_host"))}
    count = sizes.link_bytes // 4
    there = jax.device_put(np.ones(count, np.float32), to["host"])
    here = jax.block_until_ready(jax.device_put(jnp.ones(count, jnp.float32), to["device"]))

    def seconds(move: Callable[[], Any]) -> float:
        jax.block_until_ready(move())
        times = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(move())
            times.append(time.perf_counter() - began)
        return min(times)

    inward, outward = (lambda: jax.device_put(there, to["device"])), (lambda: jax.device_put(here, to["host"]))
    alone = {"to_device": seconds(inward), "to_host": seconds(outward)}
    both = seconds(lambda: (inward(), outward()))
    rates = {f"{way}_bytes_per_second": sizes.link_bytes / taken for way, taken in alone.items()}
    return rates | {"both_bytes_per_second": 2 * sizes.link_bytes / both, "bytes": sizes.link_bytes}


def job_numerics(sizes: Sizes) -> dict[str, Any]:
    """Each form of the small twin against the resident one: the worst relative loss, and the parameters' error over their change."""
    import jax
    import numpy as np

    jax.config.update("jax_default_matmul_precision", "highest")
    program = work_of(sizes.twin)
    first = jax.tree.map(np.asarray, jax.jit(program[3])(jax.random.key(0)))
    wanted_losses, wanted = _twin_run(program, first, sizes.twin, "resident")
    change = _norm(wanted, first)
    rows = {}
    for name in (name for name in FORMS if name != "resident"):
        losses, params = _twin_run(program, first, sizes.twin, name)
        loss_error = float(np.max(np.abs(losses - wanted_losses) / np.abs(wanted_losses)))
        update_error = _norm(params, wanted) / change
        passed = loss_error <= LOSS_TOLERANCE and update_error <= UPDATE_TOLERANCE
        rows[name] = {"loss_error": loss_error, "update_error": update_error, "passed": passed}
    return {"forms": rows, "passed": all(row["passed"] for row in rows.values())}


def _norm(one: Any, other: Any) -> float:
    import jax
    import numpy as np

    squares = jax.tree.map(lambda a, b: np.sum((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2), one, other)
    return float(np.sqrt(sum(jax.tree.leaves(squares))))


def _twin_run(program: tuple, first: Any, size: Size, name: str) -> tuple[Any, Any]:
    """Losses and last parameters of a few steps from ``first``."""
    import jax
    import numpy as np

    import forebay as fb

    loss_fn, optimizer, work, _ = program
    plan = fb.Plan.by_hand(work, FORMS[name][0], hardware=_machine(), options={"whole_below_bytes": 0} | FORMS[name][1])
    step = fb.train_step(loss_fn, optimizer, plan)
    state = fb.place(jax.tree.map(np.array, first), optimizer, plan, mesh=_mesh(plan))  # copies: a CPU may donate numpy's own memory
    losses = []
    for k in range(TWIN_STEPS):
        state, metrics = step(state, tokens(size, k))
        losses.append(float(metrics["loss"]))
    return np.asarray(losses), jax.tree.map(np.asarray, state.params)


def job_form(sizes: Sizes, name: str, size: Size) -> dict[str, Any]:
    """One form of the runtime: compiled, run and timed."""
    import jax

    import forebay as fb

    loss_fn, optimizer, work, init_fn = work_of(size)
    rules, options = FORMS[name]
    plan = fb.Plan.by_hand(work, rules, hardware=_machine(), options=options)
    mesh = _mesh(plan)
    step = fb.train_step(loss_fn, optimizer, plan, mesh=mesh)
    batch = jax.device_put(tokens(size, 0), jax.tree.map(lambda leaf: leaf.sharding, plan.abstract_batch(mesh)))
    began = time.perf_counter()
    compiled = step.lower(plan.abstract_state(mesh), batch).compile()
    row: dict[str, Any] = {"parameters": size.parameters, "layers": size.layers, "tokens": size.batch * size.seq}
    row |= {"compile_seconds": time.perf_counter() - began} | _compiled_bytes(compiled) | _forecast(compiled)
    began = time.perf_counter()
    state = fb.init(init_fn, optimizer, plan, jax.random.key(0), mesh=mesh)
    jax.block_until_ready(state)
    row |= {"init_seconds": time.perf_counter() - began, "init_peak_bytes": _peak()}
    times, losses = [], []
    for _ in range(WARM + MEASURED):
        began = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - began)
    measured = times[WARM:]
    row |= {"step_seconds": statistics.median(measured), "fastest_seconds": min(measured), "slowest_seconds": max(measured)}
    return row | {"measured_peak_bytes": _peak(), "first_loss": losses[0], "last_loss": losses[-1]}


def _machine() -> Any:
    """One device of this machine; None on a CPU, which is no target of the compiler."""
    import jax

    import forebay as fb

    if jax.devices()[0].platform == "cpu":
        return None
    return dataclasses.replace(fb.Hardware.here(), devices_per_host=1, topology="1x1x1")


def _mesh(plan: Any) -> Any:
    import jax

    return plan.make_mesh(jax.devices()[:1])


def _peak() -> int | None:
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _compiled_bytes(compiled: Any) -> dict[str, int]:
    sizes = compiled.memory_analysis()
    parts = {"argument": 1, "output": 1, "alias": -1, "temp": 1}
    total = lambda prefix: sum(sign * getattr(sizes, f"{prefix}{part}_size_in_bytes") for part, sign in parts.items())  # noqa: E731
    return {"compiled_hbm_bytes": total(""), "compiled_host_bytes": total("host_")}


def _forecast(compiled: Any) -> dict[str, Any]:
    import forebay as fb
    from forebay.errors import InputError

    machine = _machine()
    if machine is None:
        return {"forecast_seconds": None, "forecast_note": "a CPU has no forecast"}
    try:
        forecast = fb.predict(compiled.as_text(), machine)
    except InputError as unknown:
        return {"forecast_seconds": None, "forecast_note": str(unknown)}
    return {name: getattr(forecast, field) for name, field in _FORECAST.items()}


_FORECAST = {
    "forecast_seconds": "step_seconds", "forecast_low_seconds": "low_seconds", "forecast_high_seconds": "high_seconds",
    "forecast_exposed_seconds": "exposed_copy_seconds",
}  # fmt: skip


def child(job: str, sizes: Sizes | None) -> None:
    """Run one job and print its record on the last line."""
    import jax

    kind, _, name = job.partition(":")
    try:
        if kind in ("device", "links", "numerics"):
            record = {"device": job_device, "links": job_links, "numerics": job_numerics}[kind](sizes)
        else:
            record = job_form(sizes, name, sizes.overflow if kind == "overflow" else sizes.pair)
        record = {"status": "ran"} | record
    except jax.errors.JaxRuntimeError as error:
        record = {"status": "out of memory" if _out_of_memory(error) else "failed", "said": str(error)[:2000]}
    print(MARK + json.dumps(record), flush=True)


def _out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "ut of memory" in str(error)


# ---- the parent: no jax here, so that no job meets a device that is already taken


def jobs() -> list[str]:
    """In the order of what they prove for their time."""
    return ["links", "numerics", *(f"pair:{name}" for name in FORMS), "overflow:everything", "overflow:resident"]


def run_job(job: str, sizes: Sizes | None, fraction: float, seconds: float, toy: bool) -> dict[str, Any]:
    """The record of one job run in a process of its own; what happened, where it printed none."""
    words = [sys.executable, str(Path(__file__).resolve()), "--job", job]
    words += ["--sizes", json.dumps(dataclasses.asdict(sizes))] if sizes else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]])}
    environment |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(fraction)}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2"} | ({"JAX_PLATFORMS": "cpu"} if toy else {})
    environment |= {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(sizes.host_pool_gib)} if sizes else {}
    began = time.perf_counter()
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "stopped", "said": f"not done after {seconds:.0f} s", "seconds": seconds}
    taken = {"seconds": round(time.perf_counter() - began, 1)}
    found = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        return {"status": "failed", "said": f"exit code {done.returncode}: {done.stderr[-1500:]}"} | taken
    return json.loads(found[-1]) | taken


def prove(budget: float, only: str, toy: bool, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the jobs within ``budget`` seconds; the whole record."""
    began = time.perf_counter()
    left = lambda: budget - (time.perf_counter() - began)  # noqa: E731
    device = run_job("device", None, FRACTION, left(), toy)
    if device["status"] != "ran":
        raise SystemExit(f"no device could be asked: {device['said']}")
    if not toy and (device["platform"] != "gpu" or not device["hbm_bytes"]):
        raise SystemExit(f"this is a {device['platform']} ({device['kind']}), not a GPU; --toy runs the same path on a CPU")
    sizes = toy_sizes() if toy else choose_sizes(device["hbm_bytes"], device["host_ram_bytes"])
    record: dict[str, Any] = {"theme": "gpu_proof", "date": datetime.date.today().isoformat(), "device": device, "toy": toy}
    record |= {"budget_seconds": budget, "sizes": dataclasses.asdict(sizes), "jobs": {}}
    for job in (job for job in jobs() if only in job):
        if left() < LEAST_SECONDS:
            record["jobs"][job] = {"status": "left out", "said": f"{max(0.0, left()):.0f} s of {budget:.0f} s were left"}
        else:
            record["jobs"][job] = run_job(job, sizes, sizes.fraction if job.startswith("overflow") else FRACTION, left(), toy)
        say(f"{budget - left():6.0f} s  {job:32s} {record['jobs'][job]['status']}")
    return record | {"seconds": round(budget - left(), 1)}


def table(record: dict[str, Any]) -> str:
    """The record for a person."""
    lines = [f"{record['device']['kind']}, jax {record['device']['versions']['jax']}, {record['seconds']:.0f} s"]
    lines += _links_lines(record["jobs"].get("links", {})) + _numerics_lines(record["jobs"].get("numerics", {}))
    head = f"{'form':38s}{'HBM GiB compiled':>18s}{'measured':>10s}{'host GiB':>10s}"
    lines += ["", head + f"{'step s measured':>17s}{'forecast':>10s}{'low':>8s}{'high':>8s}"]
    for job, row in record["jobs"].items():
        if ":" not in job:
            continue
        if row["status"] != "ran":
            lines.append(f"{job:38s}  {row['status']}: {row['said'].splitlines()[0][:100]}")
            continue
        cells = [_gib(row["compiled_hbm_bytes"]), _gib(row["measured_peak_bytes"]), _gib(row["compiled_host_bytes"])]
        times = [row.get(name) for name in ("step_seconds", "forecast_seconds", "forecast_low_seconds", "forecast_high_seconds")]
        shown = ["-" if t is None else f"{t:.3f}" for t in times]
        lines.append(f"{job:38s}{cells[0]:>18s}{cells[1]:>10s}{cells[2]:>10s}{shown[0]:>17s}{shown[1]:>10s}{shown[2]:>8s}{shown[3]:>8s}")
    return "\n".join([*lines, "", *_pair_lines(record["jobs"])])


def _links_lines(row: dict) -> list[str]:
    if row.get("status") != "ran":
        return [f"links: {row['status']}: {row['said'].splitlines()[0][:100]}"] if row else []
    rates = {way: row[f"{way}_bytes_per_second"] / 1e9 for way in ("to_device", "to_host", "both")}
    return ["links measured, GB/s: " + ", ".join(f"{way.replace('_', ' ')} {rate:.1f}" for way, rate in rates.items())]


def _numerics_lines(row: dict) -> list[str]:
    if row.get("status") != "ran":
        return [f"numerics: {row['status']}: {row['said'].splitlines()[0][:100]}"] if row else []
    lines = [f"numerics against resident, measured: {'passed' if row['passed'] else 'FAILED'}"]
    for name, form in row["forms"].items():
        word = "passed" if form["passed"] else "FAILED"
        errors = f"loss {form['loss_error']:.1e} (at most {LOSS_TOLERANCE:g}), update {form['update_error']:.1e} ({UPDATE_TOLERANCE:g})"
        lines.append(f"  {word}  {name:30s} {errors}")
    return lines


def _pair_lines(rows: dict) -> list[str]:
    lines = []
    for on, off in PAIRS:
        one, other = rows.get(f"pair:{on}", {}), rows.get(f"pair:{off}", {})
        if one.get("status") == other.get("status") == "ran":
            hbm = (one["compiled_hbm_bytes"] - other["compiled_hbm_bytes"]) / 2**30
            slower = one["step_seconds"] / other["step_seconds"]
            lines.append(f"{on} against {off}: HBM {hbm:+.2f} GiB (compiled), step x {slower:.2f} (measured)")
    return lines


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f}"


def keep(record: dict[str, Any], folder: Path) -> Path:
    """Write the record as ``gpu_proof_<machine>_<date>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = record["device"]["kind"].lower().replace(" ", "-").replace("/", "-")
    path = folder / f"gpu_proof_{machine}_jax-{record['device']['versions']['jax']}_{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=450.0, help="time for everything")
    parser.add_argument("--only", default="", help="only jobs whose name holds this text")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--toy", action="store_true", help="the same path at a size for a CPU")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.job:
        child(given.job, Sizes.from_json(json.loads(given.sizes)) if given.sizes else None)
        return 0
    record = prove(given.seconds, given.only, given.toy)
    print(table(record))
    print(f"kept as {keep(record, given.results)}")
    proved = [row for job, row in record["jobs"].items() if job != "overflow:resident"]
    return 0 if all(row["status"] in ("ran", "left out") and row.get("passed", True) for row in proved) else 1


if __name__ == "__main__":
    sys.exit(main())
