"""What each loss gains on a recipe, every one with a learning rate of its own: one table.

    python -m benchmarks.losses recipes/arithmetic_tiny.yaml --seeds 1 2 3 --out docs/results/losses.md

First the rate: short runs with a seed that the table does not use, from the middle of RATES upwards and, where that
was worse, downwards; the best greedy pass@1 wins. Then the seeds. Each cell is an `offbeat run` of its own; one that
has a result already is not run again, so that a sitting can be cut short.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning import Cell, run_cell

# Settings other than the defaults: with rewards of 0 and 1, TOPR without a baseline never pushes anything down.
LOSSES = {
    "online_dpo": "",
    "ipo": "",
    "copg": "",
    "best_of_n": "",
    "vargrad": "",
    "rloo": "",
    "proximal_rloo": "",
    "ppo": "",
    "grpo": "",
    "dr_grpo": "",
    "dapo": "",
    "cispo": "",
    "gspo": "",
    "decoupled_ppo": "",
    "topr": "baseline: group",
    "m2po": "",
    "vespo": "",
}
RATES = (1.6e-4, 4e-4, 1e-3)
TUNING_SEED = 100


class Sweep:
    """The cells of one recipe, with their results in one folder."""

    def __init__(self, recipe: Path, results: Path) -> None:
        self._recipe = recipe
        self._results = results

    def cell(self, loss: str, rate: float, seed: int, *, steps: int, prompts: int) -> Cell:
        """Runs a loss at max_lag 1, with one evaluation before and one after."""
        settings = ", ".join(filter(None, (f"name: {loss}", LOSSES[loss])))
        sets = {
            "schedule.max_lag": 1,
            "schedule.steps": steps,
            "evaluation.every_steps": steps,
            "evaluation.prompts": prompts,
            "evaluation.sampled": "false",
            "learner.checkpoints.every_steps": steps,
            "learner.optimizer.warmup_updates": max(1, steps // 10),
            "learner.optimizer.lr": rate,
            "learner.loss": "{" + settings + "}",
        }
        return run_cell(
            self._recipe,
            f"{loss}-{rate:g}-{steps}",
            seed,
            [f"{key}={value}" for key, value in sets.items()],
            self._results,
        )

    def tuned_rate(
        self, loss: str, *, steps: int, prompts: int
    ) -> tuple[float, dict[float, float]]:
        """The best of the rates that were tried, and the gain in points of each."""

        def gain(rate: float) -> float:
            return self.cell(loss, rate, TUNING_SEED, steps=steps, prompts=prompts).gain("greedy")[
                0
            ]

        low, middle, high = RATES
        gains = {middle: gain(middle), high: gain(high)}
        if gains[high] <= gains[middle]:
            gains[low] = gain(low)
        return max(gains, key=gains.__getitem__), gains


def row(loss: str, rate: float, tried: dict[float, float], cells: Sequence[Cell]) -> str:
    """One line of the table: the gains of the seeds, their mean, and its interval over seeds and prompts."""
    gains = [cell.gain("greedy") for cell in cells]
    mean = statistics.mean(gain for gain, _ in gains)
    # Of the mean of independent seeds, each with its own half width.
    half = sum(width**2 for _, width in gains) ** 0.5 / len(gains)
    tuning = ", ".join(f"{rate:g}: {tried[rate]:+.1f}" for rate in sorted(tried))
    return (
        f"| `{loss}` | {rate:g} | {' / '.join(f'{gain:+.1f}' for gain, _ in gains)} | "
        f"**{mean:+.1f} ± {half:.1f}** | {tuning} |"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=500, help="held-out prompts")
    parser.add_argument("--tuning-steps", type=int, default=25)
    parser.add_argument("--tuning-prompts", type=int, default=250)
    parser.add_argument(
        "--results", type=Path, default=Path("runs/losses"), help="folder of the cells' results"
    )
    parser.add_argument("--out", type=Path, help="Markdown file that the table is appended to")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(arguments.recipe, arguments.results)
    rows = ["| loss | rate | gain by seed | mean | gain while tuning |", "|---|---|---|---|---|"]
    for loss in arguments.losses:
        rate, tried = sweep.tuned_rate(
            loss, steps=arguments.tuning_steps, prompts=arguments.tuning_prompts
        )
        cells = [
            sweep.cell(loss, rate, seed, steps=arguments.steps, prompts=arguments.prompts)
            for seed in arguments.seeds
        ]
        rows.append(row(loss, rate, tried, cells))
        print(rows[-1], flush=True)
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            command = f"python -m benchmarks.losses {' '.join(sys.argv[1:])}"
            file.write(f"\n`{command}`, {time.strftime('%Y-%m-%d')}:\n\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
