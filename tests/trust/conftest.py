"""Modules beside the tests of trust are importable by name: the small model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
