"""Adding one microbatch's gradients to the accumulators: a layer at a time inside the backward pass, the rest behind it.

    in the backward pass of a layer loop, where the accumulator stands on the host:
        acc[i] = keep * acc[i] + share * gradient of layer i       read, add, write back in place; beside the next matmuls
    behind it:
        other accumulators on the host, chunk by chunk, from a gradient on the device; those in HBM at once

Cost: an accumulator on the host crosses the link once each way for every microbatch; no stack of gradients stands beside it.
Limits: a parameter that several loops use, or that is used outside its loop, has its gradient stacked first.
"""

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from forebay.plan import Plan
from forebay.plan.fusion import loop_layers
from forebay.runtime import streaming
from forebay.runtime.streaming import DEVICE, HOST, Job, Port
from forebay.workload.program import LayerLoop, Program
from forebay.workload.sharding import local_shape, named


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Accumulators:
    """``arrays``: accumulators by stored parameter, replaced as gradients come. ``first``, ``keep`` and ``share``: device scalars of this
    microbatch; the first one finds nothing that it keeps."""

    plan: Plan
    mesh: Any
    arrays: dict[int, Any]
    first: Any
    keep: Any
    share: Any

    def inside(self, program: Program, loop: LayerLoop) -> list[int]:
        """The parameters of a loop whose gradients are added layer by layer in its backward pass."""
        return [p for p in dict.fromkeys(loop.params) if p in self.arrays and self._on_host(p) and loop_layers(program, p) > 1]

    def job(self, p: int, axis: int = 0, size: int = 1, rest: int = 0, gradient: Any = None) -> Job:
        """The job that adds slices of a gradient; ``gradient``: the whole array, or None where the loop gives its slices."""
        acc = Port(slot=("acc", p), axis=axis, host=True)
        more = Port(slot=("grads", p), axis=axis, host=gradient is not None and jax.typeof(gradient).memory_space == HOST)
        return Job(reads=(acc, more), writes=(acc,), compute=lambda start, size, slices: ([self._sum(*slices)], []), size=size, rest=rest)

    def add(self, grads: dict[int, Any]) -> None:
        """Add whole gradients, by stored parameter."""
        loops: dict[int, list[Job]] = defaultdict(list)
        table: dict[Any, Any] = {}
        for p, gradient in grads.items():
            if p not in self.arrays:
                continue
            gradient, stream = self._pinned(p, gradient), chunks(self.plan, p)
            if not self._on_host(p):
                self.arrays[p] = self._sum(self.arrays[p], gradient)
            elif stream is None:
                self.arrays[p] = jax.device_put(self._sum(*jax.device_put((self.arrays[p], gradient), DEVICE)), HOST)
            else:
                axis, size, count, rest = stream
                loops[count].append(self.job(p, axis, size, rest, gradient))
                table |= {("acc", p): self.arrays[p], ("grads", p): gradient}
        for count, jobs in loops.items():
            new: dict[Any, Any] = {}
            streaming.run(jobs, table, count, new)
            self.arrays.update((p, value) for (_, p), value in new.items())

    def _sum(self, acc, gradient):
        kept = jnp.where(self.first, jnp.zeros_like(acc), self.keep.astype(acc.dtype) * acc)
        return kept + self.share.astype(acc.dtype) * gradient.astype(acc.dtype)

    def _on_host(self, p: int) -> bool:
        return self.plan.role("accumulator")[p].placement == "host"

    def _pinned(self, p: int, gradient):
        """A gradient on the device is reduce-scattered to its parameter's spec before it is added."""
        if jax.typeof(gradient).memory_space == HOST:
            return gradient
        return lax.with_sharding_constraint(gradient, named(self.mesh, self.plan.role("accumulator")[p].spec, "hbm"))


def chunks(plan: Plan, p: int) -> tuple[int, int, int, int] | None:
    """(axis, size, count, rest) in which an array shaped as a host parameter moves, as its update has it; None: whole."""
    work = plan.bound
    stream = next((s for f, s in zip(work.families, plan.streams, strict=True) if p in f.params), None)
    if stream is None or stream.mode not in ("slices", "items"):
        return None
    layers = plan.role("parameter")[p].shape[0]
    return (0, 1, layers, 0) if stream.mode == "items" or stream.layered else (stream.axis, stream.size, stream.count, stream.rest)


def empty(plan: Plan, mesh, p: int) -> Any:
    """An accumulator before the first microbatch, which replaces what stands in it. On the host it is memory and no values.

    Zeros for the host would be made whole in HBM first (XLA of jax 0.10.2).
    """
    entry = plan.role("accumulator")[p]
    if entry.placement != "host":
        return lax.with_sharding_constraint(jnp.zeros(entry.shape, entry.dtype), named(mesh, entry.spec, "hbm"))
    # Shard by shard: XLA would make the whole of it on each device and cut it there, which it then refuses for host memory.
    local = local_shape(entry.shape, entry.spec, plan.mesh)
    made = jax.shard_map(lambda: lax.empty(local, entry.dtype), mesh=mesh, in_specs=(), out_specs=P(*entry.spec), check_vma=False)()
    return jax.device_put(made, HOST)
