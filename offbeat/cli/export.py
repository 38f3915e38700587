"""`offbeat export`: the policy of a run as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.options import RunsFolder


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id or folder of the run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where to. Default: `export` in the run's folder."
        ),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Write the newest policy of a run as a folder that transformers loads."""
    import sys

    from offbeat.errors import ProcessFailed
    from offbeat.local.children import Child
    from offbeat.local.folder import find_run
    from offbeat.local.signals import run_until_signalled
    from offbeat.local.supervisor import describe_exit

    folder = find_run(run, runs)
    target = (out or folder / "export").resolve()
    module = [sys.executable, "-m", "services.learner.export"]

    async def call() -> int:
        child = await Child.start([*module, "--run", str(folder), "--out", str(target)])
        try:
            return await child.wait()
        finally:
            if child.running:
                await child.kill()

    code = run_until_signalled(call(), lambda _: None)
    if code != 0:
        raise ProcessFailed(f"the export of {folder} failed with {describe_exit(code)}; see above")
    print(f"the model is in {target}")
