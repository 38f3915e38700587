"""Generators as processes: tasks in, rollouts out, over weight updates, drains, deaths and bad input."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from offbeat import rpc
from offbeat.failpoints import VARIABLE
from offbeat.streams.base import Delivery, Stream
from offbeat.v1 import generator_pb2 as generator
from offbeat.v1 import generator_pb2_grpc as generator_grpc
from offbeat.v1 import samples_pb2 as samples
from tests.harness.service import health
from tests.harness.streams import until
from tests.integration.generator.conftest import CONTEXT, MAX_TOKENS, Run, versions_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "offbeat.v1.GeneratorService"
SLOW = {"token_seconds": 0.05, "min_tokens": MAX_TOKENS}
STUCK = {"token_seconds": 600.0}


@pytest.fixture
def run_with_model(run: Run) -> Run:
    run.make_model()
    return run


async def status(address: str) -> generator.GeneratorServiceGetStatusResponse:
    async with rpc.connect(address) as channel:
        stub = generator_grpc.GeneratorServiceStub(channel)
        return await stub.GetStatus(generator.GeneratorServiceGetStatusRequest(), timeout=10)


async def holds(address: str, version: int) -> bool:
    return (await status(address)).version == version


async def test_it_serves_once_it_holds_a_verified_version(run_with_model: Run) -> None:
    run = run_with_model
    service = run.generator()
    address = await service.listening()
    assert [await health(address, name) for name in ("", "readiness", SERVICE, "liveness")] == [
        NOT_SERVING,
        NOT_SERVING,
        NOT_SERVING,
        SERVING,
    ]
    async with rpc.connect(address) as channel:
        stub = generator_grpc.GeneratorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(_request([1, 3]), timeout=10)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    await run.learner.issue([run.task(0)])
    version = await run.publish(0)
    assert await service.ready() == address
    rollout = (await run.rollouts(1))[0]
    assert rollout.task == run.task(0)
    assert versions_of(rollout) == {version}
    assert rollout.generator_id == service.generator_id
    confirmed = await until(run.checkpoint.list_versions, "the confirmation")
    assert list(confirmed[-1].receivers) == [service.generator_id]
    found = await status(address)
    assert (found.engine, found.version, found.groups_finished) == ("deterministic", version, 1)
    assert found.tokens_generated == sum(len(c.token_ids) for c in rollout.completions)
    assert service.stop() == 0
    assert not list(run.folder.rglob("offbeat-staging-*"))


async def test_groups_go_on_over_updates_and_never_start_before_their_version(
    run_with_model: Run,
) -> None:
    run = run_with_model
    await run.publish(0)
    service = run.generator(SLOW)
    address = await service.ready()
    await run.learner.issue([run.task(0), run.task(1, min_version=2)])
    await until(lambda: _in_flight(address), "the first group")
    await run.publish(1)
    rollouts = await run.rollouts(2)
    # How far the group had got by then is a matter of time.
    assert versions_of(rollouts[0]) <= {1, 2}
    assert versions_of(rollouts[1]) == {2}
    assert (await status(address)).updates_applied == 2
    await run.publish(2)
    await until(lambda: holds(address, 3), "version 3")


async def test_a_drained_generator_gives_its_groups_to_the_next_one(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    first = run.generator({**STUCK, "max_num_seqs": 8}, rpc={"drain_seconds": 0.3})
    address = await first.ready()
    tasks = [run.task(ordinal) for ordinal in range(4)]
    await run.learner.issue(tasks)
    await until(lambda: _in_flight(address), "groups under way")
    assert first.stop() == 0
    second = run.generator()
    began = time.monotonic()
    rollouts = await run.rollouts(4)
    assert sorted(rollouts) == [0, 1, 2, 3]
    await second.ready()
    deliveries = await run.learner.collect()
    assert {d.deliveries for d in deliveries} == {1}
    assert time.monotonic() - began < 60


async def test_the_drain_call_finishes_what_runs_and_the_process_goes_on_answering(
    run_with_model: Run,
) -> None:
    run = run_with_model
    await run.publish(0)
    service = run.generator(SLOW)
    address = await service.ready()
    await run.learner.issue([run.task(0), run.task(1)])
    await until(lambda: _in_flight(address), "groups under way")
    async with rpc.connect(address) as channel:
        stub = generator_grpc.GeneratorServiceStub(channel)
        answer = await stub.Drain(generator.DrainRequest(grace_seconds=30), timeout=40)
        assert answer.groups_finished + answer.groups_returned >= 1
        assert answer.groups_returned == 0
        with pytest.raises(grpc.aio.AioRpcError, match="draining"):
            await stub.Generate(_request([1, 3]), timeout=10)
    assert (await status(address)).draining
    assert await health(address) == NOT_SERVING
    assert await health(address, "liveness") == SERVING
    assert service.stop() == 0


async def test_groups_of_a_killed_generator_are_made_again_just_alike(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    killed = run.generator(SLOW)
    address = await killed.ready()
    await run.learner.issue([run.task(ordinal) for ordinal in range(6)])
    await until(lambda: _in_flight(address), "groups under way")
    killed.kill()
    run.generator({"min_tokens": MAX_TOKENS})
    rollouts = await run.rollouts(6)
    again = {ordinal: run.task(ordinal, evaluation_id="again") for ordinal in range(6)}
    await run.learner.issue(list(again.values()))
    repeated = await run.rollouts(6)
    for ordinal, rollout in rollouts.items():
        tokens = [list(c.token_ids) for c in rollout.completions]
        assert tokens == [list(c.token_ids) for c in repeated[ordinal].completions]


@pytest.mark.slow
async def test_a_task_that_kills_its_generator_costs_itself_only(run_with_model: Run) -> None:
    """A new generator is started after each death, as a supervisor does; what else it held is no less good for it."""
    run = run_with_model
    await run.publish(0)
    poisoned = {VARIABLE: "generator.ordinal_3=kill"}
    await run.learner.issue([run.task(ordinal) for ordinal in range(6)])
    results: list[Delivery[Any]] = []
    deaths = 0
    service = run.generator(environment=poisoned)
    while len(results) < 6:
        if service.process.poll() is not None:
            deaths += 1
            service = run.generator(environment=poisoned)
        for delivery in await run.reward.take(64, wait_seconds=0.0):
            scores = [samples.CompletionScore() for _ in delivery.record.completions]
            await run.reward.hand_off(delivery, samples.ScoredRollout(scores=scores))
        results += await run.learner.collect(wait_seconds=0.2)
    [letter] = [d.record for d in results if isinstance(d.record, samples.DeadLetter)]
    assert (letter.ordinal, letter.deliveries) == (3, 3)
    assert "while it processed nothing else" in letter.reason
    assert deaths == 3


async def test_a_drain_does_not_wait_for_a_swap_that_is_put_off(run_with_model: Run) -> None:
    """Groups that only the version held may generate put a swap off; the drain does not wait for it."""
    run = run_with_model
    await run.publish(0)
    service = run.generator(STUCK, rpc={"drain_seconds": 1.0})
    address = await service.ready()
    await run.learner.issue([run.task(0, max_version=1)])
    await until(lambda: _in_flight(address), "the group")
    await run.publish(1)
    service.process.terminate()

    async def not_ready() -> bool:
        return await health(address) != SERVING

    await until(not_ready, "readiness to go")
    assert await service.ended() == 0
    run.generator()
    await run.publish(2)
    assert list(await run.rollouts(1)) == [0]


async def test_two_generators_share_the_work(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    services = [run.generator({**SLOW, "token_seconds": 0.02}) for _ in range(2)]
    for service in services:
        await service.ready()
    await run.learner.issue([run.task(ordinal) for ordinal in range(60)])
    rollouts = await run.rollouts(60)
    shares = [
        sum(r.generator_id == service.generator_id for r in rollouts.values()) / 60
        for service in services
    ]
    assert min(shares) >= 0.2, shares


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt_token_ids": [3] * CONTEXT}, f"the prompt has {CONTEXT} tokens; expected 1 to"),
        ({"prompt_token_ids": [1000]}, "vocab_size 50, found 1000"),
        ({"sampling": samples.SamplingParams(top_p=2)}, "sampling.top_p: expected in (0, 1]"),
        ({"deadline_unix_ms": 1}, "not done at its deadline"),
    ],
)
async def test_what_can_not_be_done_is_given_up_with_its_reason(
    run_with_model: Run, fields: dict[str, Any], said: str
) -> None:
    run = run_with_model
    await run.publish(0)
    run.generator()
    await run.learner.issue([run.task(0, **fields), run.task(1)])
    letter = (await run.dead()).record
    assert (letter.ordinal, letter.stream) == (0, Stream.PROMPTS)
    assert said in letter.reason
    assert list(await run.rollouts(1)) == [1]


async def test_an_evaluation_holds_the_swap_until_it_is_done(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    service = run.generator({**SLOW, "max_num_seqs": 4})
    address = await service.ready()
    evaluation = [run.task(i, evaluation_id="e", max_version=1) for i in range(6)]
    await run.learner.issue(evaluation)
    await until(lambda: _in_flight(address), "the evaluation")
    await run.publish(1)
    rollouts = await run.rollouts(6)
    assert set.union(*map(versions_of, rollouts.values())) == {1}
    await until(lambda: holds(address, 2), "the update after the evaluation")


async def test_an_evaluation_holds_the_swap_for_a_bounded_time_only(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    service = run.generator(STUCK, evaluation_hold_seconds=0.2)
    address = await service.ready()
    await run.learner.issue([run.task(0, evaluation_id="e", max_version=1)])
    await until(lambda: _in_flight(address), "the evaluation")
    await run.publish(1)
    await until(lambda: holds(address, 2), "the update in spite of the evaluation")


async def test_a_group_that_came_late_is_made_by_the_version_it_wants(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    await run.publish(1)
    service = run.generator()
    address = await service.ready()
    assert await holds(address, 2)
    await run.learner.issue([run.task(0), run.task(1, max_version=1), run.task(2, min_version=2)])
    rollouts = await run.rollouts(3)
    assert versions_of(rollouts[1]) == {1}
    assert versions_of(rollouts[2]) == {2}
    await until(lambda: holds(address, 2), "the newest version again")


async def test_a_wedged_engine_is_seen_and_its_groups_go_to_a_peer(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    wedged = run.generator(STUCK, stall_seconds=2.0)
    address = await wedged.ready()
    await run.learner.issue([run.task(0)])

    async def noticed() -> bool:
        return await health(address, "liveness") == NOT_SERVING

    await until(noticed, "liveness to go")
    assert await health(address) == NOT_SERVING
    run.generator()
    assert list(await run.rollouts(1)) == [0]
    assert await wedged.ended() == 1
    assert "made no step for" in wedged.log.read_text()


async def test_people_get_completions_and_clear_refusals(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    service = run.generator()
    async with rpc.connect(await service.ready()) as channel:
        stub = generator_grpc.GeneratorServiceStub(channel)
        answer = await stub.Generate(_request([1, 3], k=3, seed=7), timeout=10)
        assert len(answer.completions) == 3
        assert list(answer.prompt_token_ids) == [1, 3]
        assert [c.seed for c in answer.completions] == [7, 8, 9]
        for request, said in (
            (_request([3] * CONTEXT), "the prompt has"),
            (_request([1], k=65), "at most 64"),
            (generator.GenerateRequest(), "expected text, message, or tokens"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=said) as error:
                await stub.Generate(request, timeout=10)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_caller_that_goes_away_frees_its_slots(run_with_model: Run) -> None:
    run = run_with_model
    await run.publish(0)
    service = run.generator({**SLOW, "token_seconds": 0.5, "max_num_seqs": 2})
    address = await service.ready()
    async with rpc.connect(address) as channel:
        stub = generator_grpc.GeneratorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(_request([1, 3], k=2), timeout=0.3)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        short = _request([1, 3])
        short.sampling.CopyFrom(samples.SamplingParams(temperature=1, top_p=1, max_tokens=1))
        began = time.monotonic()
        await stub.Generate(short, timeout=30)
        assert time.monotonic() - began < MAX_TOKENS * 0.5


async def test_a_missing_model_is_one_clear_error(run: Run) -> None:
    service = run.generator()
    assert await service.ended() == 2
    lines = service.log.read_text().strip().splitlines()
    assert len(lines) == 1
    assert "expected a Hugging Face model folder, found nothing" in lines[0]


def _request(tokens: list[int], **fields: int) -> generator.GenerateRequest:
    prompt = generator.TokenSequence(token_ids=tokens)
    return generator.GenerateRequest(tokens=prompt, **fields)


async def _in_flight(address: str) -> bool:
    return (await status(address)).groups_in_flight > 0
