"""How much of the machine a plan may fill. A raw size is what the chip has; a budget is what a real job can give to one program.

On a GPU, jax takes ``memory_fraction`` of the chip for its pool (``XLA_PYTHON_CLIENT_MEM_FRACTION``, 0.75 unless set); the rest is
outside: the CUDA context, NCCL's channels, cuBLAS and cuDNN handles, instantiated CUDA graphs. Inside the pool a reserve is held
back for what no single program's sizes show: the next batch, metrics, fragmentation. On a TPU the catalog's size is already what libtpu
gives to programs, so the fraction is 1.
"""

from dataclasses import dataclass

from forebay.hardware.chip import Chip
from forebay.hardware.quantity import Quantity
from forebay.records.reading import build
from forebay.units import GIB

MEMORY_FRACTION = Quantity(
    0.92,
    "forebay: jax's default is 0.75; 8 % of an 80 GB chip leaves 6.3 GiB, of a 24 GB chip 1.9 GiB, for the CUDA context (about 0.5 GiB), "
    "NCCL and CUDA graphs, which live outside the pool; set as XLA_PYTHON_CLIENT_MEM_FRACTION",
    "2026",
    "assumption",
)
WHOLE = Quantity(1.0, "the size is already what the runtime gives to programs", "2026", "assumption")
HBM_RESERVE_SHARE, HBM_RESERVE_MOST = 0.04, GIB
HBM_RESERVE_REASON = "forebay: 4 % of the chip, at most 1 GiB, inside the pool, for the next batch, metrics and fragmentation"
HOST_RESERVE_SHARE, HOST_RESERVE_MOST = 0.10, 64 * GIB
HOST_RESERVE_REASON = (
    "forebay: 10 % of RAM, at most 64 GiB, for the system, one Python and compiler process per device, data loading and the page cache"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The part of HBM that a job's pool takes, what is held back inside it, and what is held back on the host, in bytes."""

    memory_fraction: Quantity
    hbm_reserve_bytes: Quantity
    host_reserve_bytes: Quantity

    def to_json(self) -> dict:
        """A dict of plain values."""
        return {name: getattr(self, name).to_json() for name in ("memory_fraction", "hbm_reserve_bytes", "host_reserve_bytes")}

    @classmethod
    def from_json(cls, record: dict) -> "Budget":
        """The budget that ``to_json`` wrote."""
        return build(cls, record)


def propose(chip: Chip, hbm_bytes: int, host_ram_bytes: int) -> Budget:
    """The budget forebay proposes for one device with ``hbm_bytes`` in a host with ``host_ram_bytes``."""
    hbm_reserve = int(min(hbm_bytes * HBM_RESERVE_SHARE, HBM_RESERVE_MOST))
    host_reserve = int(min(host_ram_bytes * HOST_RESERVE_SHARE, HOST_RESERVE_MOST))
    return Budget(
        memory_fraction=MEMORY_FRACTION if chip.platform == "cuda" else WHOLE,
        hbm_reserve_bytes=Quantity(hbm_reserve, HBM_RESERVE_REASON, "2026", "assumption"),
        host_reserve_bytes=Quantity(host_reserve, HOST_RESERVE_REASON, "2026", "assumption"),
    )
