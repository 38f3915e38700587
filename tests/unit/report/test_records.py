"""Reading a run's folder: what was rolled back does not count, and nothing that is missing is an error."""

import json

from offbeat.report.records import Interval, joined, read_activity, read_metrics, read_samples


def write(path, *records, torn=""):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + torn)


def start(term, step):
    return {"kind": "start", "term": term, "step": step}


def step(number, term, reward=0.0):
    return {"kind": "step", "step": number, "term": term, "reward/mean": reward}


def evaluation(number, term, passed):
    return {
        "kind": "evaluation",
        "mode": "greedy",
        "step": number,
        "term": term,
        "eval/greedy/pass@1": passed,
    }


def test_an_empty_folder_is_no_error(tmp_path):
    metrics = read_metrics(tmp_path)
    assert (metrics.steps, metrics.evaluations, metrics.starts) == ([], [], [])
    assert read_samples(tmp_path, []) == []
    assert read_activity(tmp_path) == []


def test_steps_past_the_checkpoint_of_a_later_learner_do_not_count(tmp_path):
    write(
        tmp_path / "metrics.jsonl",
        start(1, 0),
        evaluation(0, 1, 0.1),
        *(step(number, 1, reward=0.0) for number in (1, 2, 3, 4)),
        evaluation(4, 1, 0.2),
        start(2, 2),
        evaluation(2, 2, 0.3),
        step(3, 2, reward=1.0),
        torn='{"step": 4, "ki',
    )
    metrics = read_metrics(tmp_path)
    assert [(s["step"], s["term"]) for s in metrics.steps] == [(1, 1), (2, 1), (3, 2)]
    assert [(s["step"], s["term"]) for s in metrics.rolled_back] == [(3, 1), (4, 1)]
    assert [e["eval/greedy/pass@1"] for e in metrics.evaluations] == [0.1, 0.3]
    rows = [{"step": 2, "term": 1}, {"step": 3, "term": 1}, {"step": 3, "term": 2}]
    write(tmp_path / "samples.jsonl", *rows)
    assert read_samples(tmp_path, metrics.starts) == [rows[0], rows[2]]


def test_an_evaluation_that_was_made_again_counts_once(tmp_path):
    write(
        tmp_path / "metrics.jsonl",
        start(1, 0),
        evaluation(2, 1, 0.1),
        start(2, 2),
        evaluation(2, 2, 0.3),
    )
    assert [e["eval/greedy/pass@1"] for e in read_metrics(tmp_path).evaluations] == [0.3]


def test_activity_is_by_process(tmp_path):
    write(
        tmp_path / "activity" / "generator.host.with.dots-12.jsonl",
        {"event": "start", "time": 1.0, "environment": {"python": "3.11"}},
        {"state": "idle", "start": 1.0, "seconds": 2.0},
        {"state": "idle", "start": 3.0001, "seconds": 2.0},
        {"event": "update", "time": 5.0, "version": 1},
        {"state": "update", "start": 5.0, "seconds": 0.5},
    )
    (process,) = read_activity(tmp_path)
    assert (process.service, process.member) == ("generator", "host.with.dots-12")
    assert process.environment == {"python": "3.11"}
    assert [(i.state, i.start, i.end) for i in process.intervals] == [
        ("idle", 1.0, 5.0001),
        ("update", 5.0, 5.5),
    ]
    assert [event["version"] for event in process.events] == [1]


def test_a_gap_keeps_intervals_apart():
    intervals = [Interval("idle", 0.0, 1.0), Interval("idle", 1.4, 2.0), Interval("idle", 3.0, 4.0)]
    assert joined(intervals, gap=0.5) == [Interval("idle", 0.0, 2.0), Interval("idle", 3.0, 4.0)]
