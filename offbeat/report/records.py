"""Reads what the services wrote into a run's folder for people: metrics, samples, activity.

Used by the report; good for a notebook as well. Whatever is missing is empty: a run that has just begun, one that
crashed, and one without an evaluation can all be read.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass
class Metrics:
    """The lines of ``metrics.jsonl`` that count: those whose step is in the newest weights, in the order of steps."""

    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    """One for each learner: it began after this step."""
    rolled_back: list[Record] = field(default_factory=list)
    """Steps that were trained, and lost with a learner: a later one trained them again."""


@dataclass(frozen=True)
class Interval:
    """A process was in `state` from `start` to `end`, in seconds since 1970."""

    state: str
    start: float
    end: float


@dataclass
class Process:
    """What one process was doing."""

    service: str
    member: str
    intervals: list[Interval] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    environment: Record = field(default_factory=dict)


def read_lines(path: Path) -> Iterator[Record]:
    """The JSON objects of a file, one a line; none when there is no file. A line that a crash cut off is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def read_metrics(run_folder: Path) -> Metrics:
    """The metrics of a run. An evaluation or a step that was made twice counts once, as it was last."""
    lines = list(read_lines(run_folder / "metrics.jsonl"))
    starts = [line for line in lines if line.get("kind") == "start"]
    found = Metrics(starts=starts)
    steps: dict[int, Record] = {}
    evaluations: dict[tuple[int, str], Record] = {}
    for line in lines:
        if line.get("kind") == "step":
            if is_rolled_back(line, starts):
                found.rolled_back.append(line)
            else:
                steps[line["step"]] = line
        elif line.get("kind") == "evaluation" and not is_rolled_back(line, starts):
            evaluations[line["step"], str(line.get("mode"))] = line
    found.steps = [steps[step] for step in sorted(steps)]
    found.evaluations = [evaluations[key] for key in sorted(evaluations)]
    return found


def is_rolled_back(record: Record, starts: Iterable[Record]) -> bool:
    """Whether a later learner began before the record's step, so that this step is not in the weights."""
    return any(
        start["term"] > record.get("term", 0) and start["step"] < record["step"] for start in starts
    )


def read_samples(run_folder: Path, starts: Sequence[Record]) -> list[Record]:
    """The samples that were kept, without those of steps that were rolled back."""
    rows = read_lines(run_folder / "samples.jsonl")
    return [row for row in rows if "step" in row and not is_rolled_back(row, starts)]


def read_activity(run_folder: Path) -> list[Process]:
    """What each process was doing, by service, in the order of their starts."""
    found = [_read_process(path) for path in sorted((run_folder / "activity").glob("*.jsonl"))]
    return sorted(found, key=lambda process: (process.service, _first_time(process)))


def _first_time(process: Process) -> float:
    return min((interval.start for interval in process.intervals), default=0.0)


def _read_process(path: Path) -> Process:
    service, _, member = path.stem.partition(".")
    process = Process(service, member)
    for line in read_lines(path):
        if line.get("event") == "start":
            process.environment = line.get("environment", {})
        elif "event" in line:
            process.events.append(line)
        elif "state" in line:
            start, seconds = float(line["start"]), float(line["seconds"])
            process.intervals.append(Interval(line["state"], start, start + seconds))
    process.intervals = joined(process.intervals, gap=0.01)
    return process


def joined(intervals: Iterable[Interval], *, gap: float) -> list[Interval]:
    """Neighbours of one state become one, if no more than `gap` seconds lie between them."""
    result: list[Interval] = []
    for interval in intervals:
        last = result[-1] if result else None
        if last is not None and last.state == interval.state and interval.start - last.end <= gap:
            result[-1] = Interval(last.state, last.start, max(last.end, interval.end))
        else:
            result.append(interval)
    return result
