"""Text as training batches: bytes are the tokens, and a batch is a pure function of (seed, step).

The text is one stream: the files of the corpus, each closed by a NUL byte (text holds none, so NUL means "end of document").
It is never loaded: an index of file sizes turns a position in the stream into a file and an offset, so corpora of many GB
cost the bytes of the batch at hand. Files stand in the order of a hash of their names: the same everywhere, and the tail of
the stream, which is kept for validation, is a fair sample of the whole rather than the last folder of the alphabet.

    epoch   = all windows of seq + 1 bytes, one every seq bytes, from a start that shifts with the epoch
    order   = a keyed permutation of the windows (a Feistel network over their numbers, walked until it lands in range)
    batch   = windows order[step * batch : (step + 1) * batch]

So every window is read once an epoch, nothing is shuffled in memory, and a resumed run needs no iterator state: the step is
the state. (Grain gives exact resume too, by saving an iterator; for one stream of bytes that is more to install and to save
than the few lines of `order.py`.) Each process reads only the rows that its devices hold.
"""

import dataclasses
import functools
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from forebay.errors import InputError
from forebay.training.order import draw, permuted

VOCABULARY = 256
DOCUMENT_END = 0
_PROBE_BYTES = 64 * 1024
_ENTROPY_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text files as one stream of ``length`` byte tokens. ``ends[i]`` is the position after file i and its closing NUL."""

    name: str
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    ends: np.ndarray
    fingerprint: str

    @property
    def length(self) -> int:
        """Tokens of the whole stream."""
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens ``start`` to ``stop`` of the stream, uint8.

        Raises:
            InputError: a file was removed, shortened or locked since the run began.
        """
        assert 0 <= start <= stop <= self.length, (start, stop, self.length)
        out = np.empty(stop - start, np.uint8)
        number, at = int(np.searchsorted(self.ends, start, side="right")), start
        while at < stop:
            begin = int(self.ends[number]) - self.sizes[number] - 1
            text_stop = min(stop, begin + self.sizes[number])
            if at < text_stop:
                out[at - start : text_stop - start] = _read_file(self.files[number], at - begin, text_stop - at)
                at = text_stop
            if at < stop:
                out[at - start], at = DOCUMENT_END, at + 1
            number += 1
        return out


def _read_file(path: str, offset: int, count: int) -> np.ndarray:
    try:
        tokens = np.fromfile(path, np.uint8, count=count, offset=offset)
    except OSError as error:
        raise InputError(f"{path} could be read when the run began and now cannot: {error.strerror}; put it back and resume") from error
    if len(tokens) != count:
        raise InputError(f"{path} is {count - len(tokens)} bytes shorter than when the run began; put the old file back and resume")
    return tokens


def open_corpus(paths: Sequence[str] = ()) -> Corpus:
    """The corpus of ``paths``: text files, folders (read recursively, hidden files left out) and glob patterns.

    Without paths: the sources of the running interpreter's standard library, tests and installed packages left out.

    Raises:
        InputError: a path that does not exist, holds no file, or is not text.
    """
    if not paths:
        return _standard_library()
    named: list[tuple[str, str]] = []
    for path in paths:
        found = _expand(path)
        for file, _ in found:
            _refuse_binary(file, path, len(found))
        named += found
    return _corpus(", ".join(paths), named)


def _corpus(name: str, named: Iterable[tuple[str, str]]) -> Corpus:
    order = sorted(dict(named).items(), key=lambda pair: (hashlib.sha256(pair[1].encode()).digest(), pair[0]))
    sizes = tuple(os.path.getsize(file) for file, _ in order)
    digest = hashlib.sha256(repr([(short, size) for (_, short), size in zip(order, sizes, strict=True)]).encode()).hexdigest()
    return Corpus(
        name=name,
        files=tuple(file for file, _ in order),
        sizes=sizes,
        ends=np.cumsum([size + 1 for size in sizes], dtype=np.int64),
        fingerprint=digest[:16],
    )


def _expand(path: str) -> list[tuple[str, str]]:
    """(file, name that orders it) of each non-empty file that ``path`` stands for."""
    if os.path.isdir(path):
        files = [(file, os.path.relpath(file, path)) for file in _walk(path)]
        if not files:
            raise InputError(f"the folder {path} holds no file to train on (hidden and empty files do not count); put text files into it")
    elif os.path.exists(path):
        files = [(path, os.path.basename(path))] if os.path.getsize(path) else []
        if not files:
            raise InputError(f"{path} is empty; give a file that holds text")
    elif glob.has_magic(path):
        files = [(file, file) for file in glob.glob(path, recursive=True) if os.path.isfile(file) and os.path.getsize(file)]
        if not files:
            raise InputError(f"no file matches the pattern {path}; quote it so that the shell leaves it alone, and check where it starts")
    else:
        raise InputError(f"there is no file or folder {path}; check the path (now in {os.getcwd()})")
    return files


def _walk(folder: str) -> list[str]:
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        paths = [os.path.join(here, name) for name in sorted(files) if not name.startswith(".")]
        found += [path for path in paths if os.path.isfile(path) and os.path.getsize(path)]
    return found


def _standard_library() -> Corpus:
    root = sysconfig.get_path("stdlib")
    outside = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [file for file in _walk(root) if file.endswith(".py") and not outside & set(Path(file).relative_to(root).parts)]
    files = [file for file in files if why_binary(file) is None]
    if not files:
        raise InputError(f"the Python standard library in {root} holds no sources; give text of your own with --data PATH")
    return _corpus("Python standard library", [(file, os.path.relpath(file, root)) for file in files])


def _refuse_binary(file: str, path: str, count: int) -> None:
    why = why_binary(file)
    if why is not None and file == path:
        raise InputError(f"{file} is not text: {why}; give UTF-8 text files")
    if why is not None:
        instead = f"--data '{path}/**/*.txt'"
        raise InputError(f"{file}, one of the {count} files of {path}, is not text: {why}; name the text alone, as in {instead}")


def why_binary(path: str) -> str | None:
    """Why the file is not UTF-8 text, or None. Looks at 64 KiB each at its head, middle and end, so that huge files cost nothing.

    Raises:
        InputError: it cannot be read.
    """
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            for offset in sorted({0, max(0, size // 2 - _PROBE_BYTES // 2), max(0, size - _PROBE_BYTES)}):
                file.seek(offset)
                why = _why_not_text(file.read(_PROBE_BYTES), offset, size)
                if why is not None:
                    return why
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return None


def _why_not_text(block: bytes, offset: int, size: int) -> str | None:
    nul = block.find(0)
    if nul >= 0:
        return f"byte {offset + nul} is NUL"
    skip = 0
    while offset and skip < min(3, len(block)) and block[skip] & 0xC0 == 0x80:  # a character that began before this block
        skip += 1
    try:
        block[skip:].decode("utf-8")
    except UnicodeDecodeError as error:
        cut_by_block = offset + len(block) < size and error.reason == "unexpected end of data"
        return None if cut_by_block else f"byte {offset + skip + error.start} (0x{error.object[error.start]:02x}) is not UTF-8"
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sequences of ``seq + 1`` tokens from ``start`` to ``stop`` of a corpus, ``batch`` of them a step."""

    corpus: Corpus
    start: int
    stop: int
    batch: int
    seq: int
    seed: int = 0

    @property
    def windows(self) -> int:
        """Sequences in an epoch."""
        return max(1, (self.stop - self.start - self.seq) // self.seq)

    def tokens(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """int32[rows, seq + 1], the batch of ``step`` (or some rows of it). The same for ever for the same corpus, seed and step."""
        numbers = np.arange(self.batch, dtype=np.int64)[rows] + step * self.batch
        starts = np.empty(len(numbers), np.int64)
        for epoch in np.unique(numbers // self.windows):
            chosen = numbers // self.windows == epoch
            slack = self.stop - self.start - 1 - self.windows * self.seq
            shift = draw(slack + 1, self.seed, int(epoch), 0)
            order = permuted(numbers[chosen] % self.windows, self.windows, draw(2**63, self.seed, int(epoch), 1))
            starts[chosen] = self.start + shift + order * self.seq
        return np.stack([self.corpus.read(at, at + self.seq + 1) for at in starts.tolist()]).astype(np.int32)


def split(corpus: Corpus, *, batch: int, seq: int, seed: int = 0, validation_fraction: float = 0.05) -> tuple[Batches, Batches | None]:
    """Training and validation batches; the tail of the stream is validation. None where it is too short to hold a sequence.

    Raises:
        InputError: the training part is shorter than one sequence.
    """
    cut = corpus.length - int(corpus.length * validation_fraction)
    if cut < seq + 1:
        raise InputError(
            f"{corpus.name} holds {cut} bytes to train on (of {corpus.length}), and one sequence of --seq {seq} needs {seq + 1}; "
            f"give more text, or a --seq of at most {max(cut - 1, 0)}"
        )
    train = Batches(corpus=corpus, start=0, stop=cut, batch=batch, seq=seq, seed=seed)
    if corpus.length - cut < seq + 1:
        return train, None
    return train, dataclasses.replace(train, start=cut, stop=corpus.length)


def check_vocabulary(vocabulary: int, model: str) -> None:
    """Raises InputError where the model has no row for some byte."""
    if vocabulary < VOCABULARY:
        raise InputError(
            f"the model {model} has a vocabulary of {vocabulary} and text as bytes needs {VOCABULARY} tokens; "
            f"choose a model whose vocabulary is at least {VOCABULARY}"
        )


def unigram_entropy_nats(batches: Batches) -> float:
    """Entropy of a byte drawn alone from the text, in nats: the loss of a model that has learnt only the frequencies.

    Counts the whole text up to 64 MiB, and evenly spaced MiB of a larger one.
    """
    counts = _byte_counts(batches)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _byte_counts(batches: Batches) -> np.ndarray:
    length, piece = batches.stop - batches.start, 2**20
    pieces = min(-(-length // piece), _ENTROPY_BYTES // piece)
    starts = np.linspace(0, max(0, length - piece), pieces).astype(np.int64) + batches.start
    if length <= _ENTROPY_BYTES:
        starts = np.arange(batches.start, batches.stop, piece)
    blocks = (batches.corpus.read(int(at), min(int(at) + piece, batches.stop)) for at in starts)
    return functools.reduce(np.add, (np.bincount(block, minlength=VOCABULARY) for block in blocks))
