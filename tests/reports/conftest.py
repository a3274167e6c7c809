"""What the tests of reports share: the programs and the resident run of ``tests/runtime``, at small sizes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # programs, resident


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty compile cache for each test."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
