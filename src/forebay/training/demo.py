"""The demonstration behind ``make demo``: train, stop, resume in a new process, sample, and ask XLA:GPU about eight H100.

Everything goes through the commands that a person would type; each is printed before it runs. The model is a small Llama, its text
the Python standard library. The optimizer's state stands on the host, and so does the input of each layer, the one activation that
is kept. The exit code is 0 only if the loss ends at 70 % of the text's unigram entropy or less, and the resumed process went on
from the first one's checkpoint.
"""

import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import tyro

from forebay.training import data, metrics
from forebay.training.config import load

MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
PLACED = ("--place", "optimizer=host", "--place", "activation:layer_input=host")
LARGEST_PART = 0.70
AVERAGED_STEPS = 20
STOPPED = 128 + signal.SIGINT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Train a small language model with its optimizer and activations on the host; a few minutes on two CPU cores."""

    out: Path = Path("runs/demo")
    """Where the run is written; a number is added where that is taken."""
    steps: int = 300
    """Optimizer steps."""
    batch: int = 8
    """Sequences of a step."""
    seq: int = 128
    """Bytes of a sequence."""
    learning_rate: float = 3e-3
    """The peak."""


def main(words: list[str] | None = None) -> int:
    """Run the demonstration; the exit code."""
    demo = tyro.cli(Demo, args=words, prog="python -m forebay.training.demo")
    folder = _free(demo.out)
    folder.mkdir(parents=True)
    model = folder / "model.json"
    model.write_text(json.dumps(MODEL, indent=2) + "\n")
    begun = time.monotonic()
    sizes = ("--steps", demo.steps, "--batch", demo.batch, "--seq", demo.seq)
    rates = ("--optimizer.learning-rate", demo.learning_rate, "--optimizer.warmup-fraction", 0.1)
    log = folder / metrics.METRICS_FILE
    ended = _run_and_stop(_words("train", "--model", model, "--out", folder, *sizes, *rates, *PLACED), log, demo.steps // 2)
    stopped_at = _lines(log)
    if ended != STOPPED or not 0 < stopped_at < demo.steps:
        return _failed(
            f"the first process ended with {ended} after step {stopped_at}; Ctrl-C at step {demo.steps // 2} should end it with {STOPPED}"
        )
    _title(f"The process was stopped (Ctrl-C) after step {stopped_at}. Another one goes on from its checkpoint.")
    resumed = _run(_words("train", "--resume", "--out", folder))
    if resumed or _lines(log) != demo.steps:
        return _failed(f"the second process ended with {resumed} after step {_lines(log)} of {demo.steps}")
    train, validation = _text(folder)
    learnt = _report_loss(folder, data.unigram_entropy_nats(train), stopped_at)
    _report_model(folder, validation)
    _title("The same kind of step for Llama-3.1-8B on 8 x H100, by XLA:GPU, on this machine without a GPU:")
    asked = _run(_words("plan", "--model", "llama-3.1-8b", "--hardware", "h100-sxm:8", "--seq", 8192, "--batch", 8, *PLACED))
    _title(f"{time.monotonic() - begun:.0f} s in all; the run is in {folder}")
    return 0 if learnt and (asked == 0 or importlib.util.find_spec("jax_cuda13_plugin") is None) else 1


def _failed(why: str) -> int:
    print(f"demo: {why}", file=sys.stderr)
    return 1


def _free(wanted: Path) -> Path:
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _title(text: str) -> None:
    print(f"\n--- {text}", flush=True)


def _words(command: str, *words: object) -> list[str]:
    return [command, *map(str, words)]


def _start(words: list[str]) -> subprocess.Popen:
    """``forebay WORDS`` as a process of its own, on this process's terminal; both training processes share compiled programs."""
    print(f"\n$ forebay {shlex.join(words)}", flush=True)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(Path(os.environ.get("FOREBAY_CACHE", "~/.cache/forebay")).expanduser() / "programs")}
    return subprocess.Popen([sys.executable, "-m", "forebay", *words], env=cache | os.environ)


def _run(words: list[str]) -> int:
    with _start(words) as process:
        return process.wait()


def _run_and_stop(words: list[str], log: Path, at_step: int) -> int:
    """Start a training process, press its Ctrl-C once ``at_step`` is in its log; its exit code."""
    with _start(words) as process:
        while process.poll() is None and _lines(log) < at_step:
            time.sleep(0.1)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        return process.wait()


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _text(folder: Path) -> tuple[data.Batches, data.Batches | None]:
    """Training and validation batches of a run."""
    config = load(folder)
    corpus = data.open_corpus(config.data.paths)
    return data.split(corpus, batch=config.data.batch, seq=config.data.seq, validation_fraction=config.data.validation_fraction)


def _report_loss(folder: Path, entropy: float, stopped_at: int) -> bool:
    """Print the loss against the unigram entropy of the text; whether it is low enough."""
    rows = metrics.read(folder / metrics.METRICS_FILE)
    _title(f"The loss, in nats per byte, measured; unigram entropy of the text: {entropy:.4f} nats")
    every = max(1, len(rows) // 10)
    for row in [*rows[::every], rows[-1]]:
        resumed = "  resumed" if stopped_at < row["step"] <= stopped_at + every else ""
        print(f"step {row['step']:4d}   loss {row['loss']:.4f}   {100 * row['loss'] / entropy:5.1f} % of the unigram entropy{resumed}")
    final = sum(row["loss"] for row in rows[-AVERAGED_STEPS:]) / len(rows[-AVERAGED_STEPS:])
    learnt = final <= LARGEST_PART * entropy
    print(
        f"unigram entropy {entropy:.4f} nats, final loss {final:.4f} nats (mean of the last {AVERAGED_STEPS} steps): "
        f"{100 * final / entropy:.1f} %, {'at most' if learnt else 'NOT at most'} {100 * LARGEST_PART:.0f} %"
    )
    return learnt


def _report_model(folder: Path, validation: data.Batches | None) -> None:
    """Print what the trained model makes of unseen text, and what it writes itself."""
    from forebay.training.evaluate import validation_loss  # these load jax, which the rest of the demo does not need
    from forebay.training.sample import Sampling, generate, load_params

    prompt = "def "
    model, params = load_params(folder)
    if validation is not None:
        print(f"validation loss {validation_loss(model, params, validation):.4f} nats, measured on text that was not trained on")
    text = generate(model, params, prompt, Sampling(count=200, temperature=0.6, window=load(folder).data.seq))
    (folder / "sample.txt").write_text(prompt + text + "\n")
    _title(f"A sample after {prompt!r}, also in {folder / 'sample.txt'}:")
    print(prompt + text)


if __name__ == "__main__":
    sys.exit(main())
