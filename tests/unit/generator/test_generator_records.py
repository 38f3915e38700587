"""Tasks become requests, completions become rollouts, and what can't be meant so is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offbeat.errors import DataError
from offbeat.v1 import samples_pb2 as samples
from services.generator.engines import GeneratedCompletion
from services.generator.records import requests_of, rollout_of


def make_task() -> samples.PromptTask:
    return samples.PromptTask(
        run_id="run",
        ordinal=9,
        attempt=1,
        kind=samples.TASK_KIND_TRAIN,
        prompt_token_ids=[1, 2],
        k=2,
        seeds=[5, 2**64 - 1],
        sampling=samples.SamplingParams(
            temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, max_tokens=8, stop=["!"]
        ),
    )


def test_every_sampling_parameter_reaches_the_engine() -> None:
    first, second = requests_of(make_task(), run_id="run", vocab_size=10)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.7, 0.9, 4, 0.1)
    assert (first.max_tokens, first.stop, first.ordinal) == (8, ("!",), 9)
    assert list(first.prompt_token_ids) == [1, 2]
    assert (first.seed, second.seed) == (5, 2**63 - 1)
    assert first.request_id != second.request_id


def change(text: str) -> Callable[[samples.PromptTask], None]:
    return lambda task: exec(text, {"task": task})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task.run_id = 'other'", "run_id: expected 'run', found 'other'"),
        ("task.kind = 0", "kind: expected TRAIN or EVALUATION"),
        ("task.k = 3", "seeds: expected k = 3"),
        ("del task.prompt_token_ids[:]", "at least one token"),
        ("task.prompt_token_ids.append(10)", "below the model's vocab_size 10, found 10"),
        ("task.sampling.temperature = -1", "sampling.temperature: expected 0 or more, found -1"),
        ("task.sampling.temperature = float('nan')", "sampling.temperature"),
        ("task.sampling.top_p = 0", "sampling.top_p"),
        ("task.sampling.min_p = 2", "sampling.min_p"),
        ("task.sampling.max_tokens = 0", "sampling.max_tokens"),
        ("task.sampling.stop.append('')", "sampling.stop"),
    ],
)
def test_a_malformed_task_is_named(text: str, said: str) -> None:
    task = make_task()
    change(text)(task)
    with pytest.raises(DataError, match=said.replace("(", r"\(")):
        requests_of(task, run_id="run", vocab_size=10)


def test_a_rollout_holds_the_task_unchanged_and_the_completions_in_order() -> None:
    task = make_task()
    generated = [
        GeneratedCompletion([3, 4, 2], [-0.5, -1.0, -0.25], [(7, 2), (8, 1)], "stop", "", "ab"),
        GeneratedCompletion([5], [-2.0], [(8, 1)], "length", "", "c"),
    ]
    rollout = rollout_of(task, generated, generator_id="g", started_unix_ms=1)
    assert rollout.task == task
    first, second = rollout.completions
    assert list(first.token_ids) == [3, 4, 2]
    assert [(span.version, span.count) for span in first.version_spans] == [(7, 2), (8, 1)]
    assert first.finish_reason == samples.FINISH_REASON_STOP
    assert second.finish_reason == samples.FINISH_REASON_LENGTH
    assert [completion.seed for completion in rollout.completions] == list(task.seeds)
    assert rollout.finished_unix_ms > rollout.started_unix_ms == 1
