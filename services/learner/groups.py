"""From scored groups as they arrive to the arrays that the trainer takes, and what they say about staleness."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from offbeat.v1 import samples_pb2 as samples
from services.learner.batching import Group, Sample
from services.learner.cohorts import Cohorts


def to_group(cohorts: Cohorts, step: int, scored: samples.ScoredRollout) -> Group:
    """A scored group as arrays, with the lag that its completions have at `step`."""
    rollout = scored.rollout
    return Group(
        ordinal=rollout.task.ordinal,
        prompt_token_ids=np.array(rollout.task.prompt_token_ids, dtype=np.int32),
        completions=tuple(
            Sample(
                token_ids=np.array(completion.token_ids, dtype=np.int32),
                behaviour_logprobs=np.array(completion.logprobs, dtype=np.float32),
                reward=score.total,
                lag=cohorts.lag(step, [completion]),
                has_eos=completion.finish_reason == samples.FINISH_REASON_STOP,
                loss_mask=np.frombuffer(completion.loss_mask, dtype=np.uint8)
                if completion.loss_mask
                else None,
                reference_logprobs=_optional(completion.reference_logprobs),
            )
            for completion, score in zip(rollout.completions, scored.scores, strict=True)
        ),
    )


def _optional(values: Sequence[float]) -> np.ndarray | None:
    return np.array(values, dtype=np.float32) if len(values) else None


def permuted(groups: Sequence[Group], generator: random.Random) -> list[Group]:
    """The same groups with their rewards permuted over all completions: a control that must not learn."""
    rewards = [sample.reward for group in groups for sample in group.completions]
    generator.shuffle(rewards)
    left = iter(rewards)
    return [
        replace(
            group,
            completions=tuple(replace(sample, reward=next(left)) for sample in group.completions),
        )
        for group in groups
    ]


def left_out(groups: Sequence[Group], *, equal: bool, at_most: int) -> set[int]:
    """Ordinals of the groups of a cohort that its step does not train.

    With `equal` those whose rewards are all equal; of the others, those past the first `at_most` in
    ordinal order. Which ones are trained does not depend on which arrived first.
    """
    without = {
        group.ordinal
        for group in groups
        if equal and len({sample.reward for sample in group.completions}) == 1
    }
    left = sorted(group.ordinal for group in groups if group.ordinal not in without)
    return without | set(left[at_most:])


def lag_metrics(
    cohorts: Cohorts, step: int, update: int, scored: Sequence[samples.ScoredRollout]
) -> dict[str, float]:
    """Mean and maximum of lag (steps) and lag_updates (optimizer updates), and the histogram lag/count_<n>."""
    if not scored:
        return {}
    lags = [cohorts.lag(step, group.rollout.completions) for group in scored]
    updates = [cohorts.lag_updates(update, group.rollout.completions) for group in scored]
    found = {
        "lag/mean": sum(lags) / len(lags),
        "lag/max": float(max(lags)),
        "lag_updates/mean": sum(updates) / len(updates),
        "lag_updates/max": float(max(updates)),
    }
    return found | {f"lag/count_{lag}": float(lags.count(lag)) for lag in sorted(set(lags))}


def reward_metrics(groups: Sequence[Group], *, threshold: float | None) -> dict[str, float]:
    """Mean and standard deviation of the rewards; the share that reaches the threshold, if there is one."""
    rewards = [sample.reward for group in groups for sample in group.completions]
    if not rewards:
        return {}
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    found = {"reward/mean": mean, "reward/std": math.sqrt(variance)}
    if threshold is not None:
        found["reward/pass"] = sum(reward >= threshold for reward in rewards) / len(rewards)
    return found


def moved_sequences(groups: Sequence[Group], *, limit: int) -> list[list[int]]:
    """Best and worst of groups with a signal: this step's update moved them, so they check the next version."""
    sequences: list[list[int]] = []
    for group in groups:
        ordered = sorted(group.completions, key=lambda sample: sample.reward)
        if ordered[0].reward < ordered[-1].reward:
            prompt = [int(token) for token in group.prompt_token_ids]
            sequences += [
                prompt + [int(token) for token in sample.token_ids]
                for sample in (ordered[0], ordered[-1])
            ]
        if len(sequences) >= limit:
            break
    return sequences[:limit]


def component_metrics(scored: Sequence[samples.ScoredRollout]) -> dict[str, float]:
    """reward_component/<name>: mean of each component over the completions for which it has a value."""
    values: dict[str, list[float]] = {}
    for group in scored:
        for score in group.scores:
            for component in score.components:
                if component.HasField("value"):
                    values.setdefault(component.name, []).append(component.value)
    return {f"reward_component/{name}": sum(v) / len(v) for name, v in values.items()}


def versions_of(groups: Iterable[samples.ScoredRollout]) -> list[int]:
    """Versions that any token of the groups comes from, oldest first."""
    return sorted(
        {
            span.version
            for group in groups
            for completion in group.rollout.completions
            for span in completion.version_spans
        }
    )
