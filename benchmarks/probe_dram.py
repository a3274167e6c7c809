"""The probe's rate of host DRAM beside a compiled STREAM triad, on the same cores and with arrays of the same size.

    python benchmarks/probe_dram.py [--passes N] [--results FOLDER]

The triad ``a[i] = b[i] + s * c[i]`` is compiled here with cc and OpenMP. The two take turns, pass by pass, so that whatever else the
machine does meets both alike. Printed for each: best, median and slowest of the passes, 24 bytes counted for an element; and the ratio
probe over STREAM of the bests (both quote the best), of the medians, and the median over the pairs. Exit code 0: the ratio of the bests
or that over the pairs is within 15 %.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import record

from forebay import __version__
from forebay.hardware.memory import free_host_bytes
from forebay.hardware.probing import dram, topology

WITHIN = 0.15
SOURCE = """
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  long n = atol(argv[1]);
  double *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b), *c = malloc(n * sizeof *c), s = 3.0;
  if (argc < 2 || !a || !b || !c) return 1;
#pragma omp parallel for schedule(static)
  for (long i = 0; i < n; i++) { a[i] = 0.0; b[i] = 1.0; c[i] = 2.0; }
  while (getchar() != EOF) {  /* one pass for each character on standard input */
    double began = omp_get_wtime();
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i++) a[i] = b[i] + s * c[i];
    printf("%.9f\\n", omp_get_wtime() - began);
    fflush(stdout);
  }
  return a[n / 2] != 7.0;
}
"""
FLAGS = ("-O3", "-march=native", "-fopenmp")


class Stream:
    """The compiled triad as a process that makes one pass for each byte it is sent."""

    def __init__(self, compiler: str, folder: str, elements: int, threads: int):
        source, program = Path(folder, "triad.c"), Path(folder, "triad")
        source.write_text(SOURCE)
        subprocess.run([compiler, *FLAGS, str(source), "-o", str(program)], check=True)
        # Passive: threads that spin between the passes would take the cores from the other side.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([str(program), str(elements)], env=environment, text=True, bufsize=1, **pipes)
        self.counted_bytes = dram.COUNTED_BYTES * elements
        self.run()

    def run(self) -> float:
        """Seconds of one pass, by the program's own clock."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("x")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the program; its sums are wrong if its exit code is not 0."""
        assert self._process.stdin
        self._process.stdin.close()
        if code := self._process.wait():
            raise SystemExit(f"the compiled triad ended with {code}: its sums are wrong or memory ran out")


def measure(compiler: str, passes: int, bytes_each: int) -> tuple[list[float], list[float]]:
    """Rates of the probe and of STREAM, pass by pass in turns, in bytes per second."""
    cores = topology.cores()
    with tempfile.TemporaryDirectory() as folder:
        stream = Stream(compiler, folder, bytes_each // 8, len(cores))
        triad = dram.Triad(bytes_each, cores, topology.nodes(cores))
        pairs = [(triad.counted_bytes / triad.run(), stream.counted_bytes / stream.run()) for _ in range(passes)]
        triad.close()
        stream.close()
    return [probe for probe, _ in pairs], [stream for _, stream in pairs]


def ratios(probe: list[float], stream: list[float]) -> dict[str, float]:
    """Probe over STREAM."""
    pairs = [ours / theirs for ours, theirs in zip(probe, stream, strict=True)]
    return {
        "best": max(probe) / max(stream),
        "median": statistics.median(probe) / statistics.median(stream),
        "median over the pairs": statistics.median(pairs),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON files")
    parser.add_argument("--passes", type=int, default=60, help="passes of each")
    given = parser.parse_args(argv)
    compiler = shutil.which("cc")
    if compiler is None:
        print("there is no C compiler (cc) here to build STREAM's triad with", file=sys.stderr)
        return 2
    cores, load = topology.cores(), os.getloadavg()
    cache = topology.last_level_cache_bytes(cores)
    bytes_each = dram.array_bytes(cache, free_host_bytes())
    probe, stream = measure(compiler, given.passes, bytes_each)
    for name, rates in (("forebay probe", probe), ("STREAM triad", stream)):
        print(f"{name:14} best {max(rates) / 1e9:7.2f}  median {statistics.median(rates) / 1e9:7.2f}  slowest {min(rates) / 1e9:7.2f} GB/s")
    found = ratios(probe, stream)
    print("probe / STREAM " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items()))
    today = datetime.date.today().isoformat()
    path = given.results / f"probe-dram_{platform.machine()}-{len(cores)}-cores_{today}.json"
    facts = {"cores": len(cores), "last_level_cache_bytes": cache, "array_bytes": bytes_each, "load_average": load, "flags": FLAGS}
    rates = {"probe_bytes_per_second": probe, "stream_bytes_per_second": stream, "probe_over_stream": found}
    versions = {"forebay": __version__, "numpy": numpy.__version__, "python": platform.python_version()}
    given.results.mkdir(parents=True, exist_ok=True)
    written = {"theme": "probe-dram", "date": today, "versions": versions} | facts | rates
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if any(abs(found[name] - 1) <= WITHIN for name in ("best", "median over the pairs")) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
