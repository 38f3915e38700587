"""Training against a proxy, judged by gold: several seeds of `recipes/tldr_tiny.yaml`, and gold beside proxy over time.

    python -m benchmarks.gold recipes/tldr_tiny.yaml --seeds 1 2 3 --out docs/results/tldr_tiny.md

Each seed is an `offbeat run` of its own; a finished one in --runs is not run again, so that a sitting can be cut short.
The interval of the gain in win-rate is that of a difference of two shares of the same number of posts (normal, 95 %),
which is wider than a paired one.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

COLUMNS = {
    "gold win": "component/gold_win",
    "gold": "component/gold",
    "proxy": "component/reward_model",
    "perplexity": "component/perplexity",
    "with the prompt's tokens": "component/perplexity_all",
    "tokens": "component/tokens",
}


@dataclass
class Run:
    """A finished run: what its evaluations found, by step, and the seconds of its steps."""

    seed: int
    evaluations: dict[int, dict[str, float]]
    train_seconds: float

    @property
    def ends(self) -> tuple[dict[str, float], dict[str, float]]:
        """The first and the last evaluation."""
        return self.evaluations[min(self.evaluations)], self.evaluations[max(self.evaluations)]

    def gain(self) -> tuple[float, float]:
        """Gain of the gold win-rate in points, and half the width of its 95 % interval."""
        before, after = (found["component/gold_win"] for found in self.ends)
        posts = min(found["prompts"] for found in self.ends)
        variance = (before * (1 - before) + after * (1 - after)) / posts
        return 100 * (after - before), 100 * 1.96 * math.sqrt(variance)


def run_seed(recipe: Path, seed: int, overrides: list[str], runs: Path) -> Run:
    """Runs a seed, or reads its result if it has one."""
    folder = runs / f"seed-{seed}"
    if not list(folder.glob("*/export")):
        sets = [f"run.seed={seed}", f"run.directory={folder.resolve()}", *overrides]
        command = [str(Path(sys.executable).parent / "offbeat"), "run", str(recipe)]
        subprocess.run([*command, *(part for item in sets for part in ("--set", item))], check=True)
    return read_run(max(path.parent for path in folder.glob("*/export")), seed)


def read_run(folder: Path, seed: int) -> Run:
    """The evaluations of a finished run, from its metrics."""
    prefix = "eval/greedy/"
    evaluations: dict[int, dict[str, float]] = {}
    seconds = 0.0
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        seconds += line.get("time/step_seconds", 0.0)
        found = {
            name.removeprefix(prefix): value
            for name, value in line.items()
            if name.startswith(prefix)
        }
        if found:
            evaluations[line["step"]] = found
    return Run(seed, evaluations, seconds)


def ends_table(runs: list[Run]) -> str:
    """A row a seed: before → after, with 95 % intervals."""
    names = list(COLUMNS)
    rows = [
        "| seed | " + " | ".join([names[0], "gain, points", *names[1:], "training, s"]) + " |",
        "|" + "---|" * (len(names) + 3),
    ]
    for run in runs:
        cells = [_change(*run.ends, COLUMNS[name]) for name in names]
        gain, half = run.gain()
        cells.insert(1, f"{gain:+.1f} ± {half:.1f}")
        rows.append(f"| {run.seed} | {' | '.join(cells)} | {run.train_seconds:.0f} |")
    mean = sum(run.gain()[0] for run in runs) / len(runs)
    rows.append(f"| **mean** | | **{mean:+.1f}** |" + " |" * len(names))
    return "\n".join(rows)


def curve_table(runs: list[Run]) -> str:
    """Means over the seeds, by step: whether gold still follows the proxy."""
    steps = sorted(set.intersection(*(set(run.evaluations) for run in runs)))
    rows = ["| step | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for step in steps:
        means = [
            sum(run.evaluations[step][key] for run in runs) / len(runs) for key in COLUMNS.values()
        ]
        rows.append(f"| {step} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(rows)


def _change(before: dict[str, float], after: dict[str, float], key: str) -> str:
    return f"{_with_interval(before, key)} → {_with_interval(after, key)}"


def _with_interval(found: dict[str, float], key: str) -> str:
    half = (found[f"{key}_high"] - found[f"{key}_low"]) / 2
    return f"{found[key]:.3f} ± {half:.3f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/gold"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="Markdown file that the tables are appended to")
    arguments = parser.parse_args()
    runs = [
        run_seed(arguments.recipe, seed, arguments.overrides, arguments.runs)
        for seed in arguments.seeds
    ]
    text = f"{ends_table(runs)}\n\nMeans over the seeds, by step:\n\n{curve_table(runs)}\n"
    print(text)
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            command = f"python -m benchmarks.gold {' '.join(sys.argv[1:])}"
            file.write(f"\n`{command}`, {time.strftime('%Y-%m-%d')}:\n\n{text}")


if __name__ == "__main__":
    main()
