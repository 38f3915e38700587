"""Measures, and writes the table and the file that the next run compares with.

    python -m benchmarks.suite [--only a b e] [--cells e/4_KB] [--again] [--cores 0 1] [--quick]

Each cell runs in a process of its own, pinned to the cores, and leaves a file in --results; one that has a file is not
measured again unless --again is given. With --list the cells are named and nothing is run.
"""

import argparse
import importlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.suite.cells import Cell, CellFolder, CellSpec, read_results, write_results
from benchmarks.suite.machine import ROOT, circumstances
from benchmarks.suite.options import Options
from benchmarks.suite.table import page

MODULES = {
    "a": "generator",
    "b": "learner",
    "d": "overlap",
    "e": "sample_path",
    "f": "start",
    "g": "start",
    "h": "peers",
    "i": "growth",
}
PAGE = ROOT / "docs/results/benchmarks.md"


def specs(letters: list[str], options: Options) -> Iterator[CellSpec]:
    """The cells of the letters, in order. A module is imported only when it is asked for."""
    for letter in letters:
        module = importlib.import_module(f"benchmarks.suite.{MODULES[letter]}")
        yield from (spec for spec in module.cells(options) if spec.letter == letter)


def measure_here(spec: CellSpec, folder: CellFolder) -> Cell:
    """Measures a cell in this process and keeps it."""
    found = circumstances()
    started = time.monotonic()
    rows = spec.measure()
    cell = Cell(spec.letter, spec.name, rows, time.monotonic() - started, found)
    folder.write(cell)
    return cell


def measure_apart(spec: CellSpec, options: argparse.Namespace) -> bool:
    """Has a process of its own measure a cell; False when that failed."""
    command = [sys.executable, "-m", "benchmarks.suite", "--inside", spec.key]
    command += ["--results", str(options.results), "--cores", *map(str, options.cores)]
    command += ["--quick"] if options.quick else []
    command += ["--gpu-share", str(options.gpu_share)] if options.gpu_share else []
    print(f"{time.strftime('%H:%M:%S')} {spec.key}", flush=True)
    child = subprocess.Popen(command)
    try:
        return child.wait() == 0
    finally:
        # Told to stop: so is the cell, which then stops the run or the servers that it has started.
        if child.poll() is None:
            child.terminate()
            child.wait()


def main() -> int:
    """The command line; 1 when a cell failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(MODULES), default=sorted(MODULES))
    parser.add_argument("--cells", nargs="+", metavar="LETTER/NAME", help="these cells alone")
    parser.add_argument("--again", action="store_true", help="measure cells that have a file, too")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: does everything still run?"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-page", action="store_true", help="write no table")
    parser.add_argument("--page", type=Path, default=PAGE, help="the table; its data go beside it")
    parser.add_argument("--gpu-share", type=float, help="of the GPU's memory for vLLM; unset: CPU")
    parser.add_argument("--results", type=Path, default=ROOT / "runs/bench")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, arguments.cores)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = Options(
        scratch=arguments.results.resolve() / "scratch",
        cores=arguments.cores,
        quick=arguments.quick,
        gpu_share=arguments.gpu_share,
    )
    folder = CellFolder(arguments.results)
    if arguments.inside:
        letter = arguments.inside.partition("/")[0]
        spec = next(s for s in specs([letter], options) if s.key == arguments.inside)
        cell = measure_here(spec, folder)
        print("\n".join(f"  {row.name}: {row.median:.4g} {row.unit}" for row in cell.rows))
        return 0
    wanted = [
        spec
        for spec in specs(arguments.only, options)
        if arguments.cells is None or spec.key in arguments.cells
    ]
    if arguments.list:
        print("\n".join(spec.key for spec in wanted))
        return 0
    failed = [
        spec.key
        for spec in wanted
        if (arguments.again or folder.read(spec.key) is None) and not measure_apart(spec, arguments)
    ]
    if not arguments.no_page:
        report(options, folder, arguments.page)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def report(options: Options, folder: CellFolder, file: Path) -> None:
    """Writes the page and the results of all cells that have a file; the others keep what they had."""
    before = read_results(file.with_suffix(".json"))
    kept = [
        folder.read(spec.key) or before.get(spec.key) for spec in specs(sorted(MODULES), options)
    ]
    cells = [cell for cell in kept if cell is not None]
    command = shlex.join(["python", "-m", "benchmarks.suite", *sys.argv[1:]])
    file.write_text(page(cells, before, command), encoding="utf-8")
    write_results(file.with_suffix(".json"), cells, command)


if __name__ == "__main__":
    sys.exit(main())
