"""Slow and broken links: weights that are cut anywhere (W1), a Redis that takes its time (R7)."""

import asyncio

import pytest

from offbeat.local.redis_server import MIB as REDIS_MIB
from offbeat.local.redis_server import RedisServer
from tests.harness.checkpoints import MIB, client_of, content, publish, serving, tensors
from tests.harness.proxy import Proxy
from tests.harness.streams import StreamsRun, make_result, make_tasks

CHUNK = MIB


async def test_a_fetch_survives_a_cut_at_every_border_and_inside_every_chunk(tmp_path):
    """W1: as many cuts as there are places, each in a fetch of its own: no torn load."""
    weights = tensors(3 * MIB + 1234)
    places = [at for border in range(4) for at in (border * CHUNK, border * CHUNK + CHUNK // 2)]
    places += [border * CHUNK + off for border in (1, 2, 3) for off in (-1, 1)]
    torn = 0
    async with serving(tmp_path / "store") as service:
        async with client_of(service.address) as near:
            await publish(near, weights)
        async with Proxy(service.address) as proxy:
            for place in places:
                proxy.cut_after(place)
                async with client_of(proxy.address, deltas=False, same_host=False) as far:
                    staged = await far.stage(tmp_path / "stage", deadline_seconds=60.0)
                torn += staged.path.read_bytes() != content(weights)
                staged.discard()
            assert proxy.cuts >= len(places) - 1  # the last one lies behind the last byte
    assert torn == 0


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path / "redis", max_memory_bytes=64 * REDIS_MIB) as started:
        yield started


async def test_a_slow_link_robs_nobody(server):
    """R7: a round trip takes a tenth of the idle time (by default: 3 s), work of several idle times is not robbed."""
    near = StreamsRun(server.url, min_idle_seconds=2.0, beat_seconds=0.3)
    learner = await near.learner()
    async with Proxy(server.url.split("/")[2]) as proxy:
        far = StreamsRun(f"redis://{proxy.address}/0", min_idle_seconds=2.0, beat_seconds=0.3)
        far.run_id, far.keys = near.run_id, near.keys
        slow, peer = far.worker("generator", "slow"), near.worker("generator", "peer")
        await learner.issue(make_tasks(2))
        proxy.delay_seconds = 0.1
        held, other = await _two(slow)
        robbed = await _work(slow, peer, [held, other], seconds=5.0)
        assert robbed == []
        assert await slow.hand_off(held, make_result(held))
        assert await slow.hand_off(other, make_result(other))
        proxy.delay_seconds = 0.0
        await far.close()
    await near.close()


async def _two(worker):
    """Both entries, however the fair share cuts them."""
    found = []
    while len(found) < 2:
        found += await worker.take(2 - len(found), wait_seconds=5.0)
    return found


async def _work(worker, peer, held, *, seconds):
    """Beats as a worker does while a peer looks for work; what the peer gets."""
    got = []

    async def look() -> None:
        while True:
            got.extend(await peer.take(10, wait_seconds=0.5))

    looking = asyncio.create_task(look())
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        assert await worker.beat(held) == set()
        await asyncio.sleep(0.3)
    looking.cancel()
    return got


async def test_a_wait_that_is_longer_than_any_single_read_is_quiet(server, caplog):
    """R7: nothing comes for longer than a blocking read may take; that is no error."""
    run = StreamsRun(server.url)
    learner = await run.learner()
    worker = run.worker()
    found, taken = await asyncio.gather(
        learner.collect(wait_seconds=6.0), worker.take(1, wait_seconds=6.0)
    )
    assert (found, taken) == ([], [])
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]
    await run.close()
