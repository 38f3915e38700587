"""Charts of time and of weight updates: who worked, who waited, and what new weights cost. Used by `sections`."""

from collections.abc import Sequence

from offbeat.report import figures
from offbeat.report.charts import Chart, line_chart, steps_of
from offbeat.report.figures import Line
from offbeat.report.records import Interval, Record
from offbeat.report.run_data import RunData

STATES = {
    # state: (words, colour)
    "wait": ("waits", "quiet"),
    "idle": ("waits", "quiet"),
    "start": ("starts", "mist"),
    "generate": ("generates", "teal"),
    "load": ("loads or publishes weights", "amber"),
    "score": ("scores", "sky"),
    "reference": ("reference log-probs", "violet"),
    "update": ("updates the policy", "indigo"),
    "publish": ("loads or publishes weights", "amber"),
    "account": ("accounts", "slate"),
    "checkpoint": ("saves", "lime"),
    "evaluate": ("waits for an evaluation", "rose"),
    "export": ("saves", "lime"),
    "pause": ("paused", "mist"),
}


WAITING = {"wait", "idle"}


SERVICES = ("learner", "generator", "reward")


MOST_INTERVALS = 1500
"""Of a lane of the timeline; more can't be seen."""


TIME_PARTS = (
    ("waiting", "wait", "quiet"),
    ("reference", "time/reference", "violet"),
    ("old log-probs", "time/old", "sky"),
    ("forward, backward", "time/forward_backward", "indigo"),
    ("optimizer", "time/optimizer", "teal"),
    ("rest", "rest", "slate"),
)


def timeline(run: RunData) -> Chart | None:
    """Lanes of the processes; None when none recorded what it did."""
    recorded = [process for process in run.processes if process.intervals]
    if not recorded:
        return None
    began = min(process.intervals[0].start for process in recorded)
    ended = max(process.intervals[-1].end for process in recorded)
    lanes: list[tuple[str, Sequence[tuple[float, float, str, str]]]] = []
    used: set[str] = set()
    for service in SERVICES:
        rows = _rows([p.intervals for p in recorded if p.service == service])
        for number, intervals in enumerate(rows):
            label = service if len(rows) == 1 else f"{service} {number + 1}"
            shown = shortened(intervals, (ended - began) / MOST_INTERVALS)
            used.update(interval.state for interval in shown)
            words = [(i, *STATES.get(i.state, (i.state, "slate"))) for i in shown]
            lanes.append(
                (
                    label,
                    [(i.start - began, i.end - began, text, colour) for i, text, colour in words],
                )
            )
    legend = {STATES[state][0]: STATES[state][1] for state in STATES if state in used}
    return Chart(
        "timeline",
        "Timeline",
        "Each line is a process, or several that came one after the other. Drag to move, wheel to zoom.",
        figures.timeline(lanes),
        list(legend.items()),
        wide=True,
        facts=[
            (f"{service} waited", f"{share:.0%}")
            for service in SERVICES
            if (share := run.share(service, WAITING)) is not None
        ],
    )


def _rows(processes: Sequence[list[Interval]]) -> list[list[Interval]]:
    """Puts processes that followed one another, as after a restart, into one row."""
    rows: list[list[Interval]] = []
    for intervals in sorted(processes, key=lambda found: found[0].start):
        for row in rows:
            if row[-1].end <= intervals[0].start:
                row += intervals
                break
        else:
            rows.append(list(intervals))
    return rows


def shortened(intervals: Sequence[Interval], resolution: float) -> list[Interval]:
    """The intervals, or where there are too many to see, by cell of `resolution` seconds: each state's time in it."""
    if len(intervals) <= MOST_INTERVALS:
        return list(intervals)
    result: list[Interval] = []
    cell: dict[str, float] = {}
    begin = end = intervals[0].start

    def close() -> None:
        at = begin
        for state, seconds in cell.items():
            last = result[-1] if result else None
            if last is not None and last.state == state and at - last.end < 1e-6:
                result[-1] = Interval(state, last.start, at + seconds)
            else:
                result.append(Interval(state, at, at + seconds))
            at += seconds
        cell.clear()

    for interval in intervals:
        if cell and (interval.end - begin > resolution or interval.start - end > resolution):
            close()
        if not cell:
            begin = interval.start
        cell[interval.state] = cell.get(interval.state, 0.0) + interval.end - interval.start
        end = interval.end
    close()
    return result


def step_time(run: RunData) -> Chart | None:
    """Seconds of each step by what the learner did."""
    if not run.steps:
        return None
    parts = {label: (_time_part(run, source), colour) for label, source, colour in TIME_PARTS}
    parts = {label: found for label, found in parts.items() if any(found[0])}
    if not parts:
        return None
    drawing = figures.stack(steps_of(run)[1:], {k: (v[1:], c) for k, (v, c) in parts.items()})
    return Chart(
        "step-time",
        "Where the learner's time goes",
        "Seconds of each step. A tall grey part means that generation or scoring is the bottleneck.",
        drawing,
        [(label, colour) for label, (_, colour) in parts.items()],
    )


def _time_part(run: RunData, source: str) -> list[float | None]:
    """Seconds of a part of each step: a metric, the wait, or what no other part has."""
    if source.startswith("time/"):
        return run.series(source)
    found: list[float | None] = []
    for line in run.steps:
        wall, work = line.get("time/step_seconds") or 0.0, line.get("time/work_seconds") or 0.0
        named = sum(line.get(name) or 0.0 for _, name, _ in TIME_PARTS if name.startswith("time/"))
        found.append(max(0.0, wall - work if source == "wait" else work - named))
    return found


def throughput(run: RunData) -> Chart | None:
    """Tokens trained per second."""
    return line_chart(
        run,
        "throughput",
        "Throughput",
        "Completion tokens trained per second of wall time. Dips are evaluations, checkpoints, restarts.",
        Line("tokens per second", run.series("tokens_per_second"), "sky", smooth=True),
        form="0,0",
        from_zero=True,
    )


def updates(run: RunData) -> Chart | None:
    """Seconds from publishing a version to serving it."""
    costs = update_costs(run)
    if not costs:
        return None
    steps = [cost["step"] for cost in costs]
    parts = {
        "publish": ("publish_seconds", "amber"),
        "fetch": ("fetch_seconds", "sky"),
        "lies ready": ("staged_seconds", "quiet"),
        "drain": ("drain_seconds", "violet"),
        "pause": ("pause_seconds", "rose"),
    }
    drawn = {
        label: ([cost.get(key) for cost in costs], colour) for label, (key, colour) in parts.items()
    }
    drawn = {label: found for label, found in drawn.items() if any(found[0])}
    legend = [(label, colour) for label, (_, colour) in drawn.items()]
    facts = [
        (f"median {label}", _seconds(_median(values)))
        for label, (values, _) in drawn.items()
        if label in {"publish", "fetch", "pause"}
    ]
    return Chart(
        "updates",
        "Time of a weight update",
        "Seconds from publishing to serving, the mean over generators. Generators go on generating but in the pause.",
        figures.stack(steps, drawn),
        legend,
        facts=facts,
    )


def sizes(run: RunData) -> Chart | None:
    """Bytes of each version."""
    costs = [cost for cost in update_costs(run) if cost.get("bytes")]
    if not costs:
        return None
    sizes = [cost["bytes"] / 1024**2 for cost in costs]
    line = Line("MiB", sizes, "amber", dots=len(costs) < 3)
    drawing = figures.lines([cost["step"] for cost in costs], [line], form="0,0.00", from_zero=True)
    facts = [("in all", f"{sum(sizes):,.1f} MiB"), ("versions", f"{len(costs)}")]
    return Chart(
        "bytes",
        "Size of a version",
        "MiB that each generator fetches for one version.",
        drawing,
        facts=facts,
    )


def update_costs(run: RunData) -> list[Record]:
    """By version: step, bytes, seconds to publish, and the mean seconds of the generators that loaded it."""
    costs: dict[int, Record] = {}
    loads: dict[int, list[Record]] = {}
    for process in run.processes:
        for event in process.events:
            if event["event"] == "publish":
                cost = costs.setdefault(event["version"], {"version": event["version"]})
                cost |= {
                    "step": event["step"],
                    "bytes": event["bytes"],
                    "publish_seconds": event["seconds"],
                }
            elif event["event"] == "weights":
                cost = costs.setdefault(event["version"], {"version": event["version"]})
                cost |= {"step": event["step"], "bytes": event["bytes"]}
                loads.setdefault(event["version"], []).append(event)
    for version, events in loads.items():
        for name in (
            "fetch_seconds",
            "staged_seconds",
            "drain_seconds",
            "pause_seconds",
            "load_seconds",
        ):
            costs[version][name] = sum(event.get(name, 0.0) for event in events) / len(events)
    # The version that a learner publishes when it begins replaces what its predecessor had at this step.
    by_step = {cost["step"]: cost for _, cost in sorted(costs.items())}
    return [by_step[step] for step in sorted(by_step)]


def _median(values: Sequence[float | None]) -> float:
    found = sorted(value for value in values if value is not None)
    return found[len(found) // 2] if found else 0.0


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
