"""An out-of-memory message or a saved log, read: which memory ran out, what was asked of it, what its limit was, and the largest buffers
named.

Each form of message is one row of ``_FORMS``: a pattern, the pool that it means, and its numbers. The rows are in order of how much they
say of the cause: a log of a failed pinned allocation also ends in a general RESOURCE_EXHAUSTED, which must not be taken for the device.
The forms are those of XLA's allocator (GPU), its buffer assignment, libtpu's compiler and loader, the CUDA driver, and the Linux kernel,
as users' reports show them. Limits: the first 16 MiB and the last 16 MiB of a log are read.
"""

import re
from dataclasses import dataclass

from forebay.errors import InputError
from forebay.records.reading import check_digits
from forebay.units import GIB, KIB, MIB, TIB

HBM, POOL, RAM, DISK, OUTSIDE, VMEM = "hbm", "pinned host pool", "host RAM", "disk", "device memory outside the pool", "on-chip memory"
MARKS = (
    "RESOURCE_EXHAUSTED",
    "Out of memory",
    "out of memory",
    "OUT_OF_MEMORY",
    "oom-kill",
    "oom_kill",
    "STATUS_ALLOC_FAILED",
    "CUDA calloc",
)
MOST_CHARACTERS = 16 * 2**20

_NUMBER = r"\d{1,20}(?:\.\d{1,10})?(?!\.?\d)"
_SIZE = rf"({_NUMBER}) ?(TiB|GiB|MiB|KiB|T|G|M|K|B|bytes)?"
_UNITS = {"T": TIB, "G": GIB, "M": MIB, "K": KIB, "B": 1, "b": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer that the message itself lists. ``source`` is ``file:line``, empty where the message has none."""

    bytes: int
    shape: str
    operation: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a message says. ``when`` is compile, load or run; numbers that it does not say are None. ``device`` is the device's number."""

    pool: str
    when: str
    message: str
    asked_bytes: int | None = None
    limit_bytes: int | None = None
    in_use_bytes: int | None = None
    needed_bytes: int | None = None
    device: int | None = None
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Groups of ``pattern``: asked, limit, needed (sizes), device (a number)."""

    pool: str
    when: str
    pattern: re.Pattern


def _form(pool: str, when: str, pattern: str) -> _Form:
    size = lambda name: rf"(?P<{name}>{_NUMBER} ?(?:TiB|GiB|MiB|KiB|[TGMK]|B|bytes)?)"  # noqa: E731
    for name in ("asked", "limit", "needed", "free"):
        pattern = pattern.replace(f"<{name}>", size(name))
    return _Form(pool=pool, when=when, pattern=re.compile(pattern, re.DOTALL))


_FORMS = (
    _form(RAM, "run", r"Memory cgroup out of memory: Killed process \d+ \([^)]*\)[^\n]*?anon-rss:(?P<used_kb>\d+)kB"),
    _form(RAM, "run", r"Out of memory: Killed process \d+ \([^)]*\)[^\n]*?anon-rss:(?P<used_kb>\d+)kB"),
    _form(POOL, "run", r"Allocator \(\w*host_bfc\w*\) ran out of memory trying to allocate <asked>"),
    _form(POOL, "run", r"could not allocate pinned host memory of size: <asked>"),
    _form(POOL, "run", r"failed to alloc(?:ate)? <asked> (?:bytes )?on host: CUDA_ERROR_OUT_OF_MEMORY"),
    _form(POOL, "run", r"[Oo]ut of (?:host )?memory[^\n]*?<asked>[^\n]*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
    _form(HBM, "compile", r"[Rr]an out of memory in memory space hbm\. Used <needed> of <limit> hbm"),
    _form(VMEM, "compile", r"[Rr]an out of memory in memory space (?:vmem|smem|cmem)[^\n]*"),
    _form(HBM, "load", r"Error loading program: Attempting to (?:reserve|allocate) <asked> [^\n]*There are <free> free"),
    _form(
        HBM,
        "run",
        r"Attempting to (?:reserve|allocate) <asked>(?: at the bottom of memory)?\."
        r"[^\n]*There are <free> free(?:[^\n]*?_HBM(?P<device>\d+)\))?",
    ),
    _form(HBM, "run", r"Allocator \(GPU_(?P<device>\d+)_bfc\w*\) ran out of memory trying to allocate <asked>"),
    _form(HBM, "run", r"Failed to allocate request for <asked> (?:\(\d+B\) )?on device ordinal (?P<device>\d+)"),
    _form(
        OUTSIDE,
        "run",
        r"(?:Failed to (?:load in-memory CUBIN|instantiate|capture)|NCCL|cuBLAS|cuDNN)[^\n]*(?:out of memory|OUT_OF_MEMORY|ALLOC_FAILED)",
    ),
    _form(OUTSIDE, "run", r"failed to allocate <asked> \(\d+ bytes\) from device: [^\n]*CUDA_ERROR_OUT_OF_MEMORY"),
    _form(HBM, "run", r"Out of memory (?:while trying to allocate|allocating) <asked>"),
    _form(OUTSIDE, "run", r"(?:CUDNN|CUBLAS|CUSOLVER)_STATUS_ALLOC_FAILED|Failed to CUDA calloc[^\n]*"),
    _form(DISK, "run", r"No space left on device"),
    _form(RAM, "run", r"oom[-_]kill"),
    _form(RAM, "run", r"MemoryError: Unable to allocate <asked>"),
    _form(HBM, "run", r"Failed to allocate <asked> (?:bytes )?for"),
    _form(HBM, "run", r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OUT_OF_MEMORY"),
)

_LIMIT = re.compile(r"(?:^|\n)[^\n]*?Limit: +(\d+)\s*\n[^\n]*?InUse: +(\d+)")
_POOL_TOTAL = re.compile(r"memory_limit_: (\d+)")
_IN_USE = re.compile(r"Sum Total of in-use chunks: " + _SIZE)
_LISTED = re.compile(r"(?:Buffer \d+:|\n\s*\d+\.)\s+Size: +" + _SIZE + r"\b(.*?)=====", re.DOTALL)
_SPLIT = re.compile(r'op_name="((?:[^"\\]|\\.)*)"'), re.compile(r'source_file="([^"]*)"'), re.compile(r"source_line=(\d+)")
_SHAPE = re.compile(r"(?:Entry Parameter Subs|S)hape: (\w+\[[^\]]*\])")


def looks_like_oom(text: str) -> bool:
    """Whether ``text`` speaks of memory that ran out."""
    return any(mark in text for mark in MARKS)


def read_shortage(text: str) -> Shortage:
    """What an out-of-memory message or log says.

    Raises:
        InputError: nothing in the text is an out-of-memory message.
    """
    if len(text) > 2 * MOST_CHARACTERS:
        text = text[:MOST_CHARACTERS] + "\n" + text[-MOST_CHARACTERS:]
    check_digits(text)
    for form in _FORMS:
        if match := form.pattern.search(text):
            return _shortage(form, match, text)
    raise InputError(
        "this text holds no out-of-memory message (RESOURCE_EXHAUSTED, an allocator's dump, a kernel's kill) and no scheduled HLO; "
        "save the whole standard error of the run, or dump the program with XLA_FLAGS=--xla_dump_to=FOLDER"
    )


def _shortage(form: _Form, match: re.Match, text: str) -> Shortage:
    said = {name: value for name, value in match.groupdict().items() if value is not None}
    limit, in_use = _allocator(text) if form.pool in (HBM, POOL) else (None, None)
    asked = _bytes(said["asked"]) if "asked" in said else None
    if "used_kb" in said:
        in_use = int(said["used_kb"]) * KIB
    if "free" in said:
        limit, in_use = None, None
    stated = _bytes(said["limit"]) if "limit" in said else limit
    return Shortage(
        pool=form.pool,
        when="compile" if "compile permanent error" in text and form.pool in (HBM, VMEM) else form.when,
        message=" ".join(match.group(0).split())[:300],
        asked_bytes=asked if asked is not None or "free" not in said else None,
        limit_bytes=_bytes(said["free"]) if "free" in said else stated,
        in_use_bytes=in_use,
        needed_bytes=_bytes(said["needed"]) if "needed" in said else None,
        device=int(said["device"]) if "device" in said else None,
        buffers=_listed(text),
    )


def _allocator(text: str) -> tuple[int | None, int | None]:
    """Limit and bytes in use of the allocator's own dump, if the text holds one."""
    if found := _LIMIT.search(text):
        return int(found.group(1)), int(found.group(2))
    total, used = _POOL_TOTAL.search(text), _IN_USE.search(text)
    return (int(total.group(1)) if total else None), (_bytes("".join(part or "" for part in used.groups())) if used else None)


def _listed(text: str) -> tuple[Buffer, ...]:
    """The buffers of a ``Peak buffers`` list (GPU) or of the table of largest program allocations (TPU)."""
    found = []
    for match in _LISTED.finditer(text):
        body = match.group(3)
        name, file, line = (pattern.search(body) for pattern in _SPLIT)
        shape = _SHAPE.search(body)
        source = "/".join(file.group(1).split("/")[-2:]) + (f":{line.group(1)}" if line else "") if file else ""
        operation = name.group(1) if name else ("an argument of the program" if "Entry Parameter" in body or "arguments" in body else "")
        size = _bytes("".join(part or "" for part in match.groups()[:2]))
        found.append(Buffer(bytes=size, shape=shape.group(1) if shape else "", operation=operation, source=source))
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes))


def _bytes(text: str) -> int:
    """``16.00GiB``, ``25.92G``, ``17179869184`` or ``17179869184 bytes``: XLA's G is 2**30."""
    found = re.fullmatch(_SIZE, text.strip())
    assert found is not None, text
    unit = found.group(2) or "B"
    return int(float(found.group(1)) * _UNITS[unit[0]])
