"""What the report shows, section by section. Used by `page`."""

from collections.abc import Callable, Sequence

from offbeat.report import costs, figures
from offbeat.report.charts import Chart, Section, line_chart
from offbeat.report.figures import CYCLE, Line
from offbeat.report.run_data import RunData


def sections(run: RunData) -> list[Section]:
    """All sections with charts; those without data say so with an empty list."""
    return [
        Section(
            "learning",
            "Learning",
            "The reward that is trained on should rise, and the held-out results with it; "
            "a reward that rises alone is being gamed.",
            [*_present(_reward, _passed, run=run), *_evaluations(run)],
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
            _present(costs.timeline, costs.step_time, costs.throughput, run=run),
        ),
        Section(
            "weights",
            "Weight updates",
            "What it costs to bring new weights to the generators; only the pause keeps them from generating.",
            _present(costs.updates, costs.sizes, run=run),
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


# --- learning


def _reward(run: RunData) -> Chart | None:
    means, deviations = run.series("reward/mean"), run.series("reward/std")
    pairs = list(zip(means, deviations, strict=True))
    low = [None if m is None or s is None else m - s for m, s in pairs]
    high = [None if m is None or s is None else m + s for m, s in pairs]
    line = Line("mean", means, "indigo", smooth=True, low=low, high=high)
    return line_chart(
        run,
        "reward",
        "Training reward",
        "Mean of each step's completions, its moving average, and one standard deviation around it.",
        line,
    )


def _passed(run: RunData) -> Chart | None:
    return line_chart(
        run,
        "passed",
        "Training completions that pass, and groups with a signal",
        "Groups of equal rewards teach nothing: when informative ones get rare, prompts are too easy or too hard.",
        Line("pass", run.series("reward/pass"), "teal", smooth=True),
        Line("informative groups", run.series("informative_fraction"), "amber", smooth=True),
        form="0.0%",
    )


COUNTS = {"prompts", "dead", "other_version"}
BOUNDS = ("_low", "_high")
SHARE = "pass@"
"""What a name of an evaluated share begins with; all else is a number on a scale of its own."""


def _evaluations(run: RunData) -> list[Chart]:
    """Evaluated shares in one chart, then a chart for each other number: perplexity and reward share no axis."""
    by_what: dict[str, list[str]] = {}
    for key in _evaluated(run):
        what = key.split("/", 2)[2]
        by_what.setdefault(SHARE if what.startswith(SHARE) else what, []).append(key)
    charts = []
    if shares := by_what.pop(SHARE, None):
        caption = "Share of held-out prompts with its 95 % interval. Intervals that overlap are no gain yet."
        charts.append(
            _evaluation_chart(run, "evaluation", "Held-out results", caption, shares, form="0.0%")
        )
    for number, what in enumerate(sorted(by_what, key=lambda what: (what != "reward", what))):
        title = f"Held-out {what.removeprefix('component/')}"
        caption = "Mean over held-out prompts" + (
            " of the total reward, with its 95 % interval."
            if what == "reward"
            else " of one reward function, with its 95 % interval: it may fall while the total rises."
        )
        charts.append(_evaluation_chart(run, f"evaluation-{number}", title, caption, by_what[what]))
    return charts


def _evaluated(run: RunData) -> list[str]:
    """Names of what the evaluations measured, sorted: eval/MODE/pass@1, eval/MODE/component/NAME …"""
    found = {key for line in run.metrics.evaluations for key in line if key.startswith("eval/")}
    bounds = {key + bound for key in found for bound in BOUNDS}
    return sorted(key for key in found - bounds if key.rpartition("/")[2] not in COUNTS)


def _evaluation_chart(
    run: RunData,
    name: str,
    title: str,
    caption: str,
    keys: Sequence[str],
    *,
    form: str = "0.[0000]",
) -> Chart:
    lines = run.metrics.evaluations
    steps = sorted({line["step"] for line in lines})
    drawn = []
    for number, key in enumerate(keys[: len(CYCLE)]):
        at = {line["step"]: line for line in lines if key in line}
        values, low, high = (
            [at.get(step, {}).get(key + end) for step in steps] for end in ("", *BOUNDS)
        )
        if not any(bound is not None for bound in low):
            low, high = [], []
        label = key.removeprefix("eval/").replace("/component/", " ").replace("/", " ")
        drawn.append(Line(label, values, CYCLE[number], low=low, high=high, dots=True))
    drawing = figures.lines(steps, drawn, form=form)
    return Chart(name, title, caption, drawing, [(line.label, line.colour) for line in drawn])


# --- staleness


def _kl(run: RunData) -> Chart | None:
    return line_chart(
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
    return line_chart(
        run,
        "drift",
        "Drift and mismatch, by token",
        "Drift, of behaviour against present policy, grows with lag. Mismatch, of engine against learner, "
        "must stay below the dashed alarm.",
        *drawn,
        mismatch,
        log=True,
        form="0.0e+0",
        bound=run.recipe.learner.alarms.mismatch_kl,
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
    return line_chart(
        run,
        "ess",
        "Effective sample size and clipping",
        "Share of a step's completions that the importance weights leave; far below 100 %, samples are too old.",
        Line("effective sample size", run.series("ess"), "teal", smooth=True),
        Line("clipped", run.series("clip_fraction"), "rose", smooth=True),
        form="0.0%",
    )


# --- optimisation


def _loss(run: RunData) -> Chart | None:
    return line_chart(
        run, "loss", "Loss", "Of little meaning by itself in reinforcement learning; look for jumps.",
        Line("loss", run.series("loss"), "indigo", smooth=True),
    )  # fmt: skip


def _gradient(run: RunData) -> Chart | None:
    return line_chart(
        run, "gradient", "Gradient norm", "Before clipping at the dashed line. Spikes go before a collapse.",
        Line("norm", run.series("grad_norm"), "rose", smooth=True), bound=run.recipe.learner.optimizer.max_grad_norm,
    )  # fmt: skip


def _rate(run: RunData) -> Chart | None:
    return line_chart(
        run, "rate", "Learning rate", "As the recipe's schedule says.",
        Line("rate", run.series("learning_rate"), "slate"), form="0.00e+0", from_zero=True,
    )  # fmt: skip


def _entropy(run: RunData) -> Chart | None:
    return line_chart(
        run, "entropy", "Entropy", "Mean over tokens, in nats. A fall to 0 is the end of exploration.",
        Line("entropy", run.series("entropy"), "teal", smooth=True), from_zero=True,
    )  # fmt: skip


def _lengths(run: RunData) -> Chart | None:
    return line_chart(
        run, "lengths", "Length of completions", "Tokens, mean of each step. Growth without reward is padding.",
        Line("tokens", run.series("response_length/mean"), "sky", smooth=True), form="0.0",
    )  # fmt: skip


def _endings(run: RunData) -> Chart | None:
    return line_chart(
        run, "endings", "Completions that end by themselves", "The rest ran into the limit of tokens.",
        Line("ended", run.series("eos_rate"), "lime", smooth=True), form="0.0%",
    )  # fmt: skip
