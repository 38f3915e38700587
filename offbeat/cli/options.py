"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the recipe, e.g. learner.optimizer.lr=1e-5. May be repeated.",
    ),
]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
RunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Id or folder of the run. Default: the newest one."),
]
RunsFolder = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of all runs.")]
