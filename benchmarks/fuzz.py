"""Damaged files from outside: each is read or refused with a ForebayError, within a second, and memory does not grow.

    python benchmarks/fuzz.py [--inputs N] [--seed N] [--only TEXT] [--results FOLDER] [--keep FOLDER]

Inputs are mutations of real files: a plan.json with a verdict and a forecast, a run's config.json, Hugging Face config.json, a machine's
record, an entry of the compile cache, a checkpoint's record, scheduled HLO of both compilers, logs of runs that ran out of memory
(``mutations.py`` says how). What is accepted is also used: a plan is bound to its model and printed, a schedule is replayed, a peak
explained. Any other exception than ForebayError, and an input that takes more than a second of processor time, is a finding: it is
written to the folder of ``--keep``, and the exit code is 1.
"""

import argparse
import contextlib
import dataclasses
import datetime
import gzip
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import record
from mutations import mutated_bytes, mutated_hlo, mutated_json

import forebay as fb
from forebay.errors import ForebayError

INPUTS, SECONDS, STUCK_SECONDS, WARM_UP = 10_000, 1.0, 20, 300
TESTS = Path(__file__).parents[1] / "tests"
FIXTURES, LOGS = TESTS / "timeline" / "fixtures", TESTS / "trust" / "fixtures"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One way in: real ``samples``, how to ``mutate`` one, and what to do with the bytes."""

    name: str
    samples: tuple[Any, ...]
    mutate: Callable[[random.Random, Any], bytes]
    use: Callable[[bytes], object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input that was neither used nor refused as it should be."""

    target: str
    number: int
    what: str
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of the inputs of one target. Seconds are of the processor."""

    target: str
    inputs: int
    used: int
    refused: int
    slowest_seconds: float
    grown_bytes: int
    findings: tuple[Finding, ...]


class _Stuck(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def _stop(*_):
    raise _Stuck


def run(target: Target, inputs: int, seed: int) -> Outcome:
    """Feed ``inputs`` mutations to ``target``."""
    counts, findings, slowest, warm = Counter(), [], 0.0, 0
    signal.signal(signal.SIGPROF, _stop)
    for number in range(inputs):
        rng = random.Random(f"{seed}/{target.name}/{number}")
        data = target.mutate(rng, rng.choice(target.samples))
        begun = time.process_time()
        what = attempt(target, data)
        seconds = time.process_time() - begun
        slowest = max(slowest, seconds)
        counts[what] += 1
        if what not in ("used", "refused") or seconds > SECONDS:
            findings.append(Finding(target=target.name, number=number, what=f"{what} in {seconds:.2f} s", data=data))
        if number == min(WARM_UP, inputs // 2):
            warm = _resident_bytes()
    return Outcome(
        target=target.name, inputs=inputs, used=counts["used"], refused=counts["refused"], slowest_seconds=slowest,
        grown_bytes=_resident_bytes() - warm, findings=tuple(findings),
    )  # fmt: skip


def attempt(target: Target, data: bytes) -> str:
    """``used``, ``refused``, or the exception that a user would have seen."""
    signal.setitimer(signal.ITIMER_PROF, STUCK_SECONDS)
    try:
        target.use(data)
        return "used"
    except ForebayError as error:
        return "refused" if str(error).strip() else f"an empty message: {type(error).__name__}"
    except _Stuck:
        return "stuck"
    except Exception as error:  # the finding itself: whatever it is, a user would have seen it
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def targets(folder: Path) -> tuple[Target, ...]:
    """Every way in, with its samples; files are written to ``folder``."""
    plan, work = _plan()
    return (
        Target(name="plan.json", samples=(plan,), mutate=mutated_json, use=lambda data: _use_plan(_file(folder, data), work)),
        Target(name="run config.json", samples=(_run_config(folder),), mutate=mutated_json, use=lambda data: _use_run(_file(folder, data))),
        Target(name="model config.json", samples=MODELS, mutate=mutated_json, use=lambda data: _use_model(_file(folder, data))),
        Target(name="machine record", samples=_machines(), mutate=mutated_json, use=_use_machine),
        Target(name="compile cache", samples=(_cache_entry(),), mutate=mutated_bytes, use=lambda data: _use_cache(folder, data)),
        Target(name="checkpoint record", samples=(CHECKPOINT,), mutate=mutated_json, use=_use_checkpoint),
        Target(name="HLO", samples=_schedules(), mutate=mutated_hlo, use=_use_hlo),
        Target(name="log of a run out of memory", samples=_logs(), mutate=mutated_hlo, use=_use_log),
    )


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "config.json"
    path.write_bytes(data)
    return path


def _plan() -> tuple[dict, Any]:
    """A plan.json as ``forebay plan`` writes it, and its workload."""
    import jax.numpy as jnp
    import optax

    def loss(params, batch):
        body = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(body, batch, params)[0] ** 2)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    work = fb.trace(loss, optax.adamw(1e-3), {"up": shape(4, 256, 512), "down": shape(4, 512, 256)}, shape(16, 256), reduction="mean")
    machine = fb.Hardware.named("h100-sxm:8")
    plan = fb.Plan.by_hand(work, {"parameter": "host", "optimizer": "host[0:2]"}, hardware=machine)
    forecast = fb.predict(_text("offload_gpu_0.12.0.1"), machine).to_json()
    return json.loads(json.dumps(dataclasses.replace(plan, verdict=_verdict(), forecast=forecast).to_json())), work


def _verdict():
    from forebay.records import Hazard, HostCopy, Memory, Verdict

    copies = (HostCopy(name="c", direction="to_host", bytes=1024, asynchronous=True, loop="body", trip_count=4),)
    return Verdict(
        fits=True, reason="within", hbm=Memory(argument_bytes=10, temp_bytes=2**30), host=Memory(argument_bytes=2**30),
        hbm_budget_bytes=2**36, host_budget_bytes=2**38, host_copies=copies, hazards=(Hazard(id="remat3", message="m", action="a"),),
        honoured=("optimizer:0/mu/up",), messages=("said",), attention={"fmha": 2}, versions={"jax": "0.12.0"},
        compiler_options={"xla_x": True}, target="cuda", compile_seconds=1.5,
    )  # fmt: skip


def _use_plan(path: Path, work: Any) -> None:
    from forebay.report.tables import render_entries, render_plan

    loaded = fb.Plan.load(path)
    str(loaded)
    text = render_plan(loaded.to_json())
    text += render_entries(loaded.to_json(), "*")
    text.encode()
    bound = loaded.bind(work)
    bound.abstract_state(), bound.abstract_batch(), bound.streams, bound.fused, bound.copies


def _run_config(folder: Path) -> dict:
    from forebay.training import config

    return config.to_json(config.TrainConfig(place=("optimizer=host",), out=folder))


def _use_run(path: Path) -> None:
    from forebay.training import config

    config.to_json(config.load(path.parent))


MODELS = (
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                       "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560,
        "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None, "hidden_act": "silu",
        "tie_word_embeddings": True, "use_sliding_window": False, "layer_types": ["full_attention"] * 4, "sliding_window": None,
    },
)  # fmt: skip


def _use_model(path: Path) -> None:
    from forebay.training.models.huggingface import load_config

    str(load_config(path)).encode()


def _machines() -> tuple[dict, ...]:
    return tuple(json.loads(json.dumps(fb.Hardware.named(name).to_json())) for name in ("h100-sxm:8", "tpu-7x:2x2x1"))


def _use_machine(data: bytes) -> None:
    from forebay.records import reading

    machine = fb.Hardware.from_json(reading.parse(data.decode(errors="replace")))
    json.dumps(machine.to_json())


def _cache_entry() -> bytes:
    from forebay.compiler import cache
    from forebay.compiler.outcome import COMPILED, Outcome

    with _cache_folder(Path(tempfile.mkdtemp())) as folder:
        sizes = {space: {f"{word}_bytes": 1 for word in ("argument", "output", "alias", "temp", "code")} for space in ("hbm", "host")}
        cache.write("sample", Outcome(status=COMPILED, sizes=sizes, messages=("m",), hlo_gzip=gzip.compress(b"HloModule m")))
        return (folder / "sample.verdict").read_bytes()


@contextlib.contextmanager
def _cache_folder(folder: Path) -> Iterator[Path]:
    import os

    before = os.environ.get("FOREBAY_CACHE")
    os.environ["FOREBAY_CACHE"] = str(folder)
    try:
        yield folder
    finally:
        os.environ.pop("FOREBAY_CACHE") if before is None else os.environ.update(FOREBAY_CACHE=before)


def _use_cache(folder: Path, data: bytes) -> None:
    from forebay.compiler import cache

    with _cache_folder(folder):
        (folder / "sample.verdict").write_bytes(data)
        found, said = cache.read("sample")
        assert found is not None or "compiled again" in said[0]


CHECKPOINT = {
    "format": 1, "step": 3, "run": {"model": {"layers": 4}, "data_fingerprint": "abc"},
    "leaves": {"params.w": {"shape": [4, 4], "dtype": "float32", "key": None},
               "key": {"shape": [2], "dtype": "uint32", "key": "threefry2x32"}},
}  # fmt: skip


def _use_checkpoint(data: bytes) -> None:
    from forebay.records import reading
    from forebay.training.checkpoints import read_record

    read_record(reading.parse(data.decode(errors="replace")))


def _text(name: str) -> str:
    return gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode()


def _schedules() -> tuple[str, ...]:
    return tuple(_text(path.name.removesuffix(".hlo.gz")) for path in sorted(FIXTURES.glob("*.hlo.gz")))


def _use_hlo(data: bytes) -> None:
    from forebay.compiler.hlo import read_hlo

    text = data.decode(errors="replace")
    count = re.search(r"num_partitions=([1248])\b", text)
    problem = None
    try:
        fb.predict(text, fb.Hardware.named(f"h100-sxm:{count.group(1) if count else 1}"))
    except ForebayError as error:
        problem = error
    read_hlo(text)
    with contextlib.suppress(ForebayError):  # what a schedule is refused for is told below
        str(fb.explain_oom(text)).encode()
    if problem is not None:
        raise problem


def _logs() -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted(LOGS.glob("oom_*.log")))


def _use_log(data: bytes) -> None:
    str(fb.explain_oom(data.decode(errors="replace"))).encode()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only targets whose name holds this text")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON file")
    parser.add_argument("--keep", type=Path, help="folder for inputs that are findings")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        chosen = [t for t in targets(Path(scratch)) if given.only in t.name]
        outcomes = [run(t, given.inputs // len(chosen), given.seed) for t in chosen]
    for o in outcomes:
        grown = f"{o.grown_bytes / 2**20:+.1f} MiB"
        print(f"{o.target:26} {o.inputs:6} inputs {o.used:6} used {o.refused:6} refused, slowest {o.slowest_seconds:.3f} s, {grown}")
        for finding in o.findings:
            print(f"  {finding.number}: {finding.what}")
            if given.keep:
                given.keep.mkdir(parents=True, exist_ok=True)
                (given.keep / f"{finding.target.replace(' ', '-')}-{finding.number}").write_bytes(finding.data)
    _write(given, outcomes)
    return 1 if any(o.findings for o in outcomes) else 0


def _write(given: argparse.Namespace, outcomes: list[Outcome]) -> None:
    today = datetime.date.today().isoformat()
    rows = [dataclasses.asdict(o) | {"findings": [f"{f.number}: {f.what}" for f in o.findings]} for o in outcomes]
    given.results.mkdir(parents=True, exist_ok=True)
    kept = {"theme": "fuzz", "date": today, "seed": given.seed, "inputs": sum(o.inputs for o in outcomes), "jax": jax.__version__}
    kept["rows"] = rows
    path = given.results / f"fuzz_cpu-jax-{jax.__version__}_{today}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
