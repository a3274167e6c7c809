"""The setting of every test: eight virtual CPU devices, and a compile cache that dies with the test run.

The variables are set here, before any test module imports jax; child processes inherit them.
"""

import os
import tempfile

_CACHE = tempfile.TemporaryDirectory(prefix="forebay-test-cache-")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["FOREBAY_CACHE"] = _CACHE.name
os.environ["FOREBAY_MACHINES"] = os.path.join(_CACHE.name, "machines")
