"""Does a recipe learn? Several seeds of the same run, the same with permuted rewards, and a table of both.

    python -m benchmarks.learning recipes/arithmetic_tiny.yaml --seeds 1 2 3 --out docs/results/learning.md

Each cell is an `offbeat run` of its own; one that has a result already is not run again, so that a sitting can be cut
short. The interval of a gain is that of a difference of two shares of the same number of prompts (normal, 95 %), which
is wider than a paired one.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

MODES = ("greedy", "sampled")


@dataclass
class Cell:
    """One run: pass@1 before and after, by mode, and the seconds from its first step to its last."""

    name: str
    seed: int
    before: dict[str, float]
    after: dict[str, float]
    prompts: int
    train_seconds: float
    wall_seconds: float
    run: str

    def gain(self, mode: str) -> tuple[float, float]:
        """Gain of pass@1 in points, and half the width of its 95 % interval."""
        before, after = self.before[mode], self.after[mode]
        variance = (before * (1 - before) + after * (1 - after)) / self.prompts
        return 100 * (after - before), 100 * 1.96 * math.sqrt(variance)


def run_cell(recipe: Path, name: str, seed: int, overrides: list[str], results: Path) -> Cell:
    """Runs one cell, or reads its result if it has one."""
    file = results / f"{name}-{seed}.json"
    if file.exists():
        return Cell(**json.loads(file.read_text()))
    runs = results / "runs" / f"{name}-{seed}"
    sets = [f"run.seed={seed}", f"run.directory={runs.resolve()}", *overrides]
    command = [str(Path(sys.executable).parent / "offbeat"), "run", str(recipe)]
    started = time.monotonic()
    subprocess.run([*command, *(part for item in sets for part in ("--set", item))], check=True)
    wall = time.monotonic() - started
    folder = max(runs.iterdir(), key=lambda path: path.stat().st_mtime)
    cell = read_cell(folder, name, seed, wall)
    file.write_text(json.dumps(asdict(cell), indent=1))
    return cell


def read_cell(folder: Path, name: str, seed: int, wall: float) -> Cell:
    """The result of a finished run, from its metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    last = steps[-1]["step"]

    def at(step: int) -> dict[str, float]:
        keys = {mode: f"eval/{mode}/pass@1" for mode in MODES}
        return {
            mode: float(line[key])
            for mode, key in keys.items()
            for line in lines
            if line["step"] == step and key in line
        }

    return Cell(
        name=name,
        seed=seed,
        before=at(0),
        after=at(last),
        prompts=int(
            next(line["eval/greedy/prompts"] for line in lines if "eval/greedy/prompts" in line)
        ),
        train_seconds=sum(line["time/step_seconds"] for line in steps),
        wall_seconds=wall,
        run=folder.name,
    )


def table(cells: list[Cell]) -> str:
    """A Markdown table, a row a cell, and the means by name."""
    rows = [
        "| run | seed | greedy before → after | gain | sampled before → after | gain | training, s | whole run, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        parts = []
        for mode in MODES:
            gain, half = cell.gain(mode)
            parts.append(
                f"{cell.before[mode]:.3f} → {cell.after[mode]:.3f} | {gain:+.1f} ± {half:.1f}"
            )
        rows.append(
            f"| {cell.name} | {cell.seed} | {' | '.join(parts)} | {cell.train_seconds:.0f} | {cell.wall_seconds:.0f} |"
        )
    for name in dict.fromkeys(cell.name for cell in cells):
        chosen = [cell for cell in cells if cell.name == name]
        means = [sum(cell.gain(mode)[0] for cell in chosen) / len(chosen) for mode in MODES]
        rows.append(f"| **{name}, mean** | | | **{means[0]:+.1f}** | | **{means[1]:+.1f}** | | |")
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--name", default="reward", help="name of the rows")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument(
        "--no-control", action="store_true", help="leave out the runs with permuted rewards"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("runs/learning"), help="folder of the cells' results"
    )
    parser.add_argument("--out", type=Path, help="Markdown file that the table is appended to")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    controls = (
        []
        if arguments.no_control
        else [(f"{arguments.name}, permuted", ["learner.permute_rewards=true"])]
    )
    cells = [
        run_cell(arguments.recipe, name, seed, arguments.overrides + extra, arguments.results)
        for name, extra in [(arguments.name, []), *controls]
        for seed in arguments.seeds
    ]
    text = table(cells)
    print(text)
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(
                f"\n`python -m benchmarks.learning {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}:\n\n"
            )
            file.write(text + "\n")


if __name__ == "__main__":
    main()
