"""What the entry points of all services share: their arguments, and saying where they listen.

A service that asks for port 0 learns its port only when it is bound. `write_address` leaves
HOST:PORT in the run's folder, where whoever started the process finds it.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from offbeat.config import Recipe, load_recipe
from offbeat.errors import ConfigError


def parse_service_args(argv: Sequence[str] | None = None) -> Recipe:
    """The recipe that ``--recipe FILE [--set KEY=VALUE]...`` names.

    Ends the process with code 2 and one line on stderr when that can't be used.
    """
    parser = argparse.ArgumentParser(description="A service of one Offbeat run.")
    parser.add_argument("--recipe", required=True, metavar="FILE", help="recipe of the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="replaces a value of the recipe, e.g. schedule.max_lag=2; may be repeated",
    )
    arguments = parser.parse_args(argv)
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        run_folder(recipe)
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    return recipe


def run_folder(recipe: Recipe) -> Path:
    """The run's own folder. Raises `ConfigError` when the recipe names no run."""
    if recipe.run.id is None:
        raise ConfigError(
            "run.id is not set, and a service that runs on its own must know its run: "
            "give all services the same one, e.g. --set run.id=my-run"
        )
    return Path(recipe.run.directory) / recipe.run.id


def address_file(recipe: Recipe, service: str, member_id: str) -> Path:
    """Where `write_address` writes."""
    return run_folder(recipe) / "addresses" / f"{service}.{member_id}"


def write_address(recipe: Recipe, service: str, member_id: str, address: str) -> Path:
    """Writes HOST:PORT of a service's process into the run's folder, all of it or nothing."""
    path = address_file(recipe, service, member_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(address, encoding="utf-8")
    partial.replace(path)
    return path
