"""The workload of ``small``, traced once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # small

import small


@pytest.fixture(scope="session")
def work():
    return small.traced()
