"""The tiles on top of the report: what a person wants to know first. Used by `page`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.report.costs import WAITING
from offbeat.report.figures import moving_average, thinned
from offbeat.report.records import Record
from offbeat.report.run_data import RunData

EDGE = 10
"""Steps whose mean stands for the start and the end of a noisy metric."""
SPARK_WIDTH, SPARK_HEIGHT = 120, 30


@dataclass(frozen=True)
class Tile:
    """A number with its name; `mood` is good, bad or empty, `spark` the points of a small curve."""

    label: str
    value: str
    detail: str = ""
    change: str = ""
    mood: str = ""
    spark: str = ""


def tiles(run: RunData) -> list[Tile]:
    """The tiles of a run; those without data are left out."""
    found = [
        Tile(
            "Steps",
            f"{_last_step(run)} / {run.recipe.schedule.steps}",
            f"{run.status}, {duration(run.seconds)}",
            mood={"finished": "good", "stopped": "bad"}.get(run.status, ""),
        ),
        _reward(run),
        *_heldout(run),
        _lag(run),
        _throughput(run),
        _waits(run),
        _audit(run),
    ]
    return [tile for tile in found if tile is not None]


def duration(seconds: float) -> str:
    """12 s, 3 min 5 s, 2 h 11 min."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minute} min"
    return f"{minutes} min {second} s" if minutes else f"{second} s"


def sparkline(values: Sequence[float | None]) -> str:
    """Points of an SVG polyline, smoothed; empty when there are fewer than two values."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    curve = moving_average(known, weight=0.8) if len(known) > 20 else known
    curve = [curve[place] for place in thinned(len(curve), limit=80)]
    low, high = min(curve), max(curve)
    spread = high - low or 1.0
    step = SPARK_WIDTH / (len(curve) - 1)
    return " ".join(
        f"{place * step:.1f},{SPARK_HEIGHT - 3 - (value - low) / spread * (SPARK_HEIGHT - 6):.1f}"
        for place, value in enumerate(curve)
    )


def _last_step(run: RunData) -> int:
    return int(run.steps[-1]["step"]) if run.steps else 0


def _reward(run: RunData) -> Tile | None:
    values = [value for value in run.series("reward/mean") if value is not None]
    if not values:
        return None
    edge = min(EDGE, max(1, len(values) // 3))
    start, end = sum(values[:edge]) / edge, sum(values[-edge:]) / edge
    return Tile(
        "Training reward",
        f"{start:.3g} → {end:.3g}",
        f"mean of the first and last {edge} steps",
        *_change(start, end),
        spark=sparkline(values),
    )


def _heldout(run: RunData) -> list[Tile]:
    """One for each of the first held-out numbers with an interval, its first and its last value; shares come first."""
    lines = run.metrics.evaluations
    names = {key[: -len("_low")] for line in lines for key in line if key.endswith("_low")}
    found = []
    for name in sorted(names, key=_importance)[:3]:
        seen = [line for line in lines if line.get(name) is not None]
        if not seen:
            continue
        first, last = seen[0], seen[-1]
        label = name.removeprefix("eval/").replace("/component/", " ").replace("/", " ")
        change, mood = _change(first[name], last[name])
        found.append(
            Tile(
                f"Held-out {label}",
                f"{first[name]:.3f} → {last[name]:.3f}" if len(seen) > 1 else f"{last[name]:.3f}",
                _interval(name, last),
                change,
                # Of a component nobody knows here whether more is better: perplexity, length.
                mood if "/component/" not in name else "",
                spark=sparkline([line[name] for line in seen]),
            )
        )
    return found


def _importance(name: str) -> tuple[bool, bool, str]:
    """Sorts shares first, then rewards, then components."""
    return not _is_share(name), "/component/" in name, name


def _is_share(name: str) -> bool:
    return name.rpartition("/")[2].startswith("pass@")


def _interval(name: str, line: Record) -> str:
    low, high = line.get(f"{name}_low"), line.get(f"{name}_high")
    if low is None or high is None:
        return f"at step {line['step']}"
    # The interval of a share of 0 begins at 0, but for rounding.
    low = max(low, 0.0) if _is_share(name) else low
    return f"95 %: {low:.3f} to {high:.3f}, step {line['step']}"


def _change(start: float, end: float) -> tuple[str, str]:
    change = end - start
    if abs(change) < 5e-4:
        return "±0", ""
    return f"{change:+.3f}".replace("-", "−"), "good" if change > 0 else "bad"


def _lag(run: RunData) -> Tile | None:
    values = [value for value in run.series("lag/mean") if value is not None]
    if not values:
        return None
    largest = max(value for value in run.series("lag/max") if value is not None)
    return Tile(
        "Lag, mean",
        f"{sum(values) / len(values):.2f}",
        f"at most {largest:.0f} steps, bound {run.recipe.schedule.max_lag}",
        spark=sparkline(values),
    )


def _throughput(run: RunData) -> Tile | None:
    values = [value for value in run.series("tokens_per_second")[1:] if value is not None]
    if not values:
        return None
    return Tile(
        "Tokens per second",
        f"{sum(values) / len(values):,.0f}",
        "trained, mean over the steps",
        spark=sparkline(values),
    )


def _waits(run: RunData) -> Tile | None:
    shares = [
        (service, run.share(service, WAITING)) for service in ("learner", "generator", "reward")
    ]
    known = [(service, share) for service, share in shares if share is not None]
    if not known:
        return None
    return Tile(
        "Waiting",
        " / ".join(f"{share:.0%}" for _, share in known),
        " / ".join(service for service, _ in known),
    )


def _audit(run: RunData) -> Tile:
    found = run.audit
    if found is None:
        return Tile("Audit", "none yet", "it counts from the first checkpoint")
    counted = f"{found.trained:,} trained, {found.filtered:,} filtered, {found.dead:,} dead"
    if found.clean:
        return Tile("Audit", "clean", counted, mood="good")
    return Tile("Audit", f"{len(found.problems)} problems", counted, mood="bad")
