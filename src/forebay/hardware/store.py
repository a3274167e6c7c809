"""Measured machines on disk: one JSON file each, NAME.json, written whole or not at all. Knows names and files, not their meaning.

They are kept apart from the caches, which may be thrown away: a measurement cannot be made again without the machine. A file may be
copied to another computer, to plan there for the machine that was measured.
"""

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path

from forebay.errors import InputError, MeasurementError


def machines_folder() -> Path:
    """``FOREBAY_MACHINES``, or ``~/.config/forebay/machines`` (under ``XDG_CONFIG_HOME`` where that is set)."""
    if os.environ.get("FOREBAY_MACHINES"):
        return Path(os.environ["FOREBAY_MACHINES"]).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "forebay" / "machines"


def stored_names() -> list[str]:
    """Names of the measured machines."""
    folder = machines_folder()
    return sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []


def find_name(text: str) -> str | None:
    """The stored machine that ``text`` (before its colon) names, upper case forgiven; or None."""
    wanted = text.strip().partition(":")[0].lower() if isinstance(text, str) else ""
    return next((name for name in stored_names() if name.lower() == wanted), None)


def check_name(name: str) -> str:
    """``name``, where it can be the name of a file and stand before a colon.

    Raises:
        InputError: it cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise InputError(f"{name!r} cannot name a machine; use up to 63 letters, digits, '.', '_' and '-', such as --name my-node")
    return name


def path_of(name: str) -> Path:
    """The file of the machine ``name``."""
    return machines_folder() / f"{name}.json"


def read_text(name: str) -> str:
    """The text of a stored machine.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path_of(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"the measured machine {name!r} cannot be read from {path_of(name)} ({problem})") from problem


def write_record(name: str, record: dict) -> Path:
    """Keep ``record`` as ``name``, in place of what stood there, whole or not at all.

    Raises:
        MeasurementError: the folder cannot be written; what stood there is untouched.
    """
    path, temporary = path_of(name), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8") as file:
            temporary = file.name
            file.write(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError as problem:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise MeasurementError(
            f"what was measured cannot be kept in {path} ({problem.strerror}); set FOREBAY_MACHINES to a folder that can be written"
        ) from problem
    return path
