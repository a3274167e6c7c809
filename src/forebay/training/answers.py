"""Answers of ``forebay plan`` kept on disk, so that a question asked again is answered without loading jax.

The key covers all that the answer came from: the question, the machine's figures, forebay's own sources, the installed versions, and
the environment that jax reads. A model in the user's own module is never kept here: its code is not in the key. An answer that
is damaged, or cannot be written, costs a compile and nothing else.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import forebay
from forebay.compiler.folder import folder
from forebay.compiler.versions import installed

KEPT = 256  # answers; about 0.1 MB each


def key_of(question: Mapping) -> str:
    """The key of ``question``, a mapping of JSON values."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "LIBTPU_"))}
    versions = installed() | {name: metadata.version(name) for name in ("numpy", "optax")} | {"python": sys.version}
    parts = {"question": dict(question), "versions": versions, "settings": settings, "sources": _sources()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def _sources() -> str:
    digest = hashlib.sha256()
    root = Path(forebay.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def read(key: str) -> str | None:
    """The kept answer, or None where there is none that is whole."""
    path = _path(key)
    try:
        digest, _, text = path.read_text().partition("\n")
        os.utime(path)
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == hashlib.sha256(text.encode()).hexdigest() else None


def write(key: str, text: str) -> None:
    """Keep ``text``, whole or not at all. A folder that cannot be written is worked without: the compile cache has said so."""
    temporary = None
    try:
        _path(key).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_path(key).parent, suffix=".new", delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(text.encode()).hexdigest() + "\n" + text)
        os.replace(temporary, _path(key))
        _trim(_path(key).parent)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _path(key: str) -> Path:
    return folder() / "answers" / f"{key}.json"


def _trim(answers: Path) -> None:
    """Remove those not asked for the longest, beyond ``KEPT``."""

    def used(path: Path) -> float:
        with contextlib.suppress(FileNotFoundError):  # another process trims at the same time
            return path.stat().st_mtime
        return 0.0

    for path in sorted(answers.glob("*.json"), key=used, reverse=True)[KEPT:]:
        path.unlink(missing_ok=True)
