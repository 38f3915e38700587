"""`offbeat audit`: proof that a run lost nothing and trained nothing twice."""

import json
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.options import RunsFolder


def audit(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Id or folder of the run. Default: the newest."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove from ledger and checkpoints that each ordinal was trained once, filtered, or given up."""
    from offbeat.audit import audit_run
    from offbeat.config import load_recipe
    from offbeat.local.folder import find_run

    folder = find_run(run, runs)
    recipe = load_recipe(folder / "recipe.yaml")
    schedule = recipe.schedule
    found = audit_run(folder, prompts_per_step=schedule.cohort_size, max_lag=schedule.max_lag)
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        lags = ", ".join(f"{lag}: {count}" for lag, count in found.lag_counts.items())
        print(f"run {found.run_id}: {found.steps} steps by {found.terms} learners in turn")
        print(f"  ordinals   {found.trained} trained, {found.filtered} filtered, {found.dead} dead")
        print(f"  lag        {lags} (groups by lag; bound {schedule.max_lag})")
        print(f"  versions   {found.versions} published, numbers growing")
        print(
            f"  recovery   {found.reissued} issued again, {found.retrained_steps} steps trained again"
        )
        for problem in found.problems:
            print(f"  PROBLEM    {problem}")
        print("clean: every ordinal counts exactly once" if found.clean else "NOT clean")
    if not found.clean:
        raise typer.Exit(1)
