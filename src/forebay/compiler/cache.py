"""Outcomes on disk by fingerprint: one file each, written whole or not at all, the least recently used removed first.

A broken cache never breaks a judgement: a damaged entry is compiled again, an unwritable folder is worked without, and both are said.
"""

import contextlib
import hashlib
import json
import os
import tempfile

from forebay.compiler.folder import folder
from forebay.compiler.jaxcompat import Program
from forebay.compiler.outcome import LASTING, Outcome
from forebay.records.reading import Unreadable, parse

FORMAT = 3  # raise it when the meaning of an entry changes
LIMIT_BYTES = 2 * 2**30
_SUFFIX = ".verdict"


def fingerprint(program: Program, request: dict, versions: dict) -> str:
    """The key of a compile: the program without source locations, everything in the request, and the compiler's versions."""
    parts = {"format": FORMAT, "request": request, "versions": versions}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    digest.update(program.text.encode())
    return digest.hexdigest()[:40]


def read(key: str) -> tuple[Outcome | None, tuple[str, ...]]:
    """The outcome kept under ``key``, or ``None``; and what is to be said of the cache."""
    path = folder() / (key + _SUFFIX)
    try:
        head, _, hlo_gzip = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None, ()
    except OSError as problem:
        return None, (f"the compile cache {folder()} cannot be read ({problem.strerror}); the program is compiled again",)
    try:
        digest, _, body = head.partition(b" ")
        if digest.decode() != hashlib.sha256(body + b"\n" + hlo_gzip).hexdigest():
            raise ValueError("its checksum is wrong")
        found = Outcome.from_json(parse(body.decode()), hlo_gzip)
    except (ValueError, Unreadable) as problem:
        with contextlib.suppress(OSError):
            path.unlink()
        return None, (f"the entry {path} of the compile cache was damaged ({problem}); the program is compiled again",)
    with contextlib.suppress(OSError):  # a cache that is only readable still serves
        os.utime(path)
    return found, ()


def write(key: str, outcome: Outcome) -> tuple[str, ...]:
    """Keep ``outcome`` if the same program would meet it again; returns what is to be said of the cache."""
    if outcome.status not in LASTING:
        return ()
    body = json.dumps(outcome.to_json()).encode()
    digest = hashlib.sha256(body + b"\n" + outcome.hlo_gzip).hexdigest().encode()
    temporary = None
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder(), prefix=key, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(digest + b" " + body + b"\n" + outcome.hlo_gzip)
        os.replace(temporary, folder() / (key + _SUFFIX))
        _trim(LIMIT_BYTES)
    except OSError as problem:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return (f"the compile cache {folder()} cannot be written ({problem.strerror}); set FOREBAY_CACHE to another folder",)
    return ()


def _trim(limit_bytes: int) -> None:
    """Remove the least recently used entries until four fifths of ``limit_bytes`` are left, once they pass it."""
    entries = []
    for path in folder().glob("*" + _SUFFIX):
        with contextlib.suppress(FileNotFoundError):  # another process trims at the same time
            stat = path.stat()
            entries.append((stat.st_mtime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in entries)
    if total <= limit_bytes:
        return
    for _, size, path in sorted(entries):
        path.unlink(missing_ok=True)
        total -= size
        if total <= limit_bytes * 4 // 5:
            return
