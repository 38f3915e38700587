"""A rollout is whole and agrees with itself, or it is refused with the place that does not."""

import json

import pytest

from offbeat.errors import DataError
from offbeat.streams.columns import decode_columns
from offbeat.v1 import reward_pb2, samples_pb2
from services.reward.records import sample_of_item, samples_of_rollout

STOP, LENGTH = samples_pb2.FINISH_REASON_STOP, samples_pb2.FINISH_REASON_LENGTH


def _rollout() -> samples_pb2.Rollout:
    task = samples_pb2.PromptTask(
        kind=samples_pb2.TASK_KIND_TRAIN,
        prompt_text="2+2=",
        prompt_token_ids=[1],
        k=2,
        seeds=[1, 2],
        sampling=samples_pb2.SamplingParams(max_tokens=2),
    )
    task.columns["answer"].text = "4"
    completions = [
        samples_pb2.Completion(
            token_ids=[5, 6],
            logprobs=[-0.5, -1.0],
            version_spans=[samples_pb2.VersionSpan(version=1, count=2)],
            finish_reason=reason,
            text=text,
        )
        for text, reason in [("4", STOP), ("44", LENGTH)]
    ]
    return samples_pb2.Rollout(task=task, completions=completions)


def test_a_sample_carries_what_functions_may_ask_for():
    first, second = samples_of_rollout(_rollout())
    assert (first.prompt, first.completion, first.columns) == ("2+2=", "4", {"answer": "4"})
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert first.completion_token_ids == [5, 6]


def test_evaluation_rollouts_are_taken_too():
    rollout = _rollout()
    rollout.task.kind = samples_pb2.TASK_KIND_EVALUATION
    assert [sample.evaluation for sample in samples_of_rollout(rollout)] == [True, True]
    assert not samples_of_rollout(_rollout())[0].evaluation


def _drop_completion(rollout):
    del rollout.completions[1]


def _add_segment(rollout):
    rollout.completions[1].segments.add(role=samples_pb2.SEGMENT_ROLE_POLICY, token_count=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop_completion, "expected 2 completions (k), found 1"),
        (lambda r: r.completions[1].logprobs.pop(), "expected 2 logprobs, found 1"),
        (lambda r: setattr(r.completions[0], "loss_mask", b"\1"), "loss_mask: expected 2"),
        (lambda r: r.completions[0].reference_logprobs.append(0), "reference_logprobs"),
        (_add_segment, "completion 1: segments: expected 2, one per token, found 1"),
        (lambda r: setattr(r.task.columns["x"], "json", "{"), "column 'x': expected JSON"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused(change, words):
    rollout = _rollout()
    change(rollout)
    with pytest.raises(DataError) as raised:
        samples_of_rollout(rollout)
    assert words in str(raised.value)


def test_columns_arrive_as_python_values():
    value = samples_pb2.ColumnValue
    columns = {
        "text": value(text=""),
        "number": value(number=0.0),
        "integer": value(integer=0),
        "boolean": value(boolean=False),
        "json": value(json=json.dumps({"a": [1, None]})),
        "null": value(),
    }
    expected = {
        "text": "",
        "number": 0.0,
        "integer": 0,
        "boolean": False,
        "json": {"a": [1, None]},
        "null": None,
    }
    decoded = decode_columns(columns)
    assert decoded == expected
    assert [type(decoded[key]) for key in expected] == [type(expected[key]) for key in expected]


def test_an_item_without_a_finish_reason_counts_as_ended():
    assert sample_of_item(reward_pb2.ScoreItem(prompt="p")).finish_reason == "stop"
    with pytest.raises(DataError, match="found 9"):
        sample_of_item(reward_pb2.ScoreItem(finish_reason=9))
