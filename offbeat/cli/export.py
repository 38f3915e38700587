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
            "--out",
            metavar="DIR",
            help="Where to. Default: `export`, or `adapter`, in the run's folder.",
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, as PEFT and vLLM load it.")
    ] = False,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Write the newest policy of a run as a folder that transformers loads, a LoRA adapter merged into it."""
    import sys

    from offbeat.errors import ProcessFailed
    from offbeat.local.children import Child
    from offbeat.local.folder import find_run
    from offbeat.local.signals import run_until_signalled
    from offbeat.local.supervisor import describe_exit

    folder = find_run(run, runs)
    target = (out or folder / ("adapter" if adapter else "export")).resolve()
    command = [sys.executable, "-m", "services.learner.export"]
    command += ["--run", str(folder), "--out", str(target)]
    command += ["--adapter"] if adapter else []

    async def call() -> int:
        child = await Child.start(command)
        try:
            return await child.wait()
        finally:
            if child.running:
                await child.kill()

    code = run_until_signalled(call(), lambda _: None)
    if code != 0:
        raise ProcessFailed(f"the export of {folder} failed with {describe_exit(code)}; see above")
    print(f"the {'adapter' if adapter else 'model'} is in {target}")
