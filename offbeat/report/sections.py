"""What the report shows, section by section. Used by `page`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.report import figures
from offbeat.report.figures import CYCLE, Line
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


@dataclass
class Chart:
    """A figure with its title and what to look for in it."""

    name: str
    title: str
    caption: str
    figure: Any
    legend: list[tuple[str, str]] = field(default_factory=list)
    """(label, colour) of each series."""
    wide: bool = False
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Short numbers under the title."""


@dataclass
class Section:
    """Charts under one heading."""

    name: str
    title: str
    caption: str
    charts: list[Chart]

    def __post_init__(self) -> None:
        """Two charts share a row; one that is left over gets it alone."""
        narrow = [chart for chart in self.charts if not chart.wide]
        if len(narrow) % 2:
            narrow[-1].wide = True


def sections(run: RunData) -> list[Section]:
    """All sections with charts; those without data say so with an empty list."""
    return [
        Section(
            "learning",
            "Learning",
            "The reward that is trained on should rise, and the held-out results with it; "
            "a reward that rises alone is being gamed.",
            _present(_reward, _passed, _evaluations, _components, run=run),
        ),
        Section(
            "staleness",
            "Staleness and drift",
            "How far the policy is from where it began, from the weights that generated its samples, "
            "and from what the engine computes.",
            _present(_kl, _drift, _lag, _ess, run=run),
        ),
        Section(
            "time",
            "Time",
            "Who worked and who waited. With a lag of 1 or more, learner and generators should work at once.",
            _present(_timeline, _step_time, _throughput, run=run),
        ),
        Section(
            "weights",
            "Weight updates",
            "What it costs to bring new weights to the generators; only the pause keeps them from generating.",
            _present(_updates, _bytes, run=run),
        ),
        Section(
            "optimisation",
            "Optimisation",
            "The health of the updates: gradients without spikes, entropy that does not collapse, "
            "completions that end by themselves.",
            _present(_loss, _gradient, _rate, _entropy, _lengths, _endings, run=run),
        ),
    ]


def _present(*makers: Callable[[RunData], Chart | None], run: RunData) -> list[Chart]:
    return [chart for chart in (maker(run) for maker in makers) if chart is not None]


def _steps(run: RunData) -> list[float]:
    return [line["step"] for line in run.steps]


def _line_chart(
    run: RunData, name: str, title: str, caption: str, *drawn: Line, **options: Any
) -> Chart | None:
    """A chart over the steps of those lines that have values; None when none has."""
    shown = [line for line in drawn if any(value is not None for value in line.values)]
    if not shown:
        return None
    legend = [(line.label, line.colour) for line in shown] if len(shown) > 1 else []
    return Chart(name, title, caption, figures.lines(_steps(run), shown, **options), legend)


# --- learning


def _reward(run: RunData) -> Chart | None:
    means, deviations = run.series("reward/mean"), run.series("reward/std")
    pairs = list(zip(means, deviations, strict=True))
    low = [None if m is None or s is None else m - s for m, s in pairs]
    high = [None if m is None or s is None else m + s for m, s in pairs]
    line = Line("mean", means, "indigo", smooth=True, low=low, high=high)
    return _line_chart(
        run,
        "reward",
        "Training reward",
        "Mean of each step's completions, its moving average, and one standard deviation around it.",
        line,
    )


def _passed(run: RunData) -> Chart | None:
    return _line_chart(
        run,
        "passed",
        "Training completions that pass, and groups with a signal",
        "Groups of equal rewards teach nothing: when informative ones get rare, prompts are too easy or too hard.",
        Line("pass", run.series("reward/pass"), "teal", smooth=True),
        Line("informative groups", run.series("informative_fraction"), "amber", smooth=True),
        form="0.0%",
    )


def _evaluations(run: RunData) -> Chart | None:
    """Every evaluated share that comes with an interval: pass@1, win-rate."""
    return _evaluation_chart(
        run,
        "evaluation",
        "Held-out results",
        "Share of held-out prompts with its 95 % interval. Intervals that overlap are no gain yet.",
        with_interval=True,
    )


def _components(run: RunData) -> Chart | None:
    """All other numbers of the evaluations, such as their mean reward."""
    return _evaluation_chart(
        run,
        "evaluation-rest",
        "Held-out rewards and components",
        "What the evaluations measured beside: look for a component that falls while the total rises.",
        with_interval=False,
    )


COUNTS = {"prompts", "dead", "other_version"}


def _evaluation_chart(
    run: RunData, name: str, title: str, caption: str, *, with_interval: bool
) -> Chart | None:
    lines = run.metrics.evaluations
    found = sorted({key for line in lines for key in line if key.startswith("eval/")})
    bounds = {key for key in found if key.endswith(("_low", "_high"))}
    names = [
        key
        for key in found
        if key not in bounds
        and key.rpartition("/")[2] not in COUNTS
        and (f"{key}_low" in bounds) == with_interval
    ]
    if not names:
        return None
    steps = sorted({line["step"] for line in lines})
    drawn = []
    for number, key in enumerate(names[: len(CYCLE)]):
        at = {line["step"]: line for line in lines if key in line}
        values = [
            [at.get(step, {}).get(key + end) for step in steps] for end in ("", "_low", "_high")
        ]
        low, high = (values[1], values[2]) if with_interval else ((), ())
        label = key.removeprefix("eval/").replace("/", " ")
        drawn.append(Line(label, values[0], CYCLE[number], low=low, high=high, dots=True))
    drawing = figures.lines(steps, drawn, form="0.0%" if with_interval else "0.[0000]")
    return Chart(name, title, caption, drawing, [(line.label, line.colour) for line in drawn])


# --- staleness


def _kl(run: RunData) -> Chart | None:
    return _line_chart(
        run,
        "kl",
        "KL to the reference",
        "Sum over a completion, in nats. It grows while the policy learns; a jump is a policy that lost its language.",
        Line("KL", run.series("kl"), "violet", smooth=True),
    )


def _drift(run: RunData) -> Chart | None:
    # At lag 0 drift is nothing but mismatch.
    lags = [name for name in run.names("drift_kl/lag_") if name != "drift_kl/lag_0"]
    drawn = [
        Line(f"drift at lag {name.rpartition('_')[2]}", run.series(name), CYCLE[1 + place % 6])
        for place, name in enumerate(lags[:6])
    ] or [Line("drift", run.series("drift_kl"), "teal")]
    mismatch = Line("mismatch", run.series("mismatch_kl"), "indigo", dash="dotted")
    return _line_chart(
        run,
        "drift",
        "Drift and mismatch, by token",
        "Drift, of behaviour against present policy, grows with lag. Mismatch, of engine against learner, "
        "must stay below the dashed alarm.",
        *drawn,
        mismatch,
        log=True,
        form="0.0e+0",
        bound=run.recipe.learner.mismatch_kl_alarm,
    )


def _lag(run: RunData) -> Chart | None:
    counts = {
        int(name.rpartition("_")[2]): sum(value or 0.0 for value in run.series(name))
        for name in run.names("lag/count_")
    }
    if not counts:
        return None
    bound = run.recipe.schedule.max_lag
    labels = list(range(0, max(bound, *counts) + 1))
    drawing = figures.bars(
        [str(lag) for lag in labels], [counts.get(lag, 0.0) for lag in labels], "teal", tip="lag"
    )
    return Chart(
        "lag",
        "Lag of the groups that were trained",
        f"Steps between the weights that generated a group and the step that trained it; the bound is {bound}.",
        drawing,
    )


def _ess(run: RunData) -> Chart | None:
    return _line_chart(
        run,
        "ess",
        "Effective sample size and clipping",
        "Share of a step's completions that the importance weights leave; far below 100 %, samples are too old.",
        Line("effective sample size", run.series("ess"), "teal", smooth=True),
        Line("clipped", run.series("clip_fraction"), "rose", smooth=True),
        form="0.0%",
    )


# --- time


def _timeline(run: RunData) -> Chart | None:
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


def _step_time(run: RunData) -> Chart | None:
    if not run.steps:
        return None
    parts = {label: (_time_part(run, source), colour) for label, source, colour in TIME_PARTS}
    parts = {label: found for label, found in parts.items() if any(found[0])}
    if not parts:
        return None
    drawing = figures.stack(_steps(run)[1:], {k: (v[1:], c) for k, (v, c) in parts.items()})
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


def _throughput(run: RunData) -> Chart | None:
    return _line_chart(
        run,
        "throughput",
        "Throughput",
        "Completion tokens trained per second of wall time. Dips are evaluations, checkpoints, restarts.",
        Line("tokens per second", run.series("tokens_per_second"), "sky", smooth=True),
        form="0,0",
        from_zero=True,
    )


# --- weights


def _updates(run: RunData) -> Chart | None:
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


def _bytes(run: RunData) -> Chart | None:
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


# --- optimisation


def _loss(run: RunData) -> Chart | None:
    return _line_chart(
        run, "loss", "Loss", "Of little meaning by itself in reinforcement learning; look for jumps.",
        Line("loss", run.series("loss"), "indigo", smooth=True),
    )  # fmt: skip


def _gradient(run: RunData) -> Chart | None:
    return _line_chart(
        run, "gradient", "Gradient norm", "Before clipping at the dashed line. Spikes go before a collapse.",
        Line("norm", run.series("grad_norm"), "rose", smooth=True), bound=run.recipe.learner.optimizer.max_grad_norm,
    )  # fmt: skip


def _rate(run: RunData) -> Chart | None:
    return _line_chart(
        run, "rate", "Learning rate", "As the recipe's schedule says.",
        Line("rate", run.series("learning_rate"), "slate"), form="0.00e+0", from_zero=True,
    )  # fmt: skip


def _entropy(run: RunData) -> Chart | None:
    return _line_chart(
        run, "entropy", "Entropy", "Mean over tokens, in nats. A fall to 0 is the end of exploration.",
        Line("entropy", run.series("entropy"), "teal", smooth=True), from_zero=True,
    )  # fmt: skip


def _lengths(run: RunData) -> Chart | None:
    return _line_chart(
        run, "lengths", "Length of completions", "Tokens, mean of each step. Growth without reward is padding.",
        Line("tokens", run.series("response_length/mean"), "sky", smooth=True), form="0.0",
    )  # fmt: skip


def _endings(run: RunData) -> Chart | None:
    return _line_chart(
        run, "endings", "Completions that end by themselves", "The rest ran into the limit of tokens.",
        Line("ended", run.series("eos_rate"), "lime", smooth=True), form="0.0%",
    )  # fmt: skip
