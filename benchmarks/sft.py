"""Supervised training for the time that a run trains: what stands beside the gain of reinforcement learning.

    python -m benchmarks.sft recipes/arithmetic_tiny.yaml --seconds 60 --out docs/results/learning.md

It goes on from the recipe's start policy, once with the demonstrator that made it, once with right answers only, which
a user of reinforcement learning does not have.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from offbeat.config import load_recipe
from services.learner.prepare.rows import examples
from services.learner.prepare.sft import SftSettings, prepare_sft

CALIBRATION_STEPS = 20


def settings_of(
    init: str, demonstrator: str | None, steps: int, arguments: argparse.Namespace
) -> SftSettings:
    """Settings of one training."""
    return SftSettings(
        init=init,
        demonstrator=demonstrator,
        steps=steps,
        batch=arguments.batch,
        lr=arguments.lr,
        warmup_steps=min(10, steps // 2),
        evaluate_every=10**6,
        seed=arguments.seed,
    )


def train(settings: SftSettings, train_rows: Any, heldout: Any) -> tuple[float, float, float]:
    """Seconds, greedy and sampled pass@1 of one training."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        last = prepare_sft(
            settings, train=train_rows, heldout=heldout, out=Path(folder) / "policy"
        )[-1]
        return time.monotonic() - started, last.greedy, last.sampled


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="training time to fill")
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
    train(
        settings_of(init, careless, 1, arguments), rows, heldout
    )  # the first one also pays for imports
    short, *_ = train(settings_of(init, careless, 1, arguments), rows, heldout)
    longer, *_ = train(settings_of(init, careless, 1 + CALIBRATION_STEPS, arguments), rows, heldout)
    steps = max(
        1, int((arguments.seconds - short) / max(1e-3, (longer - short) / CALIBRATION_STEPS))
    )
    lines = [
        "| supervised training | steps | seconds | greedy | sampled |",
        "|---|---|---|---|---|",
    ]
    for name, demonstrator in (("same demonstrator", careless), ("right answers only", None)):
        seconds, greedy, sampled = train(
            settings_of(init, demonstrator, steps, arguments), rows, heldout
        )
        lines.append(
            f"| {name} | {steps} × {arguments.batch} | {seconds:.0f} | {greedy:.3f} | {sampled:.3f} |"
        )
    text = "\n".join(lines)
    print(text)
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            options = (
                f"--seconds {arguments.seconds:g} --lr {arguments.lr:g} --batch {arguments.batch}"
            )
            file.write(
                f"\n`python -m benchmarks.sft {arguments.recipe} {options}`, {time.strftime('%Y-%m-%d')}:\n\n"
            )
            file.write(text + "\n")


if __name__ == "__main__":
    main()
