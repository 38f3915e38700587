"""Everything that the report tells about a run, gathered from its folder. No drawing; used by `sections` and `page`."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.audit import Audit, audit_run
from offbeat.config import Recipe, load_recipe
from offbeat.errors import CheckpointError
from offbeat.ledger import read_ledger
from offbeat.local.folder import is_locked
from offbeat.report.records import (
    Metrics,
    Process,
    Record,
    read_activity,
    read_metrics,
    read_samples,
)

LOG_NAME = re.compile(r"^(?P<service>\w+)\.(?P<index>\d+)\.(?P<attempt>\d+)\.log$")


@dataclass(frozen=True)
class Alarm:
    """Something that a person should look at. `level` is "bad" or "note"."""

    level: str
    text: str


@dataclass
class RunData:
    """One run, as far as it got."""

    folder: Path
    recipe: Recipe
    recipe_text: str
    metrics: Metrics
    samples: list[Record]
    processes: list[Process]
    finished: bool
    running: bool
    audit: Audit | None
    audit_missing: str = ""
    """Why there is no audit."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Process -> how often it was started again."""
    ledger_damage: str = ""

    @property
    def steps(self) -> list[Record]:
        """The steps that count."""
        return self.metrics.steps

    @property
    def status(self) -> str:
        """In one word: finished, running, or stopped."""
        if self.finished:
            return "finished"
        return "running" if self.running else "stopped"

    @property
    def seconds(self) -> float:
        """From the first to the last sign of life that was recorded."""
        times = [
            line["time"] for line in (*self.metrics.starts, *self.steps, *self.metrics.evaluations)
        ]
        for process in self.processes:
            times += (
                [process.intervals[0].start, process.intervals[-1].end] if process.intervals else []
            )
        return max(times) - min(times) if times else 0.0

    def series(self, name: str) -> list[float | None]:
        """A metric by step; None where a step has none."""
        return [line.get(name) for line in self.steps]

    def last(self, name: str) -> float | None:
        """The newest value of a metric of the steps."""
        return next(
            (line[name] for line in reversed(self.steps) if line.get(name) is not None), None
        )

    def names(self, prefix: str) -> list[str]:
        """Names of step metrics that start with the prefix, sorted."""
        return sorted({name for line in self.steps for name in line if name.startswith(prefix)})

    def share(self, service: str, states: set[str]) -> float | None:
        """Share of the time between the first and the last step that the processes of a service were in the states."""
        window = self._training_time()
        if window is None:
            return None
        total = inside = 0.0
        for process in self.processes:
            if process.service != service:
                continue
            for interval in process.intervals:
                seconds = min(interval.end, window[1]) - max(interval.start, window[0])
                if seconds > 0:
                    total += seconds
                    inside += seconds if interval.state in states else 0.0
        return inside / total if total else None

    def _training_time(self) -> tuple[float, float] | None:
        """From the first to the last step."""
        if len(self.steps) < 2:
            return None
        return float(self.steps[0]["time"]), float(self.steps[-1]["time"])

    def alarms(self) -> list[Alarm]:
        """What a person should look at, the worst first."""
        found = [
            Alarm("bad", f"audit: {problem}")
            for problem in (self.audit.problems if self.audit else [])
        ]
        if self.ledger_damage:
            found.append(Alarm("bad", self.ledger_damage))
        for name in self.names("alarm/"):
            steps = [line["step"] for line in self.steps if line.get(name)]
            if steps:
                what = name.removeprefix("alarm/")
                found.append(
                    Alarm("bad", f"{what}: alarm at {len(steps)} steps, first at step {steps[0]}")
                )
        if self.audit and self.audit.dead:
            found.append(
                Alarm(
                    "bad", f"{self.audit.dead} groups were given up (empty places in their steps)"
                )
            )
        late = sum(
            int(line.get(f"eval/{line.get('mode')}/other_version") or 0)
            for line in self.metrics.evaluations
        )
        if late:
            found.append(
                Alarm(
                    "note",
                    f"{late} evaluation prompts were answered by another version than asked for",
                )
            )
        if len(self.metrics.starts) > 1:
            learners, again = len(self.metrics.starts), len(self.metrics.rolled_back)
            text = f"{learners} learners, one after the other; {again} steps were trained again"
            found.append(Alarm("note", text))
        if self.restarts:
            named = [f"{name} {_times(count)}" for name, count in self.restarts.items()]
            found.append(Alarm("note", f"started again: {', '.join(named)}"))
        return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def gather(run_folder: Path) -> RunData:
    """Reads a run's folder. Raises `ConfigError` when its recipe can't be read; all else may be missing."""
    recipe_file = run_folder / "recipe.yaml"
    recipe = load_recipe(recipe_file)
    metrics = read_metrics(run_folder)
    finished, damage = _finished(run_folder)
    audit, missing = _audit(run_folder, recipe) if not damage else (None, damage)
    return RunData(
        folder=run_folder,
        recipe=recipe,
        recipe_text=recipe_file.read_text(encoding="utf-8"),
        metrics=metrics,
        samples=read_samples(run_folder, metrics.starts),
        processes=read_activity(run_folder),
        finished=finished,
        running=is_locked(run_folder),
        audit=audit,
        audit_missing=missing,
        restarts=_restarts(run_folder / "logs"),
        ledger_damage=damage,
    )


def _finished(run_folder: Path) -> tuple[bool, str]:
    """Whether the last learner came to the end, and what is wrong with the ledger."""
    try:
        events = read_ledger(run_folder)
    except CheckpointError as error:
        return False, str(error)
    last: list[dict[str, Any]] = events[max(events)] if events else []
    return any(event["event"] == "finish" for event in last), ""


def _audit(run_folder: Path, recipe: Recipe) -> tuple[Audit | None, str]:
    schedule = recipe.schedule
    try:
        found = audit_run(
            run_folder, prompts_per_step=schedule.prompts_per_step, max_lag=schedule.max_lag
        )
    except (CheckpointError, OSError, json.JSONDecodeError) as error:
        return None, str(error)
    return found, ""


def _restarts(logs: Path) -> dict[str, int]:
    """Starts of each process after its first one, from the names of the logs."""
    attempts: dict[str, int] = {}
    for path in sorted(logs.glob("*.log")):
        match = LOG_NAME.match(path.name)
        if match:
            name = f"{match['service']} {match['index']}"
            attempts[name] = max(attempts.get(name, 0), int(match["attempt"]) - 1)
    return {name: count for name, count in attempts.items() if count}
