"""Compiler options that a plan sets by itself, each with its reason: mitigations of hazards, and what makes steps better.

A function of the platform, the jaxlib, whether something stands on the host, and how many devices and hosts there are: a
plan made twice is compiled with the same options. What is known of options stands in ``records.hazards`` and ``records.flags``.
"""

import importlib.metadata

from forebay.records.flags import LEFT, OPTIONS
from forebay.records.hazards import HAZARDS, in_range, version_key


def compiler_options(
    platform: str, *, hosted: bool, devices: int, hosts: int = 1, jaxlib: str | None = None
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Options for ``platform`` under this (or the named) jaxlib, and a line of reason for each option that is set or deliberately left.

    ``hosted``: something of the plan stands in host memory.
    """
    jaxlib = jaxlib or importlib.metadata.version("jaxlib")
    options: dict[str, object] = {}
    reasons = []
    for row in HAZARDS if hosted else ():
        if row.options and in_range(row, jaxlib, platform):
            options.update(row.options)
            reasons.append(f"{_names(row.options)}: {row.id} on jaxlib {jaxlib} ({platform})")
    several = devices > 1
    considered = {"always": True, "host": hosted, "devices": several, "node": several and hosts == 1, "nodes": hosts > 1}
    for row in OPTIONS:
        if not considered[row.when] or not in_range(row, jaxlib, platform):
            continue
        if row.chosen:
            options.update(row.values)
        reasons.append(f"{'' if row.chosen else LEFT}{_names(row.values)}: {row.reason}")
    return options, tuple(reasons)


def unsliced_axes(platform: str, jaxlib: str | None = None) -> frozenset[int]:
    """Axes, counted from the last, of which the compiler of ``platform`` cannot update a part of an array in host memory.

    libtpu 0.0.42 (jaxlib 0.10.2) refuses parts of the minor axis ("Lane slice updating is not supported"); 0.0.50 (jaxlib 0.12) takes them.
    """
    old = version_key(jaxlib or importlib.metadata.version("jaxlib")) < (0, 12)
    return frozenset({-1}) if platform == "tpu" and old else frozenset()


def _names(values) -> str:
    return ", ".join(f"{name}={value!r}" if value == "" else f"{name}={value}" for name, value in values.items())
