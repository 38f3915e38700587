"""Turns prompt tasks into requests for the engine, and what it sampled into rollouts."""

import time
from collections.abc import Sequence

from offbeat.errors import DataError
from offbeat.v1 import samples_pb2 as samples
from services.generator.engines import GeneratedCompletion, GenerationRequest

FINISH_REASONS = {
    "stop": samples.FINISH_REASON_STOP,
    "length": samples.FINISH_REASON_LENGTH,
}


def requests_of(
    task: samples.PromptTask, *, run_id: str, vocab_size: int | None
) -> list[GenerationRequest]:
    """One request per completion wanted. Raises `DataError` when the task can't be meant so."""
    if task.run_id != run_id:
        raise DataError(f"run_id: expected {run_id!r}, found {task.run_id!r}")
    if task.kind not in {samples.TASK_KIND_TRAIN, samples.TASK_KIND_EVALUATION}:
        raise DataError(f"kind: expected TRAIN or EVALUATION, found {task.kind}")
    if task.k < 1 or len(task.seeds) != task.k:
        raise DataError(f"seeds: expected k = {task.k} >= 1 of them, found {len(task.seeds)}")
    prompt = list(task.prompt_token_ids)
    check_tokens(prompt, vocab_size)
    check_sampling(task.sampling)
    name = f"{task.evaluation_id or 'train'}-{task.ordinal}.{task.attempt}"
    return [
        request_of(f"{name}-{index}", prompt, task.sampling, seed=seed, ordinal=task.ordinal)
        for index, seed in enumerate(task.seeds)
    ]


def request_of(
    request_id: str,
    prompt: Sequence[int],
    sampling: samples.SamplingParams,
    *,
    seed: int,
    ordinal: int = 0,
) -> GenerationRequest:
    """A request with the sampling parameters of a record."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
        # Engines take 63 bits.
        seed=seed & (2**63 - 1),
        ordinal=ordinal,
    )


def check_tokens(prompt: Sequence[int], vocab_size: int | None) -> None:
    """Raises `DataError` for an empty prompt and for tokens outside the vocabulary."""
    if not prompt:
        raise DataError("prompt_token_ids: expected at least one token, found none")
    if vocab_size is not None and max(prompt) >= vocab_size:
        raise DataError(
            f"prompt_token_ids: expected ids below the model's vocab_size {vocab_size}, found {max(prompt)}: "
            "was the prompt made with another tokenizer?"
        )


def check_sampling(sampling: samples.SamplingParams) -> None:
    """Raises `DataError` naming the value that is out of range."""
    allowed = {
        "temperature": (sampling.temperature, 0 <= sampling.temperature < 1e3, "0 or more"),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        "min_p": (sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 1, "1 or more"),
        "stop": (list(sampling.stop), all(sampling.stop), "no empty string"),
    }
    for name, (value, good, expected) in allowed.items():
        if not good:
            raise DataError(f"sampling.{name}: expected {expected}, found {value}")


def completion_of(generated: GeneratedCompletion, seed: int) -> samples.Completion:
    """The record of a completion."""
    return samples.Completion(
        token_ids=generated.token_ids,
        logprobs=generated.logprobs,
        version_spans=[
            samples.VersionSpan(version=version, count=count)
            for version, count in generated.version_spans
        ],
        finish_reason=FINISH_REASONS[generated.finish_reason],
        stop_string=generated.stop_string,
        text=generated.text,
        seed=seed,
    )


def rollout_of(
    task: samples.PromptTask,
    generated: Sequence[GeneratedCompletion],
    *,
    generator_id: str,
    started_unix_ms: int,
) -> samples.Rollout:
    """The record of a whole group."""
    return samples.Rollout(
        task=task,
        completions=[
            completion_of(item, seed) for item, seed in zip(generated, task.seeds, strict=True)
        ],
        generator_id=generator_id,
        started_unix_ms=started_unix_ms,
        finished_unix_ms=now_unix_ms(),
    )


def now_unix_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
