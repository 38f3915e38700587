"""The sample streams where only a real server can tell: lost replies, outages, memory, refusals at the start."""

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path

import pytest
from redis.asyncio import Redis

from offbeat.config.service import RedisSettings
from offbeat.errors import BacklogFull, ServiceUnavailable, StreamError
from offbeat.local.redis_server import RedisServer
from offbeat.streams.base import Stream
from offbeat.streams.link import connect
from offbeat.streams.redis import (
    RedisLearnerStreams,
    RedisVersionMark,
    RedisWorkerStreams,
    wait_for_redis,
)
from tests.harness.proxy import Proxy
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


@pytest.fixture
async def proxy(redis_run: StreamsRun) -> AsyncIterator[Proxy]:
    """In front of the server of `redis_run`."""
    assert isinstance(redis_run.server, str)
    address = redis_run.server.removeprefix("redis://").removesuffix("/0")
    async with Proxy(address) as running:
        yield running


def through(run: StreamsRun, proxy: Proxy) -> StreamsRun:
    """The same run as somebody sees it whose connections go through the proxy."""
    other = StreamsRun(f"redis://{proxy.address}/0")
    other.run_id, other.keys = run.run_id, run.keys
    return other


# --- lost replies --------------------------------------------------------------------------------------------------


async def test_a_lost_reply_of_take_loses_no_entry(redis_run: StreamsRun, proxy: Proxy) -> None:
    learner, far = await redis_run.learner(), through(redis_run, proxy)
    worker = far.worker()
    assert await worker.take(1, wait_seconds=0.0) == []
    await learner.issue(make_tasks(5))
    proxy.cut_after(0)
    first = await worker.take(3)
    rest = await worker.take(10)
    assert proxy.cuts == 1
    assert sorted(ordinals(first + rest)) == [0, 1, 2, 3, 4]
    assert {delivery.deliveries for delivery in first + rest} == {1}
    assert await worker.beat(first + rest) == set()
    await far.close()


async def test_a_lost_reply_keeps_what_must_run_alone_alone(
    redis_run: StreamsRun, proxy: Proxy
) -> None:
    learner, far = await redis_run.learner(), through(redis_run, proxy)
    worker = far.worker()
    await learner.issue(make_tasks(2))
    first, second = await worker.take(2)
    await worker.fail(first, "failed", final=False)
    await worker.hand_off(second, make_result(second))
    proxy.cut_after(0)
    [alone] = await worker.take(2)
    assert (alone.key, alone.alone) == (first.key, True)
    await far.close()


async def test_a_lost_reply_of_hand_off_makes_no_second_result(
    redis_run: StreamsRun, proxy: Proxy
) -> None:
    learner, far = await redis_run.learner(), through(redis_run, proxy)
    worker = far.worker()
    await learner.issue(make_tasks(1))
    [held] = await worker.take(1)
    proxy.cut_after(0)
    assert not await worker.hand_off(held, make_result(held))
    assert await redis_run.attempts(Stream.ROLLOUTS) == [(0, 0)]
    assert await redis_run.entries(Stream.PROMPTS) == []
    await far.close()


async def test_lost_replies_of_the_learner_change_nothing(
    redis_run: StreamsRun, proxy: Proxy
) -> None:
    far = through(redis_run, proxy)
    learner = await far.learner()
    await learner.in_flight()
    proxy.cut_after(0)
    await learner.issue(make_tasks(3))
    assert await redis_run.attempts(Stream.PROMPTS) == [(0, 0), (1, 0), (2, 0)]
    await pass_on(redis_run.worker())
    await pass_on(redis_run.worker("reward"))
    with pytest.raises(ServiceUnavailable, match="was away"):
        await learner.collect()
    proxy.cut_after(0)
    with pytest.raises(ServiceUnavailable, match=r"scored groups.*is it running"):
        await learner.collect()
    held = await learner.collect()
    assert ordinals(held) == [0, 1, 2]
    proxy.cut_after(0)
    await learner.settle(held[:1], [0])
    proxy.cut_after(0)
    await learner.retire(held[1], make_task(1, attempt=1))
    assert await redis_run.attempts(Stream.SCORED) == [(2, 0)]
    assert await redis_run.attempts(Stream.PROMPTS) == [(1, 1)]
    assert sorted(await learner.in_flight()) == [1, 2]
    assert proxy.cuts == 4
    await far.close()


async def test_a_cancelled_take_loses_no_entry(redis_run: StreamsRun, proxy: Proxy) -> None:
    learner, far = await redis_run.learner(), through(redis_run, proxy)
    worker = far.worker()
    assert await worker.take(1, wait_seconds=0.0) == []
    await learner.issue(make_tasks(2))
    proxy.delay_seconds = 0.5
    taking = asyncio.create_task(worker.take(10))

    async def delivered() -> bool:
        return (await learner.backlog())[0].pending == 2

    await until(delivered, "the delivery")
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    proxy.delay_seconds = 0.0
    assert ordinals(await worker.take(10)) == [0, 1]
    await far.close()


# --- outages -------------------------------------------------------------------------------------------------------


async def written(url: str) -> bool:
    """Whether the server has nothing in its memory that the append-only file lacks."""
    async with connect(url) as client:
        state = await client.info("persistence")
    return not (state["aof_buffer_length"] or state["aof_pending_bio_fsync"])


async def test_a_run_survives_a_crash_of_its_server(own_server: RedisServer) -> None:
    run = StreamsRun(own_server.url)
    learner, worker, reward = await run.learner(), run.worker(), run.worker("reward")
    await learner.issue(make_tasks(4))
    held = await worker.take(2)
    await worker.hand_off(held[0], make_result(held[0]))
    # What a dead process wrote is in the page cache; but on a busy disk a server puts a write off for a while.
    await until(lambda: written(own_server.url), "the append-only file to be written")
    own_server.kill()
    assert await worker.take(1, wait_seconds=0.05) == []
    handing_off = asyncio.create_task(worker.hand_off(held[1], make_result(held[1])))
    with pytest.raises(ServiceUnavailable, match="has not answered"):
        await learner.collect()
    own_server.start()
    assert await handing_off
    await until(lambda: pass_on(worker), "the rest of the tasks")
    assert await until(lambda: pass_on(reward), "the groups")

    async def all_scored() -> bool:
        await pass_on(reward)
        return len(await run.entries(Stream.SCORED)) == 4

    await until(all_scored, "the scored groups")
    assert len(await learner.collect()) == 4
    await run.close()


async def test_after_an_outage_nobody_is_robbed_before_it_could_beat(
    own_server: RedisServer,
) -> None:
    run = StreamsRun(own_server.url, beat_seconds=0.01)
    learner, worker, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(1))
    held = await worker.take(1)
    assert await peer.take(1, wait_seconds=0.0) == []
    own_server.kill()
    assert await peer.take(1, wait_seconds=0.05) == []
    assert await worker.beat(held) == set()
    own_server.start()
    await wait_for_redis(own_server.url, 20)
    await run.idle()
    assert await peer.take(1, wait_seconds=0.0) == []
    assert await worker.beat(held) == set()
    await run.close()


async def test_after_an_outage_and_one_more_idle_time_the_dead_are_claimed(
    own_server: RedisServer,
) -> None:
    run = StreamsRun(own_server.url, beat_seconds=0.01, min_idle_seconds=0.6)
    learner, dead, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(1))
    assert await until(lambda: dead.take(1), "the task")
    own_server.kill()
    assert await peer.take(1, wait_seconds=0.05) == []
    own_server.start()
    [claimed] = await until(lambda: peer.take(1), "the claim")
    assert claimed.deliveries == 2
    await run.close()


async def test_after_a_silence_of_all_nobody_is_taken_for_dead(redis_run: StreamsRun) -> None:
    """The server or the way to it was away, and nobody who could tell is left."""
    run = redis_run
    learner, worker = await run.learner(), run.worker()
    await learner.issue(make_tasks(1))
    held = await worker.take(1)
    await run.silence()
    newcomer = run.worker()
    assert await newcomer.take(1, wait_seconds=0.0) == []
    assert await worker.beat(held) == set()
    await run.idle()  # and now it is silent while others are not
    assert ordinals(await newcomer.take(1)) == [0]


async def test_a_frozen_server_makes_nobody_rob_anyone(own_server: RedisServer) -> None:
    """Commands that were sent to it are done when it wakes, long after they were sent: also those to claim."""
    run = StreamsRun(own_server.url, min_idle_seconds=0.6, beat_seconds=0.1)
    learner, worker, peer = await run.learner(), run.worker(), run.worker()
    await learner.issue(make_tasks(1))
    held = await worker.take(1)
    for _ in range(7):  # longer than the idle time, so that claims are allowed
        assert await peer.take(1, wait_seconds=0.1) == []
        assert await worker.beat(held) == set()
    taking = asyncio.create_task(peer.take(1, wait_seconds=1.2))
    assert own_server.process is not None
    own_server.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.9)
    own_server.process.send_signal(signal.SIGCONT)
    assert await worker.beat(held) == set()
    while not taking.done():
        assert await worker.beat(held) == set()
        await asyncio.sleep(0.1)
    assert await taking == []
    await run.close()


async def test_the_learner_hears_of_an_outage_that_another_call_sat_out(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """The server comes back as it was a while ago, as after a failover; its groups are there."""
    run = StreamsRun(own_server.url)
    learner, worker = await run.learner(), run.worker()
    await learner.issue(make_tasks(2))
    await until(lambda: written(own_server.url), "the append-only file to be written")
    older = shutil.copytree(own_server.log.parent, tmp_path / "older")
    await learner.issue([make_task(2)])
    held = await worker.take(1)
    own_server.kill()
    looking = asyncio.create_task(learner.members())
    await asyncio.sleep(0.1)
    shutil.rmtree(own_server.log.parent)
    shutil.copytree(older, own_server.log.parent)
    own_server.start()
    await looking
    with pytest.raises(ServiceUnavailable, match="was away"):
        await learner.collect()
    assert sorted(await learner.in_flight()) == [0, 1]
    assert await learner.issue([make_task(2, attempt=1)]) == 1
    assert await worker.beat(held) == {held[0].key}
    assert not await worker.hand_off(held[0], make_result(held[0]))
    assert ordinals(await pass_on(worker)) == [0, 1, 2]
    await run.close()


async def test_what_is_in_flight_is_really_there(redis_run: StreamsRun) -> None:
    run = redis_run
    learner, worker, reward = await run.learner(), run.worker(), run.worker("reward")
    await learner.issue(make_tasks(6))
    for delivery in (await worker.take(6))[:4]:
        if delivery.record.ordinal == 0:
            await worker.fail(delivery, "bad", final=True)
        else:
            await worker.hand_off(delivery, make_result(delivery))
    await pass_on(reward, limit=1)
    assert sorted(await learner.in_flight()) == [0, 1, 2, 3, 4, 5]
    letter, scored = sorted(await learner.collect(), key=lambda d: d.stream)
    assert sorted(await learner.in_flight()) == [0, 1, 2, 3, 4, 5]
    await learner.settle([letter, scored], [])
    for entry_id, _ in await run.client.xrange(run.keys.stream(Stream.PROMPTS)):
        await run.client.xdel(run.keys.stream(Stream.PROMPTS), entry_id)
    assert sorted(await learner.in_flight()) == [2, 3]


async def test_an_outage_ends_the_process_after_its_limit(own_server: RedisServer) -> None:
    run = StreamsRun(own_server.url, outage_seconds=0.2, beat_seconds=0.05)
    learner, worker = await run.learner(), run.worker()
    await learner.issue(make_tasks(1))
    held = await worker.take(1)
    own_server.kill()
    with pytest.raises(ServiceUnavailable, match=own_server.url):
        await worker.hand_off(held[0], make_result(held[0]))
    with pytest.raises(ServiceUnavailable, match=r"issuing|groups"):
        await learner.issue(make_tasks(2))

    async def gives_up() -> bool:
        try:
            assert await worker.beat(held) == set()
            assert await worker.take(1, wait_seconds=0.0) == []
        except ServiceUnavailable:
            return True
        return False

    await until(gives_up, "the limit")
    with pytest.raises(ServiceUnavailable, match="new entries"):
        await worker.take(1, wait_seconds=0.0)
    await run.close()


async def test_waiting_for_a_server_that_starts_later(own_server: RedisServer) -> None:
    own_server.stop()
    with pytest.raises(ServiceUnavailable, match=f"{own_server.url}.*redis.url right"):
        await wait_for_redis(own_server.url, 0.2)
    waiting = asyncio.create_task(wait_for_redis(own_server.url, 20))
    await asyncio.sleep(0.1)
    own_server.start()
    await waiting


async def test_a_worker_waits_for_the_learners_first_start(redis_run: StreamsRun) -> None:
    worker, reward = redis_run.worker(), redis_run.worker("reward")
    assert await worker.take(1, wait_seconds=0.0) == []
    assert await reward.take(1, wait_seconds=0.0) == []
    await worker.announce("host:1", {})
    assert await worker.beat([]) == set()
    taking = asyncio.create_task(worker.take(1, wait_seconds=60))
    learner = await redis_run.learner()
    await learner.issue(make_tasks(1))
    assert ordinals(await taking) == [0]
    await redis_run.worker().leave()


# --- memory --------------------------------------------------------------------------------------------------------


async def test_a_full_server_refuses_new_tasks_and_nothing_else(own_server: RedisServer) -> None:
    run = StreamsRun(own_server.url)
    learner, worker, reward = await run.learner(), run.worker(), run.worker("reward")
    await learner.issue(make_tasks(6))
    await pass_on(worker, limit=1)
    async with Redis.from_url(own_server.url) as client:
        await client.config_set("maxmemory", 1)
        with pytest.raises(BacklogFull, match="maxmemory"):
            await learner.issue([make_task(9)])
        assert 9 not in await learner.in_flight()
        await worker.announce("host:1", {"version": "1"})
        held = await worker.take(5)
        assert await worker.beat(held) == set()
        await worker.fail(held[0], "bad", final=True)
        await worker.fail(held[1], "bad", final=False)
        await worker.hand_back(held[2:3])
        for delivery in held[3:]:
            assert await worker.hand_off(delivery, make_rollout(delivery.record))
        assert len(await pass_on(reward)) == 3
        newer = run.visitor()
        await newer.begin_term(2)
        collected = await newer.collect()
        assert len(collected) == 4
        await newer.retire(
            collected[0], make_task(collected[0].record.rollout.task.ordinal, attempt=1)
        )
        await newer.settle(collected[1:], ordinals(collected[1:]))
        await newer.finish()
        await worker.leave()
        await client.config_set("maxmemory", 0)
    assert await newer.issue([make_task(9)]) == 1
    await run.close()


def test_only_issuing_may_be_refused_for_memory() -> None:
    folder = resources.files("offbeat.streams") / "scripts"
    flags = {
        path.name: path.read_text().partition("\n")[0]
        for path in folder.iterdir()
        if path.name != "common.lua"
    }
    assert flags.pop("issue.lua") == "#!lua"
    assert set(flags.values()) == {"#!lua flags=allow-oom"}


# --- the start -----------------------------------------------------------------------------------------------------


async def configured(server: RedisServer, **options: object) -> RedisLearnerStreams:
    async with Redis.from_url(server.url) as client:
        for name, value in options.items():
            await client.config_set(name.replace("_", "-"), value)
    learner = StreamsRun(server.url).visitor()
    assert isinstance(learner, RedisLearnerStreams)
    return learner


async def test_a_server_that_may_evict_is_refused(own_server: RedisServer) -> None:
    for policy in ("allkeys-lru", "allkeys-random"):
        learner = await configured(own_server, maxmemory_policy=policy)
        with pytest.raises(
            StreamError, match=rf"expected .*noeviction.*found {policy}.*CONFIG SET"
        ):
            await learner.prepare(needed_bytes=0)
        await learner.close()
    learner = await configured(own_server, maxmemory_policy="volatile-lru")
    await learner.prepare(needed_bytes=0)
    await learner.close()


async def test_too_little_memory_is_refused(own_server: RedisServer) -> None:
    learner = await configured(own_server, maxmemory=64 * 1024**2)
    with pytest.raises(
        StreamError, match=r"expected 128 MiB.*found \d+ MiB free of maxmemory 64 MiB"
    ):
        await learner.prepare(needed_bytes=128 * 1024**2)
    await learner.prepare(needed_bytes=16 * 1024**2)
    await learner.close()


async def test_a_resumed_run_needs_its_memory_only_once(own_server: RedisServer) -> None:
    run = StreamsRun(own_server.url)
    learner = await run.learner()
    for _ in range(8):
        await run.add(Stream.SCORED, {b"p": bytes(2 * 1024**2)})
    async with Redis.from_url(own_server.url) as client:
        await client.config_set("maxmemory", 30 * 1024**2)
    await learner.prepare(needed_bytes=20 * 1024**2)
    await run.close()


async def test_a_replica_is_refused(own_server: RedisServer) -> None:
    learner = await configured(own_server)
    async with Redis.from_url(own_server.url) as client:
        await client.replicaof("127.0.0.1", "1")
    with pytest.raises(StreamError, match="expected a primary, found a slave"):
        await learner.prepare(needed_bytes=0)
    await learner.close()


async def test_a_server_without_persistence_is_a_warning(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    learner = await configured(own_server, appendonly="no")
    with caplog.at_level(logging.WARNING):
        await learner.prepare(needed_bytes=0)
    assert "append-only" in caplog.text
    await learner.close()


async def test_a_wrong_password_is_an_error_that_does_not_show_it(own_server: RedisServer) -> None:
    async with Redis.from_url(own_server.url) as client:
        await client.config_set("requirepass", "right")
    url = own_server.url.replace("redis://", "redis://:wrong@")
    with pytest.raises(StreamError, match="refuses this client") as caught:
        await wait_for_redis(url, 20)
    assert "wrong" not in str(caught.value).replace("wrong number", "")
    await wait_for_redis(url.replace("wrong", "right"), 20)


def test_a_url_of_another_kind_is_an_error() -> None:
    with pytest.raises(StreamError, match="expected redis://HOST:PORT/DB, found http://:0"):
        RedisWorkerStreams("http://:0", "run", "generator", "worker", RedisSettings())


# --- the rest ------------------------------------------------------------------------------------------------------


async def test_all_keys_of_a_run_lie_in_one_slot(own_server: RedisServer) -> None:
    run = StreamsRun(own_server.url)
    learner, worker = await run.learner(), run.worker()
    await learner.issue(make_tasks(3))
    await worker.announce("host:1", {})
    first, *_ = await worker.take(3)
    await worker.fail(first, "bad", final=False)
    await learner.finish()
    mark = RedisVersionMark(own_server.url, run.run_id)
    await mark.raise_version_high_water(1)
    await mark.close()
    async with Redis.from_url(own_server.url) as client:
        keys = [key.decode() async for key in client.scan_iter()]
    assert len(keys) >= 11
    assert all(key.startswith(f"offbeat:{{{run.run_id}}}:") for key in keys)
    await run.close()


async def test_the_version_mark_never_goes_down(redis_run: StreamsRun) -> None:
    assert isinstance(redis_run.server, str)
    mark = RedisVersionMark(redis_run.server, redis_run.run_id)
    assert await mark.version_high_water() == 0
    assert await mark.raise_version_high_water(5) == 5
    assert await mark.raise_version_high_water(3) == 5
    raised = await asyncio.gather(*(mark.raise_version_high_water(n) for n in range(20)))
    assert max(raised) == 19
    assert await mark.version_high_water() == 19
    await mark.close()


async def consumers(run: StreamsRun) -> set[str]:
    async with Redis.from_url(run.server) as client:
        rows = await client.xinfo_consumers(run.keys.stream(Stream.PROMPTS), "generator")
    return {row["name"].decode().partition(".")[0] for row in rows}


async def test_names_of_the_dead_go_once_they_hold_nothing(redis_run: StreamsRun) -> None:
    run = redis_run
    learner, peer = await run.learner(), run.worker(name="peer")
    await learner.issue(make_tasks(1))
    assert await run.worker(name="holding").take(1)
    assert await run.worker(name="idle").take(1, wait_seconds=0.0) == []
    for _ in range(2):
        await run.idle()
    await peer.beat([])
    assert "holding" in await consumers(run)
    assert "idle" not in await consumers(run)
    await pass_on(peer)
    await peer.beat([])
    assert await consumers(run) <= {"peer", "handed-back"}
    await learner.issue([make_task(1)])
    [held] = await peer.take(1)
    await peer.leave()
    assert "peer" in await consumers(run)
    await peer.hand_back([held])
    await peer.leave()
    assert "peer" not in await consumers(run)


async def test_a_new_entry_ends_the_wait_of_all(redis_run: StreamsRun) -> None:
    learner, worker = await redis_run.learner(), redis_run.worker()
    taking = asyncio.create_task(worker.take(1, wait_seconds=3600))
    collecting = asyncio.create_task(learner.collect(wait_seconds=3600))
    await asyncio.sleep(0.1)
    await learner.issue(make_tasks(1))
    [held] = await asyncio.wait_for(taking, 20)
    await worker.fail(held, "bad", final=True)
    assert len(await asyncio.wait_for(collecting, 20)) == 1


async def scripts_run(url: str) -> int:
    async with Redis.from_url(url) as client:
        stats = await client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])


async def test_waiting_does_not_burn_the_processor(own_server: RedisServer) -> None:
    run = StreamsRun(own_server.url)
    learner, worker = await run.learner(), run.worker()
    await learner.issue([make_task(0, min_version=7)])
    before, start = await scripts_run(own_server.url), time.monotonic()
    assert await worker.take(1, held_version=6, wait_seconds=1.0) == []
    looks = await scripts_run(own_server.url) - before
    assert looks <= 2 + 5 * (time.monotonic() - start)
    await run.close()


async def test_hand_offs_at_once_go_on_each_by_itself(redis_run: StreamsRun) -> None:
    """One script moves them all; an entry that a peer moved first is refused, the others go on."""
    learner, worker = await redis_run.learner(), redis_run.worker()
    await learner.issue(make_tasks(5))
    held = await worker.take(5)
    await worker.hand_off(held[2], make_result(held[2]))
    moved = await asyncio.gather(*(worker.hand_off(one, make_result(one)) for one in held))
    assert moved == [True, True, False, True, True]
    assert await redis_run.attempts(Stream.ROLLOUTS) == [(at, 0) for at in (2, 0, 1, 3, 4)]
    assert await redis_run.entries(Stream.PROMPTS) == []
