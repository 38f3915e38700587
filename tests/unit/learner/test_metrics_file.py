"""metrics.jsonl: append-only, every line JSON, and TensorBoard's files beside it."""

import json
import math

import pandas
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from offbeat.report.records import read_metrics
from services.learner.metrics_file import MetricsWriter


def run_of(folder, term, first, last, *, tensorboard=False):
    writer = MetricsWriter(folder, tensorboard=tensorboard)
    writer.start(term, first)
    for step in range(first + 1, last + 1):
        writer.write_step(step, step, {"reward/mean": term + step / 100, "loss": math.nan})
    writer.write_evaluation(last, last, "greedy", {"eval/greedy/pass@1": 0.5})
    writer.close()


def test_a_resumed_learner_appends(tmp_path):
    run_of(tmp_path, 1, 0, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "time": 17')
    run_of(tmp_path, 2, 3, 6)
    frame = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    steps = frame[frame.kind == "step"]
    assert list(steps.step) == [1, 2, 3, 4, 5, 4, 5, 6]
    assert steps.loss.isna().all()
    last = steps.drop_duplicates("step", keep="last")
    surviving = read_metrics(tmp_path).steps
    assert list(last["reward/mean"]) == [line["reward/mean"] for line in surviving]
    assert [line["term"] for line in surviving] == [1, 1, 1, 2, 2, 2]
    assert all({"time", "version", "term"} <= line.keys() for line in surviving)


def test_tensorboard_hides_what_was_rolled_back(tmp_path):
    run_of(tmp_path, 1, 0, 5, tensorboard=True)
    run_of(tmp_path, 2, 3, 4, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    scalars = [(event.step, round(event.value, 2)) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 2.04)]


def test_tensorboard_can_be_switched_off(tmp_path):
    run_of(tmp_path, 1, 0, 1, tensorboard=False)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "start"
