"""The record of what a process was doing."""

import json
from itertools import pairwise

import pytest

from offbeat.report.records import read_activity
from offbeat.telemetry import activity as module
from offbeat.telemetry.activity import Activity, added_up


def test_states_follow_each_other_without_a_gap(tmp_path):
    activity = Activity.open(tmp_path, "generator", "host-1")
    activity.enter("idle")
    activity.enter("generate")
    activity.enter("generate")
    with activity.during("update"):
        activity.note("update", version=3)
    assert activity.state == "generate"
    activity.close()
    (process,) = read_activity(tmp_path)
    assert [i.state for i in process.intervals] == [
        "start",
        "idle",
        "generate",
        "update",
        "generate",
    ]
    for before, after in pairwise(process.intervals):
        assert after.start == pytest.approx(before.end, abs=2e-3)
    assert [event["version"] for event in process.events] == [3]
    assert process.environment["packages"]["offbeat"]


def test_without_a_folder_nothing_is_kept(tmp_path):
    activity = Activity.open(tmp_path / "absent", "reward", "host-1")
    activity.enter("idle")
    activity.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_away_is_no_error(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    activity = Activity.open(folder, "reward", "host-1")
    (folder / "activity").write_text("in the way")
    activity.enter("idle")
    activity.close()


def test_a_long_run_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXACT_LINES", 0)
    activity = Activity.open(tmp_path, "reward", "host-1")
    activity._lines = 1
    for _ in range(500):
        activity.enter("score")
        activity.enter("idle")
    activity.close()
    (file,) = (tmp_path / "activity").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len([line for line in lines if "state" in line]) <= 6
    (process,) = read_activity(tmp_path)
    assert {i.state for i in process.intervals} == {"start", "score", "idle"}


def test_adding_up_keeps_the_shares():
    intervals = [("a", 0.0, 1.0), ("b", 1.0, 3.0), ("a", 3.0, 4.5), ("c", 4.5, 5.0)]
    assert added_up(intervals) == [("a", 0.0, 2.5), ("b", 2.5, 4.5), ("c", 4.5, 5.0)]
