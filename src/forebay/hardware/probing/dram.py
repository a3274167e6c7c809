"""The rate of host DRAM: a kernel with a triad's traffic, over all cores at once, on arrays that no cache holds.

    each thread, on its own part of a, b, c:      a[i] = b[i] + c[i]          (numpy.add, which lets other threads run)

Counted are 24 bytes for each element: two float64 read and one written, as STREAM counts its Triad ``a = b + s * c``. The product costs
nothing beside the memory, and numpy would need a second pass for it. Where the processor first reads the lines of ``a`` that it is about
to write (write-allocate), a third more bytes cross the bus than are counted; a copy by a device does not pay that. So the figure is a
lower bound of what the DRAM moves, and the one that other people's STREAM figures can be held against.

Each array is at least four times the last-level caches, as STREAM asks. Threads stay on the cores of one NUMA node and touch their part
first, so it lies there. The value is the *best* repetition, as STREAM's: anything else that runs on the machine only makes it slower.
"""

import os
import threading
import time
from collections.abc import Sequence

from forebay.errors import MeasurementError
from forebay.hardware.probing import topology
from forebay.hardware.reading import Reading
from forebay.units import MIB, show_bytes

COUNTED_BYTES = 24
TIMES_CACHE = 4
LEAST_BYTES, CACHE_UNKNOWN_BYTES = 64 * MIB, 128 * MIB


def array_bytes(cache_bytes: int | None, free_bytes: int) -> int:
    """Bytes of each of the three arrays: four times the caches, within a quarter of the free memory for all three.

    Raises:
        MeasurementError: there is too little free memory for arrays that the caches do not hold.
    """
    cache = CACHE_UNKNOWN_BYTES if cache_bytes is None else cache_bytes
    wanted = max(LEAST_BYTES, TIMES_CACHE * cache)
    if 3 * wanted > free_bytes // 2:
        raise MeasurementError(
            f"the rate of host DRAM needs three arrays of {show_bytes(wanted)}, {TIMES_CACHE} x the last-level cache, and half of the free "
            f"memory is {show_bytes(free_bytes // 2)}; free some memory and run `forebay probe` again"
        )
    return wanted


def aligned(elements: int):
    """An array of float64 that begins on a cache line.

    numpy's own begin 16 bytes into a page; its AVX-512 loop then splits every line, and runs at half the rate of the memory.
    """
    import numpy

    line = numpy.dtype(numpy.float64).itemsize * 8
    room = numpy.empty(elements + 8)
    skipped = -room.ctypes.data % line // 8
    return room[skipped : skipped + elements]


class Triad:
    """Three arrays in parts, one thread for each core; ``run`` times one pass over all of them."""

    def __init__(self, bytes_each: int, cores: Sequence[int], nodes: dict[int, list[int]]):
        import numpy

        self._add, self._stopped = numpy.add, False
        self._elements = bytes_each // 8 // len(cores)
        self.counted_bytes = COUNTED_BYTES * self._elements * len(cores)
        self._begin, self._end = threading.Barrier(len(cores) + 1), threading.Barrier(len(cores) + 1)
        beside = {core: mine for mine in nodes.values() for core in mine}
        self._times: list[tuple[float, float]] = [(0.0, 0.0)] * len(cores)
        self._threads = []
        for place, core in enumerate(cores):
            arrays = [aligned(self._elements) for _ in range(3)]
            work = (place, beside.get(core, list(cores)), arrays)
            self._threads.append(threading.Thread(target=self._work, args=work, daemon=True))
            self._threads[-1].start()
        self.run()  # the first pass meets pages that were only just touched

    def _work(self, place: int, near: list[int], arrays: list) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, near)  # of this thread alone
        for array in arrays:
            array.fill(1.0)  # the first touch decides on which node a page lies
        a, b, c = arrays
        while True:
            self._begin.wait()
            if self._stopped:
                return
            began = time.perf_counter()
            self._add(b, c, out=a)
            self._times[place] = (began, time.perf_counter())
            self._end.wait()

    def run(self) -> float:
        """Seconds of one pass, from the first thread's start to the last one's end."""
        self._begin.wait()
        self._end.wait()
        return max(end for _, end in self._times) - min(began for began, _ in self._times)

    def close(self) -> None:
        """End the threads; their arrays go with them."""
        self._stopped = True
        self._begin.wait()
        for thread in self._threads:
            thread.join()


def measure(free_bytes: int, seconds: float = 4.0) -> Reading:
    """The rate of host DRAM over the cores of this process, in some ``seconds`` (at least five passes).

    Raises:
        MeasurementError: too little free memory.
    """
    cores = topology.cores()
    triad = Triad(array_bytes(topology.last_level_cache_bytes(cores), free_bytes), cores, topology.nodes(cores))
    rates, until = [], time.perf_counter() + seconds
    while len(rates) < 5 or time.perf_counter() < until:
        rates.append(triad.counted_bytes / triad.run())
    triad.close()
    return Reading(group="dram", kind="triad", size=triad.counted_bytes, rates=tuple(rates), statistic="best")
