"""`offbeat run`: a whole run on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.options import Overrides, RunsFolder

if TYPE_CHECKING:
    from offbeat.config import Recipe
    from offbeat.local.folder import RunFolder


def run(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="The recipe, a YAML file. With --resume: id or folder of a run (default: the newest).",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what every process would get; start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an earlier run, from its last checkpoint.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --resume: go on from this checkpoint (its name or step); newer ones are put aside.",
        ),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Train a recipe on this machine: starts every process, shows progress, ends when all is done."""
    from offbeat.local.folder import RunFolder, find_run

    if checkpoint is not None and not resume:
        raise typer.BadParameter("--checkpoint goes with --resume")
    if resume:
        path = find_run(recipe, runs)
        if dry_run:
            _dry_run(path / "recipe.yaml", overrides)
            return
        folder, settings = RunFolder.resume(path, overrides, checkpoint=checkpoint)
    else:
        if recipe is None:
            raise typer.BadParameter("give a recipe, or --resume to go on with an earlier run")
        if dry_run:
            _dry_run(Path(recipe), overrides)
            return
        folder, settings = RunFolder.create(_load(Path(recipe), overrides))
    with folder:
        _run(folder, settings)


def _load(path: Path, overrides: list[str]) -> "Recipe":
    from offbeat.config import load_recipe
    from offbeat.local.data import check_data_files
    from offbeat.local.model import check_model

    settings = load_recipe(path, overrides)
    # Before a folder is made for a run that can't start.
    check_model(settings)
    check_data_files(settings)
    return settings


def _dry_run(path: Path, overrides: list[str]) -> None:
    from offbeat.cli.dry_run import print_dry_run
    from offbeat.local.folder import with_run_id

    print_dry_run(with_run_id(_load(path, overrides)))


def _run(folder: "RunFolder", settings: "Recipe") -> None:
    from rich.console import Console

    from offbeat.cli.display import Display
    from offbeat.cli.summary import print_summary
    from offbeat.local.data import check_data_files
    from offbeat.local.run import run_recipe
    from offbeat.local.signals import run_until_signalled

    check_data_files(settings)  # of a run that is resumed; a new one was checked before
    console = Console()
    with Display(console, settings.run_id) as display:
        display.event(f"run {settings.run_id}, folder {folder.path}")
        outcome = run_until_signalled(
            run_recipe(settings, folder, display),
            lambda _: display.event(
                "stopping: work under way is ended cleanly; once more, and all is killed"
            ),
        )
    print_summary(console, folder, outcome)
    if not outcome.finished:
        console.print("the learner was stopped before the last step", markup=False)
        raise typer.Exit(1)
