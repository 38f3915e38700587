"""`offbeat doctor`: what on this machine keeps Offbeat from running, and what to do about it."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also import vLLM, which takes many seconds.")
    ] = False,
) -> None:
    """Check this machine and say what to fix. Exit code 1 when something must be fixed."""
    from rich.console import Console

    from offbeat.local.checks import Level, check_vllm_import, machine_checks
    from offbeat.local.packages import package_checks

    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    console = Console()
    failed = False

    checks = [check() for check in machine_checks(Path.cwd())] + package_checks()
    if deep:
        checks.append(check_vllm_import())
    for check in checks:
        level = f"{check.level.value:<4}"
        console.print(level, style=colours[check.level], end="  ")
        console.print(f"{check.name}: {check.found}", markup=False, highlight=False, soft_wrap=True)
        if check.fix:
            console.print(f"      -> {check.fix}", markup=False, highlight=False, soft_wrap=True)
        failed = failed or check.level is Level.FAIL
    if failed:
        raise typer.Exit(1)
