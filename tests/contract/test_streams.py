"""What the port of the sample streams promises, on every adapter: in memory, on Valkey, and on Redis."""

import asyncio

import pytest

from offbeat.errors import Fenced, ServiceUnavailable, StreamError
from offbeat.streams.base import Delivery, LearnerStreams, Stream
from offbeat.v1 import samples_pb2 as samples
from tests.harness.streams import (
    StreamsRun,
    make_result,
    make_rollout,
    make_task,
    make_tasks,
    ordinals,
    pass_on,
    until,
)


async def collected(learner: LearnerStreams) -> list[Delivery]:
    return await learner.collect(wait_seconds=0.0)


async def test_a_sample_goes_from_the_learner_to_the_learner(run: StreamsRun) -> None:
    learner, generator, reward = await run.learner(), run.worker(), run.worker("reward")
    assert await learner.issue(make_tasks(3)) == 3

    tasks = await generator.take(10)
    assert [delivery.record for delivery in tasks] == make_tasks(3)
    for delivery in tasks:
        assert await generator.hand_off(delivery, make_rollout(delivery.record))
    groups = await pass_on(reward)
    assert [delivery.record for delivery in groups] == [make_rollout(t) for t in make_tasks(3)]

    scored = await collected(learner)
    assert ordinals(scored) == [0, 1, 2]
    assert scored[0].record.rollout == groups[0].record
    assert [score.total for score in scored[0].record.scores] == [0.0, 0.5]
    assert sorted(await learner.in_flight()) == [0, 1, 2]
    await learner.settle(scored[:2], [0, 1])
    assert sorted(await learner.in_flight()) == [2]
    backlog = {b.stream: (b.entries, b.pending) for b in await learner.backlog()}
    assert backlog.pop(Stream.SCORED) == (1, 1)
    assert set(backlog.values()) == {(0, 0)}
    assert await collected(learner) == []


async def test_issuing_again_changes_nothing(run: StreamsRun) -> None:
    learner, generator = await run.learner(), run.worker()
    assert await learner.issue(make_tasks(3)) == 3
    assert await learner.issue(make_tasks(4)) == 1
    await pass_on(generator)
    assert await learner.issue(make_tasks(4)) == 0
    assert await learner.issue([make_task(1, attempt=1)]) == 1
    assert await learner.issue([make_task(1)]) == 0
    in_flight = await learner.in_flight()
    assert (in_flight[1].term, in_flight[1].attempt) == (1, 1)
    assert await run.attempts(Stream.PROMPTS) == [(1, 1)]


async def test_many_tasks_are_issued_at_once(run: StreamsRun) -> None:
    learner = await run.learner()
    assert await learner.issue(make_tasks(300)) == 300
    assert len(await run.entries(Stream.PROMPTS)) == 300
    assert len(await learner.in_flight()) == 300


async def test_evaluations_come_first_and_are_no_training_ordinals(run: StreamsRun) -> None:
    learner, generator, reward = await run.learner(), run.worker(), run.worker("reward")
    evaluation = [make_task(ordinal, evaluation_id="e:1") for ordinal in range(2)]
    await learner.issue(make_tasks(2))
    assert await learner.issue(evaluation) == 2
    taken = await pass_on(generator)
    assert [d.stream for d in taken] == [Stream.EVALUATIONS] * 2 + [Stream.PROMPTS] * 2
    assert sorted(await learner.in_flight()) == [0, 1]
    await pass_on(reward)
    scored = await collected(learner)
    assert await learner.issue(evaluation) == 0
    await learner.settle([d for d in scored if d.record.rollout.task.evaluation_id], [])
    assert sorted(await learner.in_flight()) == [0, 1]
    assert await learner.issue(evaluation) == 2


async def test_a_generator_takes_nothing_above_its_version(run: StreamsRun) -> None:
    learner, generator = await run.learner(), run.worker()
    await learner.issue([make_task(i, min_version=v) for i, v in enumerate([1, 1, 2, 3])])
    assert await generator.take(10, held_version=0, wait_seconds=0.0) == []
    first = await generator.take(10, held_version=1, wait_seconds=0.05)
    assert ordinals(first) == [0, 1]
    assert ordinals(await generator.take(10, held_version=3, wait_seconds=0.0)) == [2, 3]


async def test_nobody_takes_more_than_a_fair_share(run: StreamsRun) -> None:
    learner, one, two = await run.learner(), run.worker(), run.worker()
    for worker in (one, two):
        await worker.announce("host:1", {})
    await learner.issue(make_tasks(5))
    assert len(await one.take(2)) == 2
    assert len(await one.take(10)) == 1
    assert await one.take(10, wait_seconds=0.0) == []
    held = await two.take(10)
    assert len(held) == 2
    await two.hand_off(held[0], make_result(held[0]))
    await learner.issue([make_task(7), make_task(8)])
    assert len(await two.take(10)) == 2


async def test_a_worker_with_empty_hands_gets_something(run: StreamsRun) -> None:
    learner, workers = await run.learner(), [run.worker() for _ in range(3)]
    for worker in workers:
        await worker.announce("host:1", {})
    await learner.issue(make_tasks(2))
    assert [len(await w.take(10, wait_seconds=0.0)) for w in workers] == [1, 1, 0]


@pytest.mark.parametrize("role", ["generator", "reward"])
async def test_two_workers_share_the_work(run: StreamsRun, role: str) -> None:
    learner = await run.learner()
    await learner.issue(make_tasks(60))
    if role == "reward":
        await pass_on(run.worker())
    workers = [run.worker(role), run.worker(role)]
    done = dict.fromkeys(workers, 0)
    holding: dict = {worker: [] for worker in workers}
    while sum(done.values()) < 60:
        # The second is three times as fast; both would take all that they can get.
        for worker in (workers[0], workers[1], workers[1], workers[1]):
            holding[worker] += await worker.take(16, wait_seconds=0.0)
            for delivery in holding[worker][:2]:
                assert await worker.hand_off(delivery, make_result(delivery))
                done[worker] += 1
            holding[worker] = holding[worker][2:]
    assert min(done.values()) >= 12


async def test_the_first_hand_off_wins(run: StreamsRun) -> None:
    learner, slow, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(1))
    [robbed] = await slow.take(1)
    await run.idle()
    [claimed] = await peer.take(1)
    assert claimed.key == robbed.key
    assert claimed.deliveries == 2
    assert await slow.beat([robbed]) == {robbed.key}
    assert await slow.hand_off(robbed, make_result(robbed))
    assert not await peer.hand_off(claimed, make_result(claimed))
    assert await peer.beat([claimed]) == {claimed.key}
    assert await run.attempts(Stream.ROLLOUTS) == [(0, 0)]


async def test_a_robbed_worker_learns_it_before_it_gets_the_entry_again(run: StreamsRun) -> None:
    learner, slow, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(1))
    robbed = await slow.take(1)
    await run.idle()
    assert await peer.take(1)
    await run.idle()
    assert await slow.take(1, wait_seconds=0.0) == []
    assert await slow.beat(robbed) == {robbed[0].key}
    [again] = await slow.take(1)
    assert (again.key, again.deliveries, again.alone) == (robbed[0].key, 3, True)


async def test_a_beating_worker_is_not_robbed(run: StreamsRun) -> None:
    learner, worker, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(1))
    [held] = await worker.take(1)
    for _ in range(3):
        await run.idle()
        assert await worker.beat([held]) == set()
        assert await peer.take(1, wait_seconds=0.0) == []
    assert await worker.hand_off(held, make_result(held))


async def test_what_is_handed_back_can_be_taken_at_once_and_is_not_counted(run: StreamsRun) -> None:
    learner, leaving, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(2))
    for _ in range(4):
        held = await leaving.take(10)
        assert [delivery.deliveries for delivery in held] == [1, 1]
        await leaving.hand_back(held)
        assert await leaving.beat(held) == {delivery.key for delivery in held}
    await leaving.leave()
    taken = await peer.take(10)
    assert [(d.deliveries, d.alone) for d in taken] == [(1, False)] * 2
    await leaving.hand_back(taken)  # not the owner: nothing happens
    assert await peer.beat(taken) == set()


async def die(run: StreamsRun, times: int) -> list[Delivery]:
    """Workers that die one after the other, each with what it gets."""
    taken: list[Delivery] = []
    for _ in range(times):
        worker = run.worker()
        taken = await worker.take(10)
        await run.idle()
    return taken


async def test_after_two_deaths_an_entry_runs_alone_and_after_a_third_it_is_dead(
    run: StreamsRun,
) -> None:
    learner = await run.learner()
    await learner.issue([make_task(0, attempt=3)])
    [last] = await die(run, 2)
    assert (last.deliveries, last.alone) == (2, False)

    worker = run.worker()
    await learner.issue([make_task(1)])
    [alone] = await worker.take(10)
    assert (ordinals([alone]), alone.deliveries, alone.alone) == ([0], 3, True)
    assert await worker.take(10, wait_seconds=0.0) == []

    await run.idle()
    peer = run.worker()
    assert ordinals(await peer.take(10)) == [1]
    [letter] = await collected(learner)
    dead = letter.record
    assert (dead.stream, dead.ordinal, dead.attempt, dead.deliveries) == ("prompts", 0, 3, 3)
    assert dead.kind == samples.TASK_KIND_TRAIN
    assert "processed nothing else" in dead.reason
    assert dead.worker_id.startswith("generator-")
    assert dead.dead_unix_ms > 0
    assert samples.PromptTask.FromString(dead.payload) == make_task(0, attempt=3)
    assert not await worker.hand_off(alone, make_result(alone))
    await learner.settle([letter], [0])
    assert await collected(learner) == []
    assert await run.attempts(Stream.DEAD) == [(0, 3)]


async def test_an_entry_that_must_run_alone_waits_for_empty_hands(run: StreamsRun) -> None:
    learner, busy = await run.learner(), run.worker()
    await learner.issue([make_task(0)])
    held = await busy.take(1)
    await learner.issue([make_task(1)])
    for _ in range(2):
        assert ordinals(await run.worker().take(10)) == [1]
        await run.idle()
        await busy.beat(held)
    await learner.issue([make_task(2)])
    held += await busy.take(10)
    assert ordinals(held) == [0, 2]
    assert await busy.take(10, wait_seconds=0.0) == []
    for delivery in held:
        assert await busy.hand_off(delivery, make_result(delivery))
    [alone] = await busy.take(10)
    assert (ordinals([alone]), alone.alone) == ([1], True)
    assert await busy.hand_off(alone, make_result(alone))
    assert await busy.take(10, wait_seconds=0.0) == []


async def test_what_failed_runs_alone_and_is_dead_when_it_fails_again(run: StreamsRun) -> None:
    learner, worker = await run.learner(), run.worker()
    await learner.issue(make_tasks(1))
    [first] = await worker.take(10)
    await worker.fail(first, "out of memory", final=False)
    [again] = await worker.take(10)
    assert (again.deliveries, again.alone) == (2, True)
    await worker.fail(again, "out of memory again", final=False)
    assert await worker.take(10, wait_seconds=0.0) == []
    [letter] = await collected(learner)
    assert (letter.record.reason, letter.record.deliveries) == ("out of memory again", 2)


async def test_a_final_failure_is_dead_at_once(run: StreamsRun) -> None:
    learner, generator, reward = await run.learner(), run.worker(), run.worker("reward")
    await learner.issue([make_task(3, evaluation_id="held-out")])
    await pass_on(generator)
    [group] = await reward.take(1)
    await reward.fail(group, "the score is NaN", final=True)
    [letter] = await collected(learner)
    dead = letter.record
    assert (dead.stream, dead.ordinal, dead.reason) == ("rollouts", 3, "the score is NaN")
    assert (dead.kind, dead.evaluation_id) == (samples.TASK_KIND_EVALUATION, "held-out")
    assert samples.Rollout.FromString(dead.payload) == group.record
    await learner.settle([letter], [])
    assert await learner.issue([make_task(3, evaluation_id="held-out")]) == 1


async def test_a_failure_of_somebody_elses_entry_changes_nothing(run: StreamsRun) -> None:
    learner, slow, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(1))
    [robbed] = await slow.take(1)
    await run.idle()
    [claimed] = await peer.take(1)
    await slow.fail(robbed, "too late", final=True)
    assert await peer.hand_off(claimed, make_result(claimed))
    assert await run.entries(Stream.DEAD) == []


@pytest.mark.parametrize(
    "payload",
    [b"\xff\xff\xff", b"", samples.PromptTask(k=1, seeds=[1]).SerializeToString()],
    ids=["no protobuf", "empty", "kind unspecified"],
)
async def test_a_malformed_record_is_dead_at_once(run: StreamsRun, payload: bytes) -> None:
    learner, worker = await run.learner(), run.worker()
    await run.add(Stream.PROMPTS, {b"p": payload, b"o": b"4", b"a": b"0", b"k": b"1"})
    await learner.issue([make_task(5)])
    assert ordinals(await worker.take(10)) == [5]
    [letter] = await collected(learner)
    assert letter.record.ordinal == 4
    assert "malformed record: expected" in letter.record.reason
    assert letter.record.payload == payload


async def test_a_malformed_score_reaches_the_learner_as_a_dead_letter(run: StreamsRun) -> None:
    learner = await run.learner()
    scores = [samples.CompletionScore(total=float("nan"))] * 2
    scored = samples.ScoredRollout(scores=scores).SerializeToString()
    payload = make_rollout(make_task(6)).SerializeToString()
    await run.add(Stream.SCORED, {b"p": payload, b"s": scored, b"o": b"6", b"a": b"0", b"k": b"1"})
    [letter] = await until(lambda: collected(learner), "the dead letter")
    assert (letter.stream, letter.record.stream, letter.record.ordinal) == ("dead", "scored", 6)
    assert "finite scores" in letter.record.reason
    assert await run.entries(Stream.SCORED) == []


async def test_nobody_holds_an_entry_for_ever(run: StreamsRun) -> None:
    run.settings = run.settings.model_copy(update={"max_hold_seconds": 0.01})
    learner, stuck = await run.learner(), run.worker()
    await learner.issue(make_tasks(1))
    [held] = await stuck.take(1)
    await asyncio.sleep(0.02)
    assert await stuck.beat([held]) == {held.key}
    assert await stuck.take(1, wait_seconds=0.0) == []
    await run.idle()
    # Its worker may get it again, and the delivery counts.
    [again] = await stuck.take(1)
    assert (again.key, again.deliveries) == (held.key, 2)


async def test_an_older_learner_can_change_nothing(run: StreamsRun) -> None:
    old = await run.learner(term=3, name="old")
    await old.issue(make_tasks(2))
    await pass_on(run.worker())
    await pass_on(run.worker("reward"))
    [first, _] = await collected(old)
    new = await run.learner(term=5, name="new")
    for change in (
        old.issue([make_task(9)]),
        old.collect(wait_seconds=0.0),
        old.settle([first], [0]),
        old.retire(first, make_task(0, attempt=1)),
        old.finish(),
        old.begin_term(4),
        run.visitor("third").begin_term(5),
    ):
        with pytest.raises(Fenced, match="5"):
            await change
    await new.begin_term(5)
    assert sorted(await new.in_flight()) == [0, 1]
    assert len(await run.entries(Stream.SCORED)) == 2
    assert len(await old.backlog()) == 5


async def test_a_new_term_forgets_the_evaluations_of_the_last_one(run: StreamsRun) -> None:
    old, generator, reward = await run.learner(term=1), run.worker(), run.worker("reward")
    await old.issue([make_task(i, evaluation_id="e") for i in range(4)])
    first, held, *_ = await generator.take(2)
    await generator.hand_off(first, make_result(first))
    await old.issue([make_task(7)])
    new = await run.learner(term=2)
    assert await run.entries(Stream.EVALUATIONS) == []
    assert await generator.beat([held]) == {held.key}
    assert not await generator.hand_off(held, make_result(held))
    await new.issue([make_task(3, evaluation_id="e")])
    await new.begin_term(2)  # its reply got lost: nothing of its own term goes
    assert ordinals(await pass_on(generator)) == [3, 7]
    assert ordinals(await pass_on(reward)) == [0, 3, 7]


async def test_a_new_term_first_collects_what_the_last_one_had_not_settled(run: StreamsRun) -> None:
    old, generator, reward = await run.learner(term=1), run.worker(), run.worker("reward")
    await old.issue(make_tasks(4))
    dead = await generator.take(1)
    await generator.fail(dead[0], "bad", final=True)
    await pass_on(generator)
    await pass_on(reward)
    held = await collected(old)
    assert sorted(ordinals(held)) == [0, 1, 2, 3]
    await old.settle([d for d in held if d.stream is Stream.SCORED][:1], [1])
    await old.issue([make_task(4)])
    await pass_on(generator)
    await pass_on(reward)

    new = await run.learner(term=2)
    first = await new.collect(limit=2, wait_seconds=0.0)
    rest = await collected(new)
    assert sorted(ordinals(first + rest)) == [0, 2, 3, 4]
    assert ordinals(first + rest)[-1] == 4
    assert await collected(new) == []
    await new.settle(first + rest, [0, 2, 3, 4])
    assert await new.in_flight() == {}
    assert await run.entries(Stream.SCORED) == []


async def test_a_retired_group_makes_way_for_the_next_attempt(run: StreamsRun) -> None:
    learner, generator = await run.learner(), run.worker()
    await learner.issue(make_tasks(2))
    await pass_on(generator)
    await pass_on(run.worker("reward"))
    [first, second] = await collected(learner)
    for _ in range(2):  # doing it again changes nothing
        await learner.retire(first, make_task(0, attempt=1))
    assert await run.attempts(Stream.SCORED) == [(1, 0)]
    assert await run.attempts(Stream.PROMPTS) == [(0, 1)]
    assert (await learner.in_flight())[0].attempt == 1
    await learner.settle([second], [1])
    assert ordinals(await pass_on(generator)) == [0]


async def test_an_emptied_server_can_be_issued_to_again(run: StreamsRun) -> None:
    learner, generator, reward = await run.learner(), run.worker(), run.worker("reward")
    await learner.issue(make_tasks(3))
    held = await generator.take(2)
    await run.empty()
    assert await generator.beat(held) == {delivery.key for delivery in held}
    assert not await generator.hand_off(held[0], make_result(held[0]))
    assert await generator.take(1, wait_seconds=0.0) == []
    if isinstance(run.server, str):
        with pytest.raises(ServiceUnavailable, match="was emptied"):
            await collected(learner)
    assert await collected(learner) == []
    assert await learner.in_flight() == {}
    assert await learner.issue(make_tasks(3, attempt=1)) == 3
    assert sorted(ordinals(await pass_on(generator))) == [0, 1, 2]
    await pass_on(reward)
    assert len(await collected(learner)) == 3


async def test_workers_are_seen_until_they_leave_or_die(run: StreamsRun) -> None:
    learner, worker, other = await run.learner(), run.worker(name="g"), run.worker("reward")
    await learner.issue(make_tasks(2))
    await worker.announce("host:5", {"version": "7"})
    await other.announce("host:6", {})
    held = await worker.take(1)
    members = {member.role: member for member in await run.visitor().members()}
    found = members["generator"]
    assert (found.member_id, found.address, found.pending) == ("g", "host:5", 1)
    assert found.info == {"version": "7"}
    assert members["reward"].address == "host:6"
    await other.leave()
    assert [member.role for member in await learner.members()] == ["generator"]
    await run.idle()
    assert await learner.members() == []
    await worker.beat(held)
    assert [member.address for member in await learner.members()] == ["host:5"]


async def test_workers_learn_that_the_run_is_finished(run: StreamsRun) -> None:
    learner, worker = await run.learner(term=1), run.worker()
    assert not await worker.finished()
    await learner.finish()
    assert await worker.finished()
    await (await run.learner(term=2)).in_flight()
    assert not await worker.finished()


async def test_without_a_term_nothing_can_be_changed(run: StreamsRun) -> None:
    visitor = run.visitor()
    await visitor.prepare(needed_bytes=0)
    with pytest.raises(StreamError, match="begin_term"):
        await visitor.issue(make_tasks(1))
    assert [b.entries for b in await visitor.backlog()] == [0, 0, 0, 0, 0]


async def test_taking_nothing_is_no_error(run: StreamsRun) -> None:
    learner, worker = await run.learner(), run.worker()
    await learner.issue(make_tasks(1))
    assert await worker.take(0, wait_seconds=0.0) == []
    assert await worker.beat([]) == set()
    await worker.hand_back([])
    await learner.settle([], [])
