"""The machine: chips, hosts, links, and what each may hold. In: a name such as ``h100-sxm:8``, or the machine itself. Out: ``Hardware``.

``probe`` measures the machine at hand and keeps a ``Machine``, whose name ``Hardware.named`` takes too.

Every figure is a ``Quantity`` with its source; an unknown one is None. Imports only errors and units, and loads no jax.
"""

from forebay.hardware.catalog import catalog_names
from forebay.hardware.chip import Chip, Fabric, Link
from forebay.hardware.hardware import Hardware
from forebay.hardware.machine import Machine
from forebay.hardware.probing import probe
from forebay.hardware.quantity import Quantity
from forebay.hardware.targets import Target

__all__ = ["Chip", "Fabric", "Hardware", "Link", "Machine", "Quantity", "Target", "catalog_names", "probe"]
