"""Which records are malformed."""

from collections.abc import Callable

import pytest

from offbeat.streams.base import Stream
from offbeat.streams.records import Malformed, decode, in_flight_field, settled_field, task_fields
from offbeat.v1 import samples_pb2 as samples
from tests.harness.streams import make_rollout, make_scores, make_task


def test_valid_records_come_back_as_they_were() -> None:
    task = make_task(3)
    rollout = make_rollout(task)
    scores = make_scores(rollout)
    assert decode(Stream.PROMPTS, task_fields(task)) == task
    payload = {b"p": rollout.SerializeToString()}
    assert decode(Stream.ROLLOUTS, payload) == rollout
    scored = decode(Stream.SCORED, payload | {b"s": scores.SerializeToString()})
    assert isinstance(scored, samples.ScoredRollout)
    assert (scored.rollout, list(scored.scores)) == (rollout, list(scores.scores))


def test_unknown_fields_are_kept() -> None:
    newer = make_task(3).SerializeToString() + b"\xf2\x3f\x03new"
    assert decode(Stream.PROMPTS, {b"p": newer}).SerializeToString() == newer


@pytest.mark.parametrize(
    ("expected", "spoil"),
    [
        ("kind training or evaluation", lambda task: task.ClearField("kind")),
        ("k >= 1", lambda task: task.ClearField("k")),
        ("2 seeds", lambda task: task.seeds.append(1)),
        ("at least one token", lambda task: task.ClearField("prompt_token_ids")),
        ("max_tokens >= 1", lambda task: task.ClearField("sampling")),
    ],
)
def test_a_task_that_nobody_can_generate(
    expected: str, spoil: Callable[[samples.PromptTask], object]
) -> None:
    task = make_task(1)
    spoil(task)
    with pytest.raises(Malformed, match=expected):
        decode(Stream.EVALUATIONS, task_fields(task))


@pytest.mark.parametrize(
    ("expected", "spoil"),
    [
        ("2 logprobs", lambda one: one.logprobs.append(-1.0)),
        ("finite logprobs", lambda one: one.logprobs.__setitem__(0, float("nan"))),
        ("version spans of 2 tokens", lambda one: one.ClearField("version_spans")),
        ("finish reason", lambda one: one.ClearField("finish_reason")),
        ("segment role", lambda one: one.segments.add(token_count=2)),
    ],
)
def test_a_group_whose_parts_do_not_fit(
    expected: str, spoil: Callable[[samples.Completion], object]
) -> None:
    rollout = make_rollout(make_task(1))
    spoil(rollout.completions[1])
    with pytest.raises(Malformed, match=expected):
        decode(Stream.ROLLOUTS, {b"p": rollout.SerializeToString()})


def test_a_group_of_the_wrong_size() -> None:
    rollout = make_rollout(make_task(1))
    del rollout.completions[0]
    with pytest.raises(Malformed, match=r"2 completions \(k\), found 1"):
        decode(Stream.ROLLOUTS, {b"p": rollout.SerializeToString()})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number(value: float) -> None:
    rollout = make_rollout(make_task(1))
    part = samples.ScoreComponent(name="judge", value=value)
    scores = samples.ScoredRollout(scores=[samples.CompletionScore(total=1.0, components=[part])])
    with pytest.raises(Malformed, match="finite scores"):
        decode(Stream.SCORED, {b"p": rollout.SerializeToString(), b"s": scores.SerializeToString()})


def test_evaluations_are_in_flight_under_names_of_their_own() -> None:
    training, evaluation = make_task(7), make_task(7, evaluation_id="held-out")
    assert in_flight_field(training) == "7"
    assert in_flight_field(evaluation) == "e:held-out:7"
    assert settled_field(training) is None
    scored = samples.ScoredRollout(rollout=make_rollout(evaluation))
    assert settled_field(scored) == "e:held-out:7"
