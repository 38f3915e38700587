"""Reward workers as processes between real streams: every group comes out once, scored or dead."""

import asyncio

import pytest

from offbeat.streams.base import Stream
from offbeat.v1 import samples_pb2


def _totals(results):
    return {
        r.record.rollout.task.ordinal: [score.total for score in r.record.scores]
        for r in results
        if r.stream is Stream.SCORED
    }


def _dead(results):
    return {r.record.ordinal: r.record.reason for r in results if r.stream is Stream.DEAD}


async def test_groups_come_out_scored_as_they_went_in(run):
    worker = run.worker(
        {"name": "exact_match"}, {"name": "fine", "path": f"{run.functions}:fine", "weight": 0.5}
    )
    await run.issue([f"prompt {i}" for i in range(20)])
    results = await run.collect(20)
    assert _totals(results) == {i: [1.5, 1.0] for i in range(20)}
    record = results[0].record
    assert record.rollout.generator_id == "test"
    assert [c.text for c in record.rollout.completions] == ["a", "aa"]
    assert [c.name for c in record.scores[0].components] == ["exact_match", "fine"]
    assert record.reward_worker_id
    assert 0 < record.started_unix_ms <= record.finished_unix_ms
    assert worker.stop() == 0
    assert await run.reward_members() == []


async def test_a_group_that_a_function_fails_on_is_dead_and_no_other(run):
    run.worker("raises", "not_a_number", "wrong_length")
    bad = {2: "bad-raises", 3: "bad-not_a_number", 5: "bad-wrong_length"}
    await run.issue([bad.get(i, f"prompt-{i}") for i in range(8)])
    results = await run.collect(8)
    assert sorted(_totals(results)) == [0, 1, 4, 6, 7]
    dead = _dead(results)
    assert sorted(dead) == sorted(bad)
    assert "'raises': expected 2 values, but it raised ValueError: can't score this" in dead[2]
    assert "'not_a_number': expected a finite number or None, found nan at index 0" in dead[3]
    assert "'wrong_length': expected 2 values, found 1" in dead[5]
    await run.issue(["prompt"], start=8, broken=True)
    (result,) = await run.collect(1)
    assert "malformed rollout: column 'answer': expected JSON" in result.record.reason
    assert (result.record.stream, result.record.deliveries) == ("rollouts", 1)


@pytest.mark.slow
async def test_a_group_that_kills_its_worker_costs_itself_only(run):
    """A new worker is started after each death, as a supervisor does."""
    run.worker("dies")
    await run.issue(["bad" if i == 1 else f"prompt-{i}" for i in range(4)])
    results = []
    deaths = 0
    worker = None
    while len(results) < 4:
        if worker is None or worker.process.poll() is not None:
            deaths += worker is not None
            worker = run.worker("dies")
        results += await run.learner.collect(wait_seconds=0.2)
    assert sorted(_totals(results)) == [0, 2, 3]
    assert list(_dead(results)) == [1]
    assert deaths <= 4


async def test_a_function_that_never_returns_ends_the_process(run):
    worker = run.worker("stuck", timeout_seconds=0.3)
    await run.issue(["bad"])
    assert await worker.ended() == 1
    assert "'stuck': expected values for 2 completions within 0.3 s" in worker.log.read_text()
    worker.start()
    assert await worker.ended() == 1
    assert "'stuck'" in _dead(await run.collect(1))[0]


async def test_a_function_that_fails_on_everything_stops_the_worker(run):
    await run.issue([f"bad-raises-{i}" for i in range(20)])
    worker = run.worker("raises")
    assert await worker.ended() == 2
    assert "failed on 8 groups in a row" in worker.log.read_text().splitlines()[-1]
    backlog = await run.pending()
    assert backlog[Stream.ROLLOUTS] == 20
    assert backlog[Stream.DEAD] == backlog[Stream.SCORED] == 0


async def test_a_mistake_in_the_recipe_is_one_line_and_no_restart(run):
    worker = run.worker({"name": "x", "path": f"{run.functions}:nothing"})
    assert await worker.ended() == 2
    lines = worker.log.read_text().splitlines()
    assert "no 'nothing'" in lines[-1]
    assert "Traceback" not in "".join(lines)


async def test_drain_finishes_what_is_under_way(run):
    worker = run.worker("gate", max_groups=2)
    await run.issue([f"prompt-{i}" for i in range(6)])
    await _until(run.calls)
    worker.process.terminate()
    await asyncio.sleep(0.1)
    assert worker.process.poll() is None
    run.open_gate()
    assert await worker.ended() == 0
    assert len(_totals(await run.collect(2))) == 2
    run.worker("fine")
    assert len(_totals(await run.collect(4))) == 4


async def test_drain_hands_back_what_takes_too_long(run):
    worker = run.worker("gate", rpc={"drain_seconds": 0.2})
    await run.issue([f"prompt-{i}" for i in range(6)])
    await _until(run.calls)
    assert await asyncio.to_thread(worker.stop) == 0
    run.worker("fine")
    results = await run.collect(6)
    assert len(_totals(results)) == 6
    assert "handing 6 groups back" in worker.log.read_text()


async def test_two_workers_share_the_groups(run):
    workers = [run.worker("slow", max_groups=4) for _ in range(2)]
    for worker in workers:
        await worker.ready()
    await run.issue([f"prompt-{i}" for i in range(40)])
    results = await run.collect(40)
    assert sorted(_totals(results)) == list(range(40))
    shares = [len(calls) / 40 for calls in run.calls()]
    assert len(shares) == 2
    assert min(shares) >= 0.2


async def test_what_a_killed_worker_held_is_scored_by_the_other_once(run):
    first = run.worker("gate", max_groups=4)
    await run.issue([f"prompt-{i}" for i in range(4)])
    await _until(run.calls)
    second = run.worker("fine", max_groups=4)
    await second.ready()
    first.kill()
    await run.issue([f"prompt-{i}" for i in range(4, 8)], start=4)
    results = await run.collect(8)
    assert sorted(_totals(results)) == list(range(8))
    backlog = await run.pending()
    assert backlog[Stream.ROLLOUTS] == backlog[Stream.DEAD] == 0
    assert await run.learner.collect(wait_seconds=0.1) == []


async def test_evaluation_groups_go_the_same_way(run):
    run.worker("fine")
    task = samples_pb2.PromptTask(
        run_id="r",
        term=1,
        kind=samples_pb2.TASK_KIND_EVALUATION,
        evaluation_id="e1",
        k=1,
        seeds=[1],
        prompt_token_ids=[1],
        sampling=samples_pb2.SamplingParams(max_tokens=1),
    )
    await run.learner.issue([task])
    while not (deliveries := await run.generator.take(1)):
        pass
    completion = samples_pb2.Completion(
        token_ids=[1],
        logprobs=[0.0],
        version_spans=[samples_pb2.VersionSpan(version=1, count=1)],
        finish_reason=samples_pb2.FINISH_REASON_LENGTH,
        text="abc",
    )
    rollout = samples_pb2.Rollout(task=deliveries[0].record, completions=[completion])
    await run.generator.hand_off(deliveries[0], rollout)
    (result,) = await run.collect(1)
    assert result.record.rollout.task.evaluation_id == "e1"
    assert result.record.scores[0].total == 3.0


async def _until(condition):
    while not condition():
        await asyncio.sleep(0.01)
