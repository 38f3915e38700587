"""Makes sure that the policy's folder is there before a run, and makes it where the recipe says how.

Used by `offbeat run` and `offbeat prepare`.
"""

import sys
from pathlib import Path

from offbeat.config import Recipe
from offbeat.errors import ModelError, ProcessFailed
from offbeat.local.children import Child
from offbeat.local.supervisor import ProcessSpec, describe_exit, last_lines, next_log


def model_is_there(recipe: Recipe) -> bool:
    """Whether the model folder can be used as it is."""
    return (Path(recipe.model.path) / "config.json").is_file()


def check_model(recipe: Recipe) -> bool:
    """Whether the model folder must be prepared first. Raises `ModelError` when it is missing for good."""
    if model_is_there(recipe):
        return False
    if recipe.prepare is not None:
        return True
    path = Path(recipe.model.path).absolute()
    found = "a folder without one" if path.is_dir() else "no such folder"
    raise ModelError(
        f"model.path: expected a Hugging Face model folder with a config.json, found {found} at {path}; "
        "correct the path, or give the recipe a `prepare` section that makes the model"
    )


def prepare_command(recipe_file: Path) -> tuple[str, ...]:
    """The command that makes the model folder."""
    return (sys.executable, "-m", "services.learner.prepare", "--recipe", str(recipe_file))


async def prepare_model(recipe: Recipe, recipe_file: Path, *, logs: Path | None = None) -> None:
    """Makes the model folder. Its words go to a log in `logs`, or to this process's output.

    Raises `ProcessFailed` when that fails or leaves no model behind.
    """
    command = prepare_command(recipe_file)
    log = None if logs is None else next_log(logs, ProcessSpec("prepare", command))
    child = await Child.start(command, log=log)
    try:
        code = await child.wait()
    finally:
        if child.running:  # cancelled
            await child.stop(grace_seconds=10.0)
    if code != 0:
        end = "" if log is None else f". The end of {log}:\n{last_lines(log, 15)}"
        raise ProcessFailed(f"preparing the model failed with {describe_exit(code)}{end}")
    if not model_is_there(recipe):
        raise ProcessFailed(
            f"preparing the model ended well, but {recipe.model.path} has no config.json; "
            "see prepare in the recipe"
        )
