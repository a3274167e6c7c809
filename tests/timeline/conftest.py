"""Fixtures of the timeline: compiled texts of small programs (see fixtures/make.py), and small modules written by hand."""

import gzip
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # trace_schema
FOLDER = Path(__file__).parent / "fixtures"
VERSIONS = ("0.10.2", "0.12.0.1")


@pytest.fixture
def compiled():
    """``compiled(name, platform, version)``: the text of a fixture."""

    def read(name: str, platform: str, version: str) -> str:
        return gzip.decompress((FOLDER / f"{name}_{platform}_{version}.hlo.gz").read_bytes()).decode()

    return read


@pytest.fixture(params=VERSIONS)
def version(request) -> str:
    """A version of jax that the fixtures were compiled with."""
    return request.param


@pytest.fixture
def module():
    """``module(entry_body, *computations, devices=8)``: the text of a scheduled module."""

    def write(body: str, *computations: str, devices: int = 8) -> str:
        parts = [f"HloModule m, is_scheduled=true, num_partitions={devices}", *map(textwrap.dedent, computations)]
        lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
        return "\n\n".join([*parts, f"ENTRY %main () -> f32[] {{\n{lines}\n}}\n"])

    return write
