"""Which settings a resumed run must share with the run that it goes on from, and a clear answer when one differs.

Used by ``offbeat run --resume``, before anything is changed, and by the learner.
"""

from typing import Any

from offbeat.checkpoints import Checkpoint
from offbeat.config import Recipe
from offbeat.errors import ConfigError

FIXED = {
    "run.seed": "it decides the order of the data",
    "model.path": "the state belongs to that model",
    "learner.lora": "the state belongs to that adapter",
    "data.train": "ordinals would mean other prompts",
    "data.shuffle": "ordinals would mean other prompts",
    "data.prompt": "ordinals would mean other prompts",
    "data.messages": "ordinals would mean other prompts",
    "data.chat": "ordinals would mean other prompts",
    "data.system": "ordinals would mean other prompts",
    "data.chat_params": "ordinals would mean other prompts",
    "schedule.prompts_per_step": "ordinals would fall into other steps",
    "schedule.oversample": "ordinals would fall into other steps",
    "learner.batching.mini_batches": "the count of updates would not fit the steps",
    "learner.batching.passes": "the count of updates would not fit the steps",
}
"""Setting -> why it may not change. All others may: rates, losses, lag, replicas, ranks, engines, steps."""


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of `FIXED`, as they are stored in a checkpoint."""
    tree = recipe.model_dump(mode="json")
    return {key: _at(tree, key) for key in FIXED}


def check_settings(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Raises `ConfigError` naming every fixed setting that differs from the checkpoint's."""
    before = checkpoint.meta().settings
    now = fixed_settings(recipe)
    changed = [
        f"{key} was {before[key]!r}, is {now[key]!r} ({why})"
        for key, why in FIXED.items()
        if key in before and before[key] != now[key]
    ]
    if changed:
        raise ConfigError(
            f"the run can't be resumed from {checkpoint.path.name} with changed settings: {'; '.join(changed)}. "
            "Change them back, or start a new run"
        )
    if checkpoint.step > recipe.schedule.steps:
        raise ConfigError(
            f"schedule.steps is {recipe.schedule.steps}, but the checkpoint {checkpoint.path.name} "
            f"has {checkpoint.step} steps: raise schedule.steps, or start a new run"
        )


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree
