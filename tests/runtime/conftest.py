"""Modules beside the tests of equality are importable by name: resident and programs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
