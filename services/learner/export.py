"""``python -m services.learner.export --run FOLDER --out DIR``: a run's newest policy as a model folder.

The weights are those of the newest intact checkpoint; the learner need not run. `offbeat export` calls it.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch

from offbeat.checkpoints import Checkpoint, Checkpoints
from offbeat.config import Recipe, load_recipe
from offbeat.errors import CheckpointError, OffbeatError
from offbeat.telemetry import setup_logs
from services.learner import state
from services.learner.model import load_policy, write_model

log = logging.getLogger("services.learner.export")


def export_run(run_folder: Path, target: Path) -> Checkpoint:
    """Writes the model folder; returns the checkpoint that it came from. Raises `CheckpointError`, `ModelError`."""
    recipe = load_recipe(run_folder / "recipe.yaml")
    newest = Checkpoints(run_folder, keep=recipe.learner.checkpoints.keep).latest()
    if newest is None:
        raise CheckpointError(
            f"{run_folder}: expected a committed checkpoint in checkpoints/, found none: "
            "wait for the first one, or export the start model, which is recipe's model.path"
        )
    model = load_policy(recipe.model.path, dtype="float32")
    with state.masters(newest.path) as master, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(master(name))
    dtype = getattr(torch, recipe.model.dtype)
    names = dict(model.named_parameters())
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if name in names or name not in _tied(model)
    }
    write_model(tensors, Path(recipe.model.path), target, recipe.model.dtype)
    write_card(recipe, target, step=newest.step)
    return newest


def _tied(model: torch.nn.Module) -> set[str]:
    """Names under which a parameter stands once more."""
    once = dict(model.named_parameters())
    return {name for name, _ in model.named_parameters(remove_duplicate=False) if name not in once}


def write_card(recipe: Recipe, target: Path, *, step: int) -> None:
    """A model card beside the weights: what the model was trained with."""
    rewards = ", ".join(f"{f.name} (weight {f.weight:g})" for f in recipe.reward.functions)
    text = f"""---
library_name: transformers
tags: [reinforcement-learning, offbeat]
---
# {recipe.run.name}

A policy trained with [Offbeat](https://arxiv.org/abs/2410.18252) for {step} steps.

| | |
|---|---|
| start model | `{Path(recipe.model.path).name}` |
| loss | {recipe.learner.loss.name} |
| reward | {rewards} |
| prompts per step, completions per prompt | {recipe.schedule.prompts_per_step}, {recipe.sampling.k} |
| max_lag | {recipe.schedule.max_lag} |
| learning rate | {recipe.learner.optimizer.lr:g}, {recipe.learner.optimizer.schedule} |
| temperature | {recipe.sampling.temperature:g} |
| seed | {recipe.run.seed} |
"""
    (target / "README.md").write_text(text, encoding="utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.run / "recipe.yaml")
        setup_logs(recipe.telemetry, "export")
        newest = export_run(arguments.run, arguments.out)
    except OffbeatError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is a command
        return 1
    log.info("%s holds the policy after %d steps", arguments.out, newest.step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
