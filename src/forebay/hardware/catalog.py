"""The catalog: chips as data files, every figure with its source. Nothing here knows a chip by name.

A data file holds ``[source.KEY]`` tables (title, kind, date), ``[family.KEY]`` tables (figures that XLA is given for every chip of a
family) and ``[chip.NAME]`` tables. A figure is ``[value, source key]``; a size may be written ``"2TiB"``. Tables of XLA's figures name
one source for the whole table, and a figure of another source is written like the rest.
"""

import functools
import importlib.resources
import re
import tomllib

from forebay.errors import InputError, nearest
from forebay.hardware.chip import Chip, Fabric, Host, Link
from forebay.hardware.quantity import Quantity
from forebay.hardware.store import stored_names
from forebay.units import parse_bytes

_NOT_FIGURES = ("name", "domain_chips", "chips", "bounds")


def catalog_names() -> list[str]:
    """Names of every chip in the catalog, GPUs and then TPUs, as ``Hardware.named`` takes them before the colon."""
    return list(_chips())


def lookup(name: str) -> Chip:
    """The chip called ``name``; upper case, ``_`` and missing hyphens are forgiven.

    Raises:
        InputError: no such chip, with the nearest names, those of measured machines among them.
    """
    chips = _chips()
    for known, chip in [*chips.items(), *((short, chips[full]) for short, full in _short_names().items())]:
        if _squash(known) == _squash(name):
            return chip
    variants = [known for known in chips if _squash(name) and _squash(known).startswith(_squash(name))]
    hint = f"choose {' or '.join(variants)}" if variants else nearest(name.lower(), [*chips, *stored_names()])
    raise InputError(f"no machine is called {name!r}: {hint} (`forebay hardware` lists them all)")


def find_by_description(description: str) -> Chip | None:
    """The chip that a driver calls ``description`` (``NVIDIA H100 80GB HBM3``), or None."""
    known = {_squash(name): chip for chip in _chips().values() for name in (chip.description, *chip.driver_names)}
    return known.get(_squash(description))


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.cache
def _tables() -> list[dict]:
    files = sorted(importlib.resources.files("forebay.hardware").joinpath("data").iterdir(), key=lambda file: file.name)
    return [tomllib.loads(file.read_text("utf-8")) for file in files if file.name.endswith(".toml")]


@functools.cache
def _short_names() -> dict[str, str]:
    """What people write for the usual form of a chip (``a100-80`` is the SXM module), to its name."""
    records = {name: record for table in _tables() for name, record in table.get("chip", {}).items()}
    return {short: name for name, record in records.items() for short in record.get("short_names", ())}


@functools.cache
def _chips() -> dict[str, Chip]:
    tables = _tables()
    sources = {key: source for table in tables for key, source in table.get("source", {}).items()}
    families = {key: family for table in tables for key, family in table.get("family", {}).items()}
    common = next(table["xla"] for table in tables if "xla" in table)
    reader = _Reader(sources, families, common)
    chips = [reader.chip(name, record) for table in tables for name, record in table.get("chip", {}).items()]
    return {chip.name: chip for chip in sorted(chips, key=lambda chip: (chip.vendor != "nvidia", chip.name))}


class _Reader:
    """Turns the tables of the data files into chips, resolving sources and families."""

    def __init__(self, sources: dict, families: dict, common: dict):
        self.sources, self.families, self.common = sources, families, common

    def chip(self, name: str, record: dict) -> Chip:
        record = {**record, "driver_names": tuple(record.get("driver_names", ()))}
        record.pop("short_names", None)
        platform = record.pop("platform", "cuda")
        family = record.pop("family", None)
        tables = {"link": Link, "interconnect": Fabric, "nic": Fabric, "host": Host}
        parts = {key: self._part(reader, record.pop(key)) if key in record else None for key, reader in tables.items()}
        figures = {key: self.figure(record.pop(key)) for key in ("hbm_bytes", "hbm_bytes_per_second")}
        peaks = {dtype: self.figure(figure) for dtype, figure in record.pop("peak_flops").items()}
        xla = self._xla(family, record.pop("xla"), figures) if platform == "cuda" else {}
        vendor = {"cuda": "nvidia", "tpu": "google"}[platform]
        return Chip(name=name, vendor=vendor, platform=platform, peak_flops=peaks, xla=xla, **figures, **parts, **record)

    def figure(self, figure: list) -> Quantity:
        value, key = figure
        source = self.sources[key]
        return Quantity(parse_bytes(value) if isinstance(value, str) else value, source["title"], source.get("date"), source["kind"])

    def _part(self, kind, record: dict):
        plain = {key: value for key, value in record.items() if key in _NOT_FIGURES}
        if "bounds" in plain:
            plain["bounds"] = tuple(plain["bounds"])
        figures = {key: self.figure(value) for key, value in record.items() if key not in _NOT_FIGURES}
        wanted = {field for field in kind.__dataclass_fields__ if field.endswith(("_per_second", "_bytes"))}
        return kind(**plain, **{key: figures.get(key) for key in wanted})

    def _xla(self, family: str, own: dict, figures: dict[str, Quantity]) -> dict[str, Quantity]:
        xla = {"memory_bandwidth": figures["hbm_bytes_per_second"]}
        for table in (self.common, self.families[family], own):
            source = table["source"]
            written = {key: value for key, value in table.items() if key != "source"}
            xla |= {key: self.figure(value if isinstance(value, list) else [value, source]) for key, value in written.items()}
        return xla
