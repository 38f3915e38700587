"""The audit finds each kind of broken promise, and none where there is none."""

import json
import re

import pytest

from offbeat.audit import audit_run
from offbeat.errors import CheckpointError
from offbeat.ledger import Ledger, read_ledger


def write_run(folder, change=lambda events: events, *, counts=None):
    """Term 1 trains steps 0-2 and dies after the checkpoint of step 2; term 2 goes on to step 4. P = 2, max_lag = 1."""

    def step(number, versions, lag):
        trained = [2 * number, 2 * number + 1]
        return {"event": "step", "step": number, "trained": trained, "filtered": [], "dead": {}, "lag": lag,
                "versions": versions}  # fmt: skip

    def publish(version, at):
        return {"event": "publish", "version": version, "parent": version - 1, "step": at}

    events = {
        1: [publish(1, 0), step(0, [1], [0, 0]), publish(2, 1), step(1, [1], [1, 1]), publish(3, 2),
            step(2, [2], [1, 1]), publish(4, 3)],
        2: [publish(5, 2), step(2, [2], [1, 1]), publish(6, 3), step(3, [5], [1, 1])],
    }  # fmt: skip
    for term, found in change(events).items():
        ledger = Ledger(folder, term)
        for event in found:
            ledger.write(**event)
        ledger.close()
    final = folder / "checkpoints" / "000002-00000004"
    final.mkdir(parents=True)
    meta = {
        "step": 4,
        "update": 4,
        "term": 2,
        "history": [[1, 0], [2, 2]],
        "lineage": {"1": [0, 0], "2": [1, 1], "3": [2, 2], "5": [2, 2], "6": [3, 3]},
        "counts": counts or {"trained": 8, "dead": 0},
    }
    (final / "meta.json").write_text(json.dumps(meta))
    (final / "COMMITTED").touch()
    return audit_run(folder, prompts_per_step=2, max_lag=1)


def test_a_clean_run(tmp_path):
    audit = write_run(tmp_path)
    assert audit.clean, audit.problems
    assert (audit.trained, audit.ordinals, audit.retrained_steps, audit.versions) == (8, 8, 1, 6)
    assert audit.lag_counts == {0: 2, 1: 6}


def edit(term, index, **fields):
    def change(events):
        events[term][index] |= fields
        return events

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (edit(2, 3, trained=[6]), r"step 3: ordinals missing \[7\]"),
        (edit(2, 3, trained=[6, 6]), "count more than once"),
        (edit(2, 3, trained=[6, 1]), r"twice or of another step \[1\]"),
        (edit(2, 3, dead={"6": "x"}), r"twice or of another step \[6\]"),
        (edit(2, 3, lag=[1, 2]), r"lags outside 0 \.\. 1"),
        (edit(2, 3, lag=[-1, 1]), r"lags outside 0 \.\. 1"),
        (edit(2, 3, versions=[4]), r"abandoned versions \[4\]"),
        (edit(2, 0, version=4), "published version 4 after 4"),
        (lambda events: {1: events[1], 2: events[2][:-1]}, "lacks it"),
    ],
)
def test_each_broken_promise_is_found(tmp_path, change, problem):
    audit = write_run(tmp_path, change)
    assert any(re.search(problem, found) for found in audit.problems), audit.problems


def test_counts_must_agree_with_the_checkpoint(tmp_path):
    assert not write_run(tmp_path, counts={"trained": 7, "dead": 1}).clean


def test_a_run_without_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="expected a committed checkpoint"):
        audit_run(tmp_path, prompts_per_step=2, max_lag=1)


def test_a_last_line_cut_off_by_a_crash_is_left_out(tmp_path):
    ledger = Ledger(tmp_path, 1)
    ledger.write("publish", version=1, parent=0, step=0)
    ledger.close()
    file = tmp_path / "ledger" / "000001.jsonl"
    file.write_text(file.read_text() + '{"event": "st')
    assert len(read_ledger(tmp_path)[1]) == 1
    file.write_text('{"event": "st\n{"event": "publish"}\n')
    with pytest.raises(CheckpointError, match=r"000001\.jsonl:1"):
        read_ledger(tmp_path)
