"""`offbeat serve`: one service in the foreground, for machines where something else starts the processes."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.options import Overrides


class Service(StrEnum):
    """Services that can be served."""

    CHECKPOINT = "checkpoint"
    GENERATOR = "generator"
    REWARD = "reward"
    LEARNER = "learner"


def serve(
    service: Annotated[Service, typer.Argument(help="Which service.")],
    recipe: Annotated[Path, typer.Option("--recipe", metavar="FILE", help="Recipe of the run.")],
    overrides: Overrides = [],  # noqa: B006 - typer copies it
) -> None:
    """Run one service of a run until SIGTERM.

    All services of a run need the same run.id, redis.url and checkpoint.address.
    """
    import os

    from offbeat.config import load_recipe
    from offbeat.local.commands import service_command

    settings = load_recipe(recipe, overrides)
    ranks = settings.learner.ranks if service is Service.LEARNER else 1
    command = service_command(service.value, str(recipe), overrides, ranks=ranks)
    # The service takes this process's place: signals and exit codes are its own.
    os.execv(command[0], command)
