"""What reward functions see of a record: plain samples, made from rollouts and from `Score` requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.errors import DataError
from offbeat.streams.columns import decode_columns
from offbeat.streams.records import Malformed, check_rollout
from offbeat.v1 import reward_pb2, samples_pb2

FINISH_REASONS = {
    samples_pb2.FINISH_REASON_STOP: "stop",
    samples_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Sample:
    """One completion to score."""

    prompt: str
    completion: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    completion_token_ids: Sequence[int] = ()
    finish_reason: str = "stop"
    """"stop" (an end-of-sequence token or a stop string) or "length"."""
    evaluation: bool = False
    """Whether it belongs to a held-out evaluation."""


def samples_of_rollout(rollout: samples_pb2.Rollout) -> list[Sample]:
    """The samples of a group. Raises `DataError` when the group is not whole or contradicts itself."""
    try:
        check_rollout(rollout)
    except Malformed as error:
        raise DataError(str(error)) from error
    for index, completion in enumerate(rollout.completions):
        _check_lengths(index, completion)
    task = rollout.task
    columns = decode_columns(task.columns)
    return [
        Sample(
            prompt=task.prompt_text,
            completion=completion.text,
            columns=columns,
            completion_token_ids=completion.token_ids,
            finish_reason=FINISH_REASONS[completion.finish_reason],
            evaluation=task.kind == samples_pb2.TASK_KIND_EVALUATION,
        )
        for completion in rollout.completions
    ]


def sample_of_item(item: reward_pb2.ScoreItem) -> Sample:
    """The sample of one item of a `Score` request. Raises `DataError`."""
    reason = item.finish_reason or samples_pb2.FINISH_REASON_STOP
    if reason not in FINISH_REASONS:
        raise DataError(f"finish_reason: expected STOP or LENGTH, found {reason}")
    return Sample(
        prompt=item.prompt,
        completion=item.completion,
        columns=decode_columns(item.columns),
        completion_token_ids=list(item.completion_token_ids),
        finish_reason=FINISH_REASONS[reason],
    )


def _check_lengths(index: int, completion: samples_pb2.Completion) -> None:
    """Checks what is optional; `check_rollout` sees to the rest."""
    tokens = len(completion.token_ids)
    lengths = {
        "loss_mask": len(completion.loss_mask),
        "reference_logprobs": len(completion.reference_logprobs),
        "segments": sum(segment.token_count for segment in completion.segments),
    }
    for name, length in lengths.items():
        if length not in {0, tokens}:
            raise DataError(
                f"completion {index}: {name}: expected {tokens}, one per token, found {length}"
            )
