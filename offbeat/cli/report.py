"""`offbeat report`: what happened in a run, as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.options import RunName, RunsFolder


def report(
    run: RunName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Where to. Default: report.html in the run's folder."
        ),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Write one HTML file about a run: curves, who waited, samples, audit, recipe. It needs no network."""
    from offbeat.errors import ConfigError
    from offbeat.local.folder import find_run

    folder = find_run(run, runs)
    target = (out or folder / "report.html").resolve()
    try:
        from offbeat.report.page import write_report
    except ImportError as error:
        raise ConfigError(
            f"the report is drawn by packages that are missing here ({error}): pip install 'offbeat[report]'"
        ) from error
    found = write_report(folder, target)
    alarms = len(found.alarms())
    print(f"{found.status}, {len(found.steps)} steps, {alarms} alarm{'s' if alarms != 1 else ''}")
    print(f"the report is in {target}")
