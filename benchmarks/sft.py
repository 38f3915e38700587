"""Supervised training beside a run: what the same compute gains where right answers are at hand.

    OMP_NUM_THREADS=1 python -m benchmarks.sft recipes/arithmetic_tiny.yaml --steps 500 --out docs/results/learning.md

It goes on from the recipe's start policy, once with the demonstrator that made it, once with right answers only, which
a user of reinforcement learning does not have. Give as many steps as take the time of the run beside it; the table says
how many seconds they took, and how many core-seconds, which do not depend on what else the machine does.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from offbeat.config import load_recipe
from services.learner.prepare.rows import examples
from services.learner.prepare.sft import Evaluation, SftSettings, prepare_sft


def settings_of(init: str, demonstrator: str | None, arguments: argparse.Namespace) -> SftSettings:
    """Settings of one training."""
    return SftSettings(
        init=init,
        demonstrator=demonstrator,
        steps=arguments.steps,
        batch=arguments.batch,
        lr=arguments.lr,
        warmup_steps=min(10, arguments.steps // 2),
        evaluate_every=10**6,
        seed=arguments.seed,
    )


def train(settings: SftSettings, train_rows: Any, heldout: Any) -> tuple[float, float, Evaluation]:
    """Seconds, core-seconds and the last evaluation of one training."""
    with tempfile.TemporaryDirectory() as folder:
        started, cpu = time.monotonic(), time.process_time()
        out = Path(folder) / "policy"
        last = prepare_sft(settings, train=train_rows, heldout=heldout, out=out)[-1]
        return time.monotonic() - started, time.process_time() - cpu, last


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, required=True, help="optimizer updates")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Markdown file that the table is appended to")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    assert recipe.prepare is not None
    careless = str(recipe.prepare.params["demonstrator"])
    rows, heldout = examples(recipe.data)
    init = recipe.model.path
    lines = [
        "| supervised training | steps | seconds | core-seconds | greedy | sampled |",
        "|---|---|---|---|---|---|",
    ]
    for name, demonstrator in (("same demonstrator", careless), ("right answers only", None)):
        settings = settings_of(init, demonstrator, arguments)
        seconds, core_seconds, last = train(settings, rows, heldout)
        lines.append(
            f"| {name} | {arguments.steps} × {arguments.batch} | {seconds:.0f} | {core_seconds:.0f} "
            f"| {last.greedy:.3f} | {last.sampled:.3f} |"
        )
    text = "\n".join(lines)
    print(text)
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            options = f"--steps {arguments.steps} --lr {arguments.lr:g} --batch {arguments.batch}"
            file.write(
                f"\n`python -m benchmarks.sft {arguments.recipe} {options}`, {time.strftime('%Y-%m-%d')}:\n\n"
            )
            file.write(text + "\n")


if __name__ == "__main__":
    main()
