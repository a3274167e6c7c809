"""Compiler options that a plan sets by itself, each for a reason: the version table's mitigations, where something stands on the host."""

import importlib.metadata

from forebay.records.hazards import HAZARDS, in_range, version_key


def compiler_options(platform: str, hosted: bool, jaxlib: str | None = None) -> tuple[dict[str, object], tuple[str, ...]]:
    """Options for ``platform`` under this (or the named) jaxlib, and a line of reason for each. Nothing on the host: none."""
    if not hosted:
        return {}, ()
    jaxlib = jaxlib or importlib.metadata.version("jaxlib")
    options: dict[str, object] = {}
    reasons = []
    for row in HAZARDS:
        if row.options and in_range(row, jaxlib, platform):
            options.update(row.options)
            names = ", ".join(f"{k}={v}" for k, v in row.options.items())
            reasons.append(f"{names}: {row.id} on jaxlib {jaxlib} ({platform})")
    return options, tuple(reasons)


def unsliced_axes(platform: str, jaxlib: str | None = None) -> frozenset[int]:
    """Axes, counted from the last, of which the compiler of ``platform`` cannot update a part of an array in host memory.

    libtpu 0.0.42 (jaxlib 0.10.2) refuses parts of the minor axis ("Lane slice updating is not supported"); 0.0.50 (jaxlib 0.12) takes them.
    """
    old = version_key(jaxlib or importlib.metadata.version("jaxlib")) < (0, 12)
    return frozenset({-1}) if platform == "tpu" and old else frozenset()
