"""`offbeat doctor`: what on this machine or in a recipe keeps Offbeat from running, and what to do about it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.options import Overrides

if TYPE_CHECKING:
    from offbeat.local.checks import Check


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE", help="Also check this recipe: its settings, model folder and data."
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    deep: Annotated[
        bool, typer.Option("--deep", help="Also import vLLM, which takes many seconds.")
    ] = False,
) -> None:
    """Check this machine, and a recipe, and say what to fix. Exit code 1 when something must be fixed."""
    from rich.console import Console

    from offbeat.local.checks import Level, check_vllm_import, machine_checks
    from offbeat.local.packages import package_checks

    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    console = Console()
    failed = False

    checks = [check() for check in machine_checks(Path.cwd())] + package_checks()
    if deep:
        checks.append(check_vllm_import())
    if recipe is not None:
        checks += _recipe_checks(recipe, overrides)
    for check in checks:
        level = f"{check.level.value:<4}"
        console.print(level, style=colours[check.level], end="  ")
        console.print(f"{check.name}: {check.found}", markup=False, highlight=False, soft_wrap=True)
        if check.fix:
            console.print(f"      -> {check.fix}", markup=False, highlight=False, soft_wrap=True)
        failed = failed or check.level is Level.FAIL
    if failed:
        raise typer.Exit(1)


def _recipe_checks(recipe: Path, overrides: list[str]) -> "list[Check]":
    from offbeat.config import load_recipe
    from offbeat.errors import OffbeatError
    from offbeat.local.checks import Check, Level
    from offbeat.local.data import check_data_files, data_checks
    from offbeat.local.model import check_model

    try:
        settings = load_recipe(recipe, overrides)
        check_data_files(settings)
        missing = check_model(settings)
    except OffbeatError as error:
        return [Check("recipe", Level.FAIL, str(error), "correct the recipe")]
    checks = [Check("recipe", Level.OK, str(recipe))]
    if missing:
        fix = f"offbeat prepare {recipe}"
        return [*checks, Check("data", Level.WARN, "not read: no tokenizer is there yet", fix)]
    return checks + data_checks(recipe, overrides)
