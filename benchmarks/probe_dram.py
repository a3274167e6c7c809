"""The probe's rate of host DRAM beside a compiled STREAM triad, on the same cores and with arrays of the same size.

    python benchmarks/probe_dram.py [--rounds N] [--results FOLDER]

The triad ``a[i] = b[i] + s * c[i]`` is compiled here with cc and OpenMP. A round is what the probe does at least: ``PASSES`` passes of each
side, in turns and with the side that begins changing from pass to pass, so that whatever else the machine does meets both alike. Each side
quotes the best pass of the round, as the probe and STREAM both do: one statistic on both sides. What is held to 15 % is the median over
the rounds of the ratio of the two. A single round, or the bests of a whole run, is luck on a shared machine: the one pass that other
work spared. They are printed beside it and decide nothing. 24 bytes are counted for an element. Exit code 0: within 15 %.
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
ROUNDS, PASSES = 24, 5
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


def measure(compiler: str, rounds: int, bytes_each: int) -> list[list[tuple[float, float]]]:
    """(rate of the probe, rate of STREAM) of each pass of each round, in bytes per second."""
    cores = topology.cores()
    with tempfile.TemporaryDirectory() as folder:
        stream = Stream(compiler, folder, bytes_each // 8, len(cores))
        triad = dram.Triad(bytes_each, cores, topology.nodes(cores))
        found = [[_pair(triad, stream, probe_first=turn % 2 == 0) for turn in range(PASSES)] for _ in range(rounds)]
        triad.close()
        stream.close()
    return found


def _pair(triad: dram.Triad, stream: Stream, *, probe_first: bool) -> tuple[float, float]:
    """One pass of each side."""
    seconds = {side: side.run() for side in ((triad, stream) if probe_first else (stream, triad))}
    return triad.counted_bytes / seconds[triad], stream.counted_bytes / seconds[stream]


def quoted(rounds: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """What each side quotes in each round: its best pass."""
    return [(max(ours for ours, _ in passes), max(theirs for _, theirs in passes)) for passes in rounds]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON files")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of {PASSES} passes of each side")
    given = parser.parse_args(argv)
    compiler = shutil.which("cc")
    if compiler is None:
        print("there is no C compiler (cc) here to build STREAM's triad with", file=sys.stderr)
        return 2
    cores, load = topology.cores(), os.getloadavg()
    cache = topology.last_level_cache_bytes(cores)
    bytes_each = dram.array_bytes(cache, free_host_bytes())
    rounds = measure(compiler, given.rounds, bytes_each)
    best = quoted(rounds)
    for name, side in (("forebay probe", 0), ("STREAM triad", 1)):
        passes, bests = [pair[side] for passes in rounds for pair in passes], [pair[side] for pair in best]
        print(
            f"{name:14} quotes {statistics.median(bests) / 1e9:6.2f} (median round; {min(bests) / 1e9:.2f} to {max(bests) / 1e9:.2f})  "
            f"median pass {statistics.median(passes) / 1e9:6.2f} GB/s"
        )
    ratios = sorted(ours / theirs for ours, theirs in best)
    ratio = statistics.median(ratios)
    print(f"probe / STREAM, best of {PASSES} on both sides: median round {ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    today = datetime.date.today().isoformat()
    path = given.results / f"probe-dram_{platform.machine()}-{len(cores)}-cores_{today}.json"
    facts = {"cores": len(cores), "last_level_cache_bytes": cache, "array_bytes": bytes_each, "load_average": load, "flags": FLAGS}
    rates = {"rounds_bytes_per_second": rounds, "probe_over_stream": ratio, "probe_over_stream_by_round": ratios}
    versions = {"forebay": __version__, "numpy": numpy.__version__, "python": platform.python_version()}
    given.results.mkdir(parents=True, exist_ok=True)
    written = {"theme": "probe-dram", "date": today, "versions": versions} | facts | rates
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if abs(ratio - 1) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
