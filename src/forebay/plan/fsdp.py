"""The sharding that forebay proposes where the caller gave none: FSDP (ZeRO-3) over all devices of the machine.

Every parameter is split over one mesh axis, ``fsdp``, and so are the rows of the batch. The layers of a stack are never
split: it is scanned along them.
"""

import math

from forebay.errors import InputError
from forebay.workload import Tensor
from forebay.workload.sharding import MeshShape

AXIS = "fsdp"
REPLICATED_BELOW = 2**16  # elements: a norm's scale costs more to gather than to hold


def propose_spec(tensor: Tensor, devices: int, layered: bool) -> tuple:
    """One spec for a parameter and its gradient; its state follows. ``layered``: axis 0 is the layers of a stack, and stays whole.

    Of a stack of matrices [L, in, out] the input axis is split: splitting the output axis makes XLA keep a transposed copy of the
    gradient (1.86 GiB more on Llama-3.1-8B over 8 GPUs, compiled). Of a matrix that is no stack, an embedding or a head, the shorter
    axis is split: splitting the vocabulary of a head costs an all-to-all each way, on the host where the head stands there.
    """
    shape = tensor.shape
    if devices == 1 or math.prod(shape) < REPLICATED_BELOW:
        return (None,) * len(shape)
    fit = [k for k in range(layered, len(shape)) if shape[k] % devices == 0]
    if len(shape) == 2 and not layered:
        best = min(fit, key=lambda k: (shape[k], -k), default=None)
    else:
        best = next((k for k in fit if k > 0), 0 if 0 in fit else None)
    return tuple(AXIS if k == best else None for k in range(len(shape)))


def batch_spec(tensor: Tensor, devices: int) -> tuple:
    """Rows of the batch over all devices.

    Raises:
        InputError: the devices do not divide the batch.
    """
    rows = tensor.shape[0] if tensor.shape else 0
    if not tensor.shape or devices == 1:
        return (None,) * len(tensor.shape)
    if rows % devices:
        near = [n for n in (rows // devices * devices, (rows // devices + 1) * devices) if n]
        raise InputError(
            f"{tensor.name} has {rows} rows, which {devices} devices do not divide; make the global batch a multiple of {devices} "
            f"({' or '.join(map(str, near))}), or give your own mesh and specs to trace"
        )
    return (AXIS, *(None,) * (len(tensor.shape) - 1))


def propose_mesh(devices: int) -> MeshShape:
    return MeshShape(sizes=(devices,), names=(AXIS,))
