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
    share_cores: Annotated[
        bool,
        typer.Option(
            "--share-cores",
            help="The run's other services are on this machine too: take a share of its cores, not all.",
        ),
    ] = False,
    nodes: Annotated[
        int,
        typer.Option("--nodes", min=1, help="Learner: machines that its ranks are spread over."),
    ] = 1,
    node: Annotated[
        int, typer.Option("--node", min=0, help="Learner: which of them this is; 0 has rank 0.")
    ] = 0,
    meet: Annotated[
        str | None,
        typer.Option("--meet", metavar="HOST:PORT", help="Learner: node 0, where its ranks meet."),
    ] = None,
) -> None:
    """Run one service of a run until SIGTERM.

    All services of a run need the same run.id, redis.url and checkpoint.address.
    """
    import os

    from offbeat.config import load_recipe
    from offbeat.local.commands import Node, service_command, threads_environment
    from offbeat.local.folder import RunFolder

    settings = load_recipe(recipe, overrides)
    ranks = 1
    if service is Service.LEARNER:
        ranks = settings.learner.ranks
        if node == 0:
            # Where `status`, `audit` and `export` find the run afterwards.
            RunFolder.take(settings).keep_over_exec()
    place = Node(node, nodes, meet)
    command = service_command(service.value, str(recipe), overrides, ranks=ranks, node=place)
    shared = threads_environment(settings, service.value) if share_cores else {}
    # The service takes this process's place: signals and exit codes are its own.
    os.execve(command[0], command, {**os.environ, **shared})
