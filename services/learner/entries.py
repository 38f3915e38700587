"""Collected entries: whether a group can be trained on, and what is kept of one. Used by `coordinator`."""

from dataclasses import replace

from offbeat.streams.base import Delivery
from offbeat.v1 import samples_pb2 as samples


def without_payload(delivery: Delivery) -> Delivery:
    """The delivery as it is kept until a checkpoint contains it: what was learned from it is not needed any more."""
    if isinstance(delivery.record, samples.DeadLetter):
        return delivery
    task = delivery.record.rollout.task
    bare = samples.PromptTask(ordinal=task.ordinal, attempt=task.attempt, kind=task.kind)
    return replace(delivery, record=samples.ScoredRollout(rollout=samples.Rollout(task=bare)))


def malformed(record: samples.ScoredRollout) -> str | None:
    """Why a scored group can't be trained on: its parts do not fit together; None when they do."""
    rollout = record.rollout
    k = rollout.task.k
    if len(rollout.completions) != k or len(record.scores) != k:
        return f"expected {k} completions and scores, found {len(rollout.completions)} and {len(record.scores)}"
    for index, completion in enumerate(rollout.completions):
        tokens = len(completion.token_ids)
        counted = sum(span.count for span in completion.version_spans)
        if len(completion.logprobs) != tokens or counted != tokens:
            return (
                f"completion {index}: {tokens} tokens, {len(completion.logprobs)} log-probs, "
                f"versions of {counted} tokens; expected the same number of each"
            )
    return None
