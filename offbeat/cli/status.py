"""`offbeat status`: what every process of a run is doing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli.options import RunName, RunsFolder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from offbeat.local.status import MemberStatus, RunStatus

WATCH_SECONDS = 2.0
PIPE_WIDTH = 160


def status(
    run: RunName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every 2 s.")] = False,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Show what every process of a run is doing, and how full its streams are."""
    import asyncio
    import json
    import sys
    import time
    from dataclasses import asdict

    from rich.console import Console
    from rich.live import Live

    from offbeat.local.folder import find_run
    from offbeat.local.status import run_status

    if as_json and watch:
        raise typer.BadParameter("--json and --watch exclude each other")
    folder = find_run(run, runs)
    found = asyncio.run(run_status(folder))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    # A pipe has no width: what reads it shall not get cells that were folded for 80 columns.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if not watch:
        console.print(_render(found))
        return
    with Live(_render(found), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(_render(asyncio.run(run_status(folder))), refresh=True)


def _render(found: "RunStatus") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    state = "running here" if found.running else "no `offbeat run` holds it"
    head = Text(f"{found.run_id}: {state}\n{found.folder}")
    table = Table()
    for column in (
        "service",
        "member",
        "address",
        "version",
        "doing",
        "rate",
        "waits",
        "beat",
        "up",
    ):
        table.add_column(column, no_wrap=column == "address", overflow="fold")
    for member in found.members:
        table.add_row(*_row(member))
    parts: list[RenderableType] = [head, table]
    if found.streams:
        streams = Table()
        for column in ("stream", "entries", "pending"):
            streams.add_column(column, justify="left" if column == "stream" else "right")
        for stream in found.streams:
            streams.add_row(stream.stream.value, str(stream.entries), str(stream.pending))
        parts.append(streams)
    if found.redis_error:
        parts.append(Text(f"streams: {found.redis_error}"))
    return Group(*parts)


def _row(member: "MemberStatus") -> tuple[str, ...]:
    who = (member.service, member.member_id, member.address)
    answer = member.status
    if answer is None:
        return (*who, "–", f"no answer ({member.error})", "–", "–", _beat(member), "–")
    up = float(answer.get("uptime_seconds", 0.0))
    waits = "–"
    if up > 0 and "waiting_seconds" in answer:
        waits = f"{answer['waiting_seconds'] / up:.0%}"
    version, doing = _doing(member.service, answer)
    rate = member.groups_per_minute
    shown = "–" if rate is None else f"{rate:.0f} groups/min"
    return (*who, version, doing, shown, waits, _beat(member), f"{up:.0f} s" if up else "–")


def _beat(member: "MemberStatus") -> str:
    """When the last heartbeat was."""
    seconds = member.seconds_since_beat
    return "–" if seconds is None else f"{seconds:.0f} s ago"


def _doing(service: str, answer: dict[str, Any]) -> tuple[str, str]:
    """The version that a member holds, and what it is doing, in words."""
    from offbeat.cli.display import alarms

    if service == "learner":
        progress = answer.get("progress", {})
        state = str(progress.get("state", "")).removeprefix("LEARNER_STATE_").lower()
        done = f"step {progress.get('step', 0)}/{progress.get('total_steps', 0)}"
        raised = alarms(progress.get("metrics", {}))
        alarm = f", alarms: {', '.join(raised)}" if raised else ""
        lag = progress.get("metrics", {}).get("lag/mean")
        lagging = "" if lag is None else f", lag {lag:.2f}"
        return str(progress.get("version", "–")), f"{state}, {done}{lagging}{alarm}"
    if service == "checkpoint":
        stored = int(answer["stored_bytes"]) / 1024**2
        held = f"{answer['available_versions']} versions, {stored:.1f} MiB, term {answer['term']}"
        return str(answer["latest_version"]), held
    groups = f"{answer['groups_in_flight']} groups under way, {answer['groups_finished']} finished"
    if answer.get("draining"):
        groups += ", draining"
    return str(answer.get("version", "–")), groups
