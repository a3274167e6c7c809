"""Copies between a device and its host: each direction, both at once, beside a matmul, by size, from pinned and from pageable memory.

Pinned memory is a jax array with ``memory_kind="pinned_host"`` (and ``unpinned_host`` where the backend has it), copied by ``device_put``
to the same device. Pageable memory is a numpy array. Both directions at once are asked for in two ways: one jitted program with two
independent copies, and two copies dispatched one after the other and then awaited.

Copies beside a matmul are one program too: a copy of its own would wait for the matmul's stream before it may reuse memory. The program
is a copy and a chain of products that takes about 0.8 of the copy's time alone; the rate is that of the copy in it. A chain of 1.25 of
the copy's time gives the rate of the products beside a copy, which ends before them: a little too high a rate. Where copy and
products took as long as one after the other, they did not run together and there is no reading.

On a CPU backend all of it runs, and what it gives is no link: readings are then of the group ``not a link``.
"""

import statistics
from collections.abc import Callable
from typing import Any

from forebay.hardware.probing.timing import Clock, rates, repeated
from forebay.hardware.reading import Reading
from forebay.units import GIB, KIB, MIB

SIZES = (GIB, 128 * MIB, 16 * MIB, MIB, 64 * KIB)
"""Bytes of one copy, the largest first: it is the one that a forecast rests on."""
SHARE_OF_FREE = 8
PRODUCT_SIDE = 4096
BESIDE_SHARE = 0.8
IN_TURNS = 0.9
"""Copy and products that take this part of their sum did not run together."""
MOST_PRODUCTS = 64


def sizes(free_device_bytes: int, free_host_bytes: int) -> list[int]:
    """The sizes whose copies, with their results, leave both memories mostly free."""
    most = min(free_device_bytes, free_host_bytes) // SHARE_OF_FREE
    return [size for size in SIZES if size <= most]


def measure(device: Any, clock: Clock, copied: list[int], node: int | None = None) -> tuple[list[Reading], list[str]]:
    """Readings of the link of ``device`` for the sizes ``copied``, and what was not measured."""
    link = _Link(device, clock, node)
    kinds = {memory.kind for memory in device.addressable_memories()}
    pinned = [kind for kind in ("pinned_host", "unpinned_host") if kind in kinds]
    if not pinned or not copied:
        why = f"{device} has no host memory kind" if not pinned else "too little memory is free"
        return [], [f"host link: {why}"]
    link.each_way(pinned[0], copied[:1])
    link.both_ways(pinned[0], copied[0])
    if node is None:  # of a single node the figures that decide are enough
        link.beside_products(pinned[0], copied[0])
        link.each_way(pinned[0], copied[1:])
        link.pageable(copied)
        for kind in pinned[1:]:
            link.each_way(kind, copied)
    return link.readings, link.absent


class _Link:
    """Measures one device's copies and collects the readings."""

    def __init__(self, device: Any, clock: Clock, node: int | None):
        self.device, self.clock, self.node = device, clock, node
        self.group = "not a link" if device.platform == "cpu" else "link"
        self.readings: list[Reading] = []
        self.absent: list[str] = []

    def each_way(self, kind: str, copied: list[int]) -> None:
        for size in copied:
            here, there = self._array(size, "device"), self._array(size, kind)
            self._read("to_device", size, kind, lambda there=there: self._put(there, "device").block_until_ready())
            self._read("to_host", size, kind, lambda here=here: self._put(here, kind).block_until_ready())

    def both_ways(self, kind: str, size: int) -> None:
        import jax

        here, there = self._array(size, "device"), self._array(size, kind)
        shardings = (self._sharding("device"), self._sharding(kind))
        program = jax.jit(
            lambda there, here: (jax.device_put(there, shardings[0]), jax.device_put(here, shardings[1])), out_shardings=shardings
        )
        self._read("both in one program", 2 * size, kind, lambda: jax.block_until_ready(program(there, here)))
        self._read("both as two copies", 2 * size, kind, lambda: jax.block_until_ready((self._put(there, "device"), self._put(here, kind))))

    def pageable(self, copied: list[int]) -> None:
        import jax
        import numpy

        for size in copied:
            here, there = self._array(size, "device"), numpy.ones(size // 4, numpy.float32)
            put = lambda there=there: jax.device_put(there, self._sharding("device")).block_until_ready()  # noqa: E731
            self._read("to_device", size, "pageable", put)
            # A fresh array each time: a jax array keeps the numpy copy that was made of it.
            self._read("to_host", size, "pageable", numpy.asarray, lambda here=here: (jax.numpy.copy(here).block_until_ready(),))

    def beside_products(self, kind: str, size: int) -> None:
        """Copies while products run, and products while a copy runs."""
        import jax

        if not self.clock.allows(1.0):
            self.absent.append("copies beside a matmul: out of time")
            return
        x, w = _matrices(self.device, PRODUCT_SIDE)
        trial = jax.jit(_chain, static_argnums=2)
        one = statistics.median(repeated(lambda: trial(x, w, 4).block_until_ready())) / 4
        for direction, place in (("to_device", "device"), ("to_host", kind)):
            alone = next((r for r in self.readings if (r.kind, r.size, r.memory) == (direction, size, kind)), None)
            if alone is None or not self.clock.allows(0.5):
                self.absent.append(f"{direction} beside a matmul: out of time")
                continue
            source = self._array(size, kind if place == "device" else "device")
            short, long = (min(MOST_PRODUCTS, round(share * size / alone.value / one)) for share in (BESIDE_SHARE, 1 / BESIDE_SHARE))
            seconds = self._beside(source, place, x, w, max(1, short))
            if statistics.median(seconds) > IN_TURNS * (size / alone.value + max(1, short) * one):
                self.absent.append(f"{direction} beside a matmul: the copy and the matmul ran one after the other")
                continue
            self._add(self.group, direction, size, rates(size, seconds), memory=kind, beside="matmul")
            seconds = self._beside(source, place, x, w, long := max(1, short + 1, long))
            self._add("matmul", "bf16", PRODUCT_SIDE, rates(long * 2.0 * PRODUCT_SIDE**3, seconds), beside=direction)

    def _beside(self, source: Any, place: str, x: Any, w: Any, count: int) -> tuple[float, ...]:
        """Seconds of one program that copies ``source`` to ``place`` and does ``count`` products."""
        import jax

        target, result = self._sharding(place), self._sharding("device")
        program = jax.jit(lambda source, x, w: (jax.device_put(source, target), _chain(x, w, count)), out_shardings=(target, result))
        return repeated(lambda: jax.block_until_ready(program(source, x, w)))

    def _read(self, kind: str, size: int, memory: str, work: Callable, prepare: Callable[[], tuple] = tuple) -> None:
        if not self.clock.allows():
            self.absent.append(f"{kind}, {memory}, {size} bytes: out of time")
            return
        self._add(self.group, kind, size, rates(size, repeated(work, prepare, seconds=0.5)), memory=memory)

    def _add(self, group: str, kind: str, size: int, found: tuple[float, ...], memory: str = "", beside: str = "") -> None:
        self.readings.append(Reading(group=group, kind=kind, size=size, rates=found, memory=memory, beside=beside, node=self.node))

    def _sharding(self, kind: str) -> Any:
        from jax.sharding import SingleDeviceSharding

        return SingleDeviceSharding(self.device, memory_kind=kind)

    def _array(self, size: int, kind: str) -> Any:
        import jax
        import numpy

        return jax.block_until_ready(jax.device_put(numpy.ones(size // 4, numpy.float32), self._sharding(kind)))

    def _put(self, array: Any, kind: str) -> Any:
        import jax

        return jax.device_put(array, self._sharding(kind))


def _matrices(device: Any, side: int) -> tuple[Any, Any]:
    """Two square bf16 matrices of random numbers: a chip is faster on zeros than on data."""
    import jax

    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(key, (side, side), jax.numpy.bfloat16) for key in keys)
    return jax.device_put((x, w * side**-0.5), device)


def _chain(x: Any, w: Any, count: int) -> Any:
    """``count`` products, each of the one before."""
    for _ in range(count):
        x = x @ w
    return x
