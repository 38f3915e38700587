"""Puts the commands together."""

import typer

from offbeat import __version__
from offbeat.cli.audit import audit
from offbeat.cli.doctor import doctor
from offbeat.cli.export import export
from offbeat.cli.prepare import prepare
from offbeat.cli.report import report
from offbeat.cli.run import run
from offbeat.cli.serve import serve
from offbeat.cli.status import status

app = typer.Typer(
    name="offbeat",
    help="Asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"offbeat {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Asynchronous reinforcement learning of language models."""


for command in (run, serve, prepare, status, audit, report, export, doctor):
    app.command()(command)
