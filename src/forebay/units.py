"""Units: bytes, seconds, and how they are read from and shown to people. GiB is 2**30 bytes and is printed as GiB."""

import re

from forebay.errors import InputError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_BYTES = {
    "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"24GiB"``, ``"1.25 TiB"``, ``"80GB"`` or a bare number of bytes.

    Raises:
        InputError: not a number with one of the units B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    units = {unit.lower(): factor for unit, factor in _BYTES.items()}
    unit = match.group(2).lower() or "b" if match else ""
    if not match or unit not in units:
        raise InputError(f"{text!r} is not a size; write a number and one of {', '.join(_BYTES)}, such as 24GiB or 1.5TiB")
    value = int(float(match.group(1)) * units[unit])
    if value <= 0:
        raise InputError(f"the size {text!r} is zero; give a positive size such as 24GiB")
    return value


def parse_seconds(text: str | float) -> float:
    """Seconds of ``"60s"``, ``"90"``, ``"2min"`` or ``"1h"``.

    Raises:
        InputError: not a number with one of the units s, min, h, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|)\s*", str(text))
    seconds = float(match[1]) * {"": 1, "s": 1, "min": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise InputError(f"{text!r} is not a time; write a positive number and one of s, min, h, such as 60s or 5min")
    return seconds


def show_bytes(count: float) -> str:
    """``count`` bytes for a person: ``"12.34 GiB"``, ``"512.0 MiB"``, ``"96 B"``."""
    size = abs(count)
    for unit, factor, digits in (("TiB", TIB, 2), ("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        if size >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """``seconds`` for a person: ``"13.9 s"``, ``"22.5 ms"``, ``"3.1 us"``."""
    size = abs(seconds)
    if size >= 1:
        return f"{seconds:.3g} s" if size < 100 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 1e-3 else f"{seconds * 1e6:.3g} us"
