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
from offbeat.errors import CheckpointError, ConfigError, OffbeatError
from offbeat.telemetry import setup_logs
from services.learner import lora, state
from services.learner.model import load_policy, write_model

log = logging.getLogger("services.learner.export")


def export_run(run_folder: Path, target: Path, *, adapter: bool = False) -> Checkpoint:
    """Writes the model folder, or the adapter alone; returns the checkpoint that it came from.

    Raises `CheckpointError`, `ModelError`, and `ConfigError` when there is no adapter to write.
    """
    recipe = load_recipe(run_folder / "recipe.yaml")
    if adapter and recipe.learner.lora is None:
        raise ConfigError(
            f"{run_folder} trained every weight (no learner.lora): export it without --adapter"
        )
    newest = Checkpoints(run_folder, keep=recipe.learner.checkpoints.keep).latest()
    if newest is None:
        raise CheckpointError(
            f"{run_folder}: expected a committed checkpoint in checkpoints/, found none: "
            "wait for the first one, or export the start model, which is recipe's model.path"
        )
    source, dtype = Path(recipe.model.path), recipe.model.dtype
    if recipe.learner.lora is None:
        write_model(_weights(recipe, newest), source, target, dtype)
    else:
        tensors, config = _adapter(recipe, newest)
        if adapter:
            lora.write_adapter(tensors, config, target)
        else:
            write_model(lora.merged(source, config, tensors, dtype), source, target, dtype)
    write_card(recipe, target, step=newest.step, adapter=adapter)
    return newest


def _weights(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    model = load_policy(recipe.model.path, dtype="float32")
    with state.masters(checkpoint.path) as master, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(master(name))
    dtype = getattr(torch, recipe.model.dtype)
    names = dict(model.named_parameters())
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if name in names or name not in _tied(model)
    }


def _adapter(recipe: Recipe, checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], str]:
    """The adapter's tensors as they were published, and its configuration."""
    assert recipe.learner.lora is not None
    path, dtype = recipe.model.path, recipe.model.dtype
    made = lora.add_adapter(
        load_policy(path, dtype=dtype), recipe.learner.lora, seed=0, base=path, with_start=False
    )
    with state.masters(checkpoint.path) as master:
        tensors = {
            lora.saved_name(name): master(name).to(getattr(torch, dtype))
            for name, parameter in made.model.named_parameters()
            if parameter.requires_grad
        }
    return tensors, made.config_json


def _tied(model: torch.nn.Module) -> set[str]:
    """Names under which a parameter stands once more."""
    once = dict(model.named_parameters())
    return {name for name, _ in model.named_parameters(remove_duplicate=False) if name not in once}


def write_card(recipe: Recipe, target: Path, *, step: int, adapter: bool = False) -> None:
    """A model card beside the weights: what the model was trained with."""
    rewards = ", ".join(f"{f.name} (weight {f.weight:g})" for f in recipe.reward.functions)
    settings = recipe.learner.lora
    if settings is None:
        trained = "every weight"
    elif settings.adapter is not None:
        trained = f"LoRA, from the adapter `{Path(settings.adapter).name}`"
    else:
        trained = f"LoRA, r {settings.rank}, alpha {settings.scale:g}, {settings.modules}"
    text = f"""---
library_name: {"peft" if adapter else "transformers"}
tags: [reinforcement-learning, offbeat]
---
# {recipe.run.name}

A policy trained with [Offbeat](https://arxiv.org/abs/2410.18252) for {step} steps.

| | |
|---|---|
| start model | `{Path(recipe.model.path).name}` |
| trained | {trained} |
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
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone")
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.run / "recipe.yaml")
        setup_logs(recipe.telemetry, "export")
        newest = export_run(arguments.run, arguments.out, adapter=arguments.adapter)
    except OffbeatError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is a command
        return 1
    log.info("%s holds the policy after %d steps", arguments.out, newest.step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
