"""Measures the weight path; writes the tables of docs/results/weights.md.

    python -m benchmarks.weights [--cells KEY ...] [--again] [--list] [--quick]

Each cell runs in a process of its own and leaves a file in --results; one that has a file is not measured again
unless --again is given, so a sitting can be cut short and taken up on a quieter machine. Everything is measured in
rounds with raw TCP (or the engine's own load); look at the ratios. `steps/all` must come first: it trains what others
send.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.suite.cells import Cell, CellFolder, CellSpec, read_results, write_results
from benchmarks.suite.machine import ROOT, circumstances
from benchmarks.weights import fan_out, pause, training, transfer
from benchmarks.weights.page import page
from benchmarks.weights.versions import synthetic
from offbeat.rpc.memory import keep_freed_memory

PAGE = ROOT / "docs/results/weights.md"
RESULTS_FILE = ROOT / "docs/results/weights.json"
CHANGED = 0.0034
"""Share of the values that a synthetic step changes: about that of a rate of 1e-6."""
SIZES = {"135M": 269e6, "0.5B": 988e6, "1.5B": 3_087e6}
COPIES = 6
"""Of the weights in memory, at both ends, the receiver's file in shared memory included."""


def cells(scratch: Path, *, quick: bool) -> list[CellSpec]:
    """All cells, in order."""
    rounds = 1 if quick else 7
    found = [CellSpec("steps", "all", lambda: training.measure(scratch, quick=quick))]
    for rate, share in training.LARGEST_SHARES.items():
        found.append(
            CellSpec(
                "transfer",
                f"SmolLM2-135M at lr {rate:g}",
                lambda rate=rate, share=share: transfer.measure(  # type: ignore[misc]
                    training.recorded(scratch, rate), rounds=rounds, share=share
                ),
            )
        )
    for size, nbytes in SIZES.items():
        found.append(
            CellSpec(
                "transfer",
                f"synthetic {size}",
                lambda size=size, nbytes=nbytes: transfer.measure(  # type: ignore[misc]
                    synthetic(_fitting(10e6 if quick else nbytes), CHANGED),
                    rounds=rounds if size == "135M" else min(rounds, 4),
                    full=size != "1.5B",
                ),
            )
        )
    for receivers, tree in ((1, False), (4, False), (16, False), (1, True), (4, True), (16, True)):
        found.append(
            CellSpec(
                "fan-out",
                f"{receivers} {'behind a tree of relays' if tree else 'at the service'}",
                lambda receivers=receivers, tree=tree: fan_out.measure(  # type: ignore[misc]
                    synthetic(int(10e6 if quick else SIZES["135M"]), CHANGED),
                    receivers=receivers,
                    tree=tree,
                    rounds=min(rounds, 3),
                ),
            )
        )
    found.append(
        CellSpec("pause", "SmolLM2-135M", lambda: pause.measure(scratch, rounds=min(rounds, 5)))
    )
    return found


def _fitting(nbytes: float) -> int:
    """The size, or an error when the machine has no memory for it now."""
    free = psutil.virtual_memory().available
    if COPIES * nbytes > free:
        raise MemoryError(
            f"{COPIES * nbytes / 1e9:.1f} GB of memory are needed, {free / 1e9:.1f} are free"
        )
    return int(nbytes)


def measure_here(spec: CellSpec, folder: CellFolder) -> None:
    """Measures a cell in this process and keeps it."""
    found = circumstances()
    keep_freed_memory()  # as the services do whose part this process takes
    started = time.monotonic()
    rows = spec.measure()
    found["load_at_end"] = round(os.getloadavg()[0], 2)
    cell = Cell(spec.letter, spec.name, rows, time.monotonic() - started, found)
    folder.write(cell)
    print("\n".join(f"  {row.name}: {row.median:.4g} {row.unit}" for row in rows), flush=True)


def main() -> int:
    """The command line; 1 when a cell failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", metavar="KEY", help="these alone, by their beginning")
    parser.add_argument("--again", action="store_true", help="measure cells that have a file, too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does all still run?")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-page", action="store_true", help="leave docs/results alone")
    parser.add_argument("--results", type=Path, default=ROOT / "runs/bench-weights")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = CellFolder(arguments.results)
    all_cells = cells(arguments.results / "scratch", quick=arguments.quick)
    if arguments.inside:
        measure_here(next(s for s in all_cells if s.key == arguments.inside), folder)
        return 0
    wanted = [
        spec
        for spec in all_cells
        if arguments.cells is None or spec.key.startswith(tuple(arguments.cells))
    ]
    if arguments.list:
        print("\n".join(spec.key for spec in wanted))
        return 0
    failed = [
        spec.key
        for spec in wanted
        if (arguments.again or folder.read(spec.key) is None) and not _apart(spec, arguments)
    ]
    if not arguments.no_page:
        before = read_results(RESULTS_FILE)
        kept = [folder.read(spec.key) or before.get(spec.key) for spec in all_cells]
        found = [cell for cell in kept if cell is not None]
        PAGE.write_text(page(found), encoding="utf-8")
        write_results(RESULTS_FILE, found, "python -m benchmarks.weights")
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _apart(spec: CellSpec, arguments: argparse.Namespace) -> bool:
    """Has a process of its own measure a cell; False when that failed."""
    command = [sys.executable, "-m", "benchmarks.weights", "--inside", spec.key]
    command += ["--results", str(arguments.results)] + ["--quick"] * arguments.quick
    print(f"{time.strftime('%H:%M:%S')} {spec.key} (load {os.getloadavg()[0]:.1f})", flush=True)
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
