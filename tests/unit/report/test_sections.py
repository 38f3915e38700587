"""Numbers behind the charts and tiles."""

import itertools
import json
import math
from collections import defaultdict

import pytest

from offbeat.report.costs import MOST_INTERVALS, shortened, update_costs
from offbeat.report.figures import moving_average, thinned
from offbeat.report.records import Interval
from offbeat.report.run_data import gather
from offbeat.report.sections import sections
from offbeat.report.tiles import duration, sparkline, tiles


def seconds_by_state(intervals):
    found = defaultdict(float)
    for interval in intervals:
        found[interval.state] += interval.end - interval.start
    return found


def test_a_long_timeline_is_shortened_without_changing_the_shares():
    intervals = []
    at = 1000.0
    for place in range(20_000):
        for state, seconds in (("idle", 0.013), ("generate", 0.05 + 0.01 * (place % 7))):
            intervals.append(Interval(state, at, at + seconds))
            at += seconds
        at += 30.0 if place == 9_000 else 0.0  # the process was gone
    shown = shortened(intervals, (at - 1000.0) / MOST_INTERVALS)
    assert len(shown) < 3 * MOST_INTERVALS
    assert seconds_by_state(shown) == pytest.approx(seconds_by_state(intervals))
    assert (shown[0].start, shown[-1].end) == pytest.approx((1000.0, at))
    assert max(b.start - a.end for a, b in itertools.pairwise(shown)) == pytest.approx(
        30.0, abs=0.5
    )


def test_a_short_timeline_stays_as_it_is():
    intervals = [Interval("idle", 0.0, 1.0), Interval("generate", 1.0, 2.0)]
    assert shortened(intervals, 10.0) == intervals


def test_tiles_tell_start_and_end(run_folder):
    found = {tile.label: tile for tile in tiles(gather(run_folder))}
    assert found["Steps"].value == "14 / 14"
    assert found["Audit"].value == "clean"
    assert found["Held-out sampled pass@1"].value == "0.000 → 0.100"
    assert found["Held-out sampled pass@1"].mood == "good"
    assert found["Lag, mean"].detail == "at most 1 steps, bound 1"
    assert found["Waiting"].detail == "learner / generator / reward"
    assert len(found["Training reward"].spark.split()) == 14


def evaluate(folder, **measured):
    """Adds two greedy evaluations to a run: name -> (value before, value after), with bounds around them."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for place, step in enumerate((0, 14)):
            line = {"kind": "evaluation", "mode": "greedy", "step": step, "term": 2, "version": 20}
            for name, values in measured.items():
                key = f"eval/greedy/{name.replace('__', '/')}"
                value = values[place]
                line |= {key: value, f"{key}_low": value - 0.5, f"{key}_high": value + 0.5}
            file.write(json.dumps(line | {"time": 1.8e9 + step}) + "\n")


def test_only_shares_are_drawn_as_shares(run_folder):
    evaluate(
        run_folder,
        **{"component__gold": (-0.25, 0.125), "component__perplexity": (4.0, 6.0)},
        reward=(0.25, 0.5),
    )
    learning = sections(gather(run_folder))[0]
    charts = {chart.title: chart for chart in learning.charts}
    formats = {
        title: getattr(chart.figure.yaxis[0].formatter, "format", "")
        for title, chart in charts.items()
    }
    assert formats["Held-out results"].endswith("%")
    for title in ("Held-out reward", "Held-out gold", "Held-out perplexity"):
        assert not formats[title].endswith("%"), title
    # Each on an axis of its own, with its band.
    assert [label for label, _ in charts["Held-out perplexity"].legend] == ["greedy perplexity"]
    (source,) = {line.data_source for line in charts["Held-out gold"].figure.renderers}
    known = [value for value in source.data["y0"] if not math.isnan(value)]
    assert known == [-0.25, 0.125]
    assert min(low for low in source.data["low0"] if not math.isnan(low)) == -0.75


def test_tiles_put_shares_first_and_judge_no_component(run_folder):
    evaluate(run_folder, component__a_perplexity=(4.0, 6.0), component__gold=(-0.25, 0.125))
    found = [tile for tile in tiles(gather(run_folder)) if tile.label.startswith("Held-out")]
    assert [tile.label for tile in found] == [
        "Held-out greedy pass@1", "Held-out sampled pass@1", "Held-out greedy a_perplexity",
    ]  # fmt: skip
    assert (found[2].change, found[2].mood) == ("+2.000", "")
    evaluate(run_folder, component__a=(-0.25, -0.25))
    found = {tile.label: tile for tile in tiles(gather(run_folder))}
    assert found["Held-out greedy a"].detail == "95 %: -0.750 to 0.250, step 14"


def test_costs_of_weight_updates_are_those_of_the_versions_that_count(run_folder):
    costs = update_costs(gather(run_folder))
    assert [cost["step"] for cost in costs] == list(range(15))
    versions = [cost["version"] for cost in costs]
    assert versions == sorted(versions)
    assert versions[:4] == [1, 2, 3, 9]
    assert all(cost["bytes"] == 394496 for cost in costs)
    assert all(cost["publish_seconds"] > 0 for cost in costs)


def test_thinning_keeps_first_and_last():
    assert thinned(0) == []
    assert thinned(3, limit=10) == [0, 1, 2]
    assert thinned(101, limit=10)[-1] == 100
    assert len(thinned(100_000, limit=10)) <= 12


def test_small_helpers():
    assert moving_average([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert sparkline([None, 1.0]) == ""
    assert [duration(seconds) for seconds in (5, 65, 7260)] == ["5 s", "1 min 5 s", "2 h 1 min"]
