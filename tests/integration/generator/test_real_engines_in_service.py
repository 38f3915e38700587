"""Generators with a model: the parity check stands between a load and everything that leaves."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from tests.harness.processes import wait_gone
from tests.harness.streams import until
from tests.harness.tiny_models import make_tiny_model, perturb, reference_logprobs, tensors_of
from tests.integration.generator.conftest import Run, versions_of
from tests.integration.generator.test_generator_service import holds, status

TRANSFORMERS = {"name": "transformers", "max_num_seqs": 8}
VLLM = {"name": "vllm", "max_num_seqs": 8, "kv_cache_memory_mb": 64}
PARITY = [[1, 5, 9, 13, 17, 21], [1, 7, 30, 31]]


async def publish(run: Run, model: Any, step: int, *, wrong_by: float = 0.0) -> int:
    """Publishes the model, with parity log-probs that may be wrong."""
    scores = [[x + wrong_by for x in row] for row in reference_logprobs(model, PARITY)]
    return await run.publish(step, tensors_of(model), zip(PARITY, scores, strict=True))


async def test_a_version_that_fails_its_parity_check_is_never_served_with(run: Run) -> None:
    model = make_tiny_model(run.model, tied=True)
    await publish(run, model, 0)
    service = run.generator(TRANSFORMERS)
    address = await service.ready()
    assert 0 <= (await status(address)).parity_difference < 1e-3
    perturb(model, seed=1)
    await publish(run, model, 1)
    await until(lambda: holds(address, 2), "version 2")
    await run.learner.issue([run.task(0)])
    rollout = (await run.rollouts(1))[0]
    assert versions_of(rollout) == {2}
    tokens = [[1, 3, 4, *c.token_ids] for c in rollout.completions]
    for completion, scores in zip(
        rollout.completions, reference_logprobs(model, tokens), strict=True
    ):
        assert list(completion.logprobs) == pytest.approx(scores[2:], abs=1e-3)

    await publish(run, model, 2, wrong_by=0.05)
    await run.learner.issue([run.task(1, min_version=3)])
    assert await service.ended() == 1
    assert "version 3 failed its parity check twice" in service.log.read_text()
    assert (await run.learner.backlog())[0].entries == 1
    assert [v.receivers for v in await run.checkpoint.list_versions()][-1] == []


@pytest.mark.slow
async def test_vllm_serves_and_its_processes_die_with_a_killed_generator(run: Run) -> None:
    model = make_tiny_model(run.model, tied=True)
    await publish(run, model, 0)
    service = run.generator(VLLM)
    address = await service.ready(seconds=240)
    await run.learner.issue([run.task(ordinal) for ordinal in range(8)])
    assert len(await run.rollouts(8)) == 8
    perturb(model, seed=1)
    await publish(run, model, 1)
    await until(lambda: holds(address, 2), "version 2")
    assert (await status(address)).parity_difference < 1e-3
    children = psutil.Process(service.process.pid).children(recursive=True)
    assert children
    service.kill()
    wait_gone(children)
