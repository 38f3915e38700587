"""What the display of a run and its summary show."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from offbeat.cli.display import Display, Pace
from offbeat.cli.summary import collect_metrics, print_summary
from offbeat.config import load_recipe
from offbeat.local.folder import RunFolder
from offbeat.local.run import Outcome
from offbeat.v1 import learner_pb2 as learner

RECIPE = Path(__file__).parents[2] / "data" / "one_of_each.yaml"

METRICS = {
    "reward/mean": 0.5,
    "reward/pass": 0.25,
    "eval/greedy/pass@1": 0.4,
    "lag/mean": 0.9,
    "lag/max": 1.0,
    "tokens_per_second": 1234.0,
    "wait/learner": 0.1,
    "wait/generator": 0.333,
    "loss": 0.7,
}


def progress(
    step: int, state: str = "TRAINING", metrics: dict[str, float] | None = None
) -> learner.Progress:
    value = learner.LearnerState.Value(f"LEARNER_STATE_{state}")
    return learner.Progress(
        state=value, step=step, total_steps=10, version=step + 1, metrics=metrics or {}
    )


def test_plain_lines_tell_states_then_steps() -> None:
    out = io.StringIO()
    with Display(Console(file=out), "mine") as display:
        display.progress(progress(0, "STARTING"))
        display.progress(progress(0, "GATHERING"))
        display.progress(progress(0, "GATHERING"))
        display.progress(progress(7, "FINISHED", METRICS))
    lines = [line.split(" ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines[:2] == ["starting", "gathering"]
    assert lines[2] == (
        "step 7/10 finished reward 0.500 pass 0.250 heldout 0.400 lag 0.90/1 tok/s 1,234 "
        "wait learner 10% generator 33% loss 0.7000 version 8 eta –"
    )
    assert len(lines) == 3


def test_steps_that_come_fast_are_not_all_printed_but_the_last_is() -> None:
    out = io.StringIO()
    with Display(Console(file=out), "mine") as display:
        for step in range(1, 11):
            display.progress(progress(step))
    lines = out.getvalue().splitlines()
    assert len(lines) < 10
    assert "step 10/10" in lines[-1]


def test_the_panel_on_a_terminal_shows_everything() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with Display(console, "mine") as display:
        display.progress(progress(7, metrics=METRICS))
        display.event("generator.0 ended with [SIGKILL]")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("step 7/10", "0.90 / 1", "1,234", "33%", "8 / 0", "[SIGKILL]"):
        assert text in shown


def test_pace_gives_the_time_that_is_left() -> None:
    pace = Pace()
    assert pace.seconds_left(10, 0.0) is None
    pace.add(1, 100.0)
    pace.add(3, 104.0)
    assert pace.seconds_left(10, 104.0) == pytest.approx(14.0)
    assert pace.seconds_left(10, 106.0) == pytest.approx(12.0)
    pace.add(2, 120.0)  # a learner that went back to its checkpoint
    assert pace.seconds_left(10, 120.0) is None


def test_the_summary_compares_before_and_after_across_a_restart(tmp_path: Path) -> None:
    folder, _ = RunFolder.create(load_recipe(RECIPE, [f"run.directory={tmp_path}"]))
    lines = [
        {"step": 0, "eval/greedy/pass@1": 0.45, "eval/greedy/pass@1_start_low": 0.42},
        {"step": 0, "eval/greedy/pass@1_start_high": 0.48},
        {"step": 5, "eval/greedy/pass@1": 0.6, "loss": None},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "eval/gre'
    (folder.path / "metrics.jsonl").write_text(text)
    out = io.StringIO()
    last = progress(10, "FINISHED", {"eval/greedy/pass@1": 0.75})
    with folder:
        print_summary(Console(file=out, width=100), folder, Outcome(last, train_seconds=12.0))
    shown = out.getvalue()
    assert "0.450 [0.420, 0.480]" in shown
    assert "+30.0 points" in shown
    assert "steps        10 of 10, version 11" in shown
    assert f"offbeat export {folder.path}" in shown


def test_metrics_of_a_run_without_a_file_are_the_last_ones(tmp_path: Path) -> None:
    assert collect_metrics(tmp_path, {"loss": 1.0}) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("last", "finished"),
    [(None, True), (progress(10), True), (progress(10, "FINISHED"), True), (progress(9), False)],
)
def test_only_a_run_with_all_steps_is_finished(
    last: learner.Progress | None, finished: bool
) -> None:
    assert Outcome(last).finished is finished
