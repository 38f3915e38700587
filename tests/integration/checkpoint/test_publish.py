"""What the checkpoint service takes from a learner: numbers and terms, broken uploads, crashes, nonsense."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from offbeat.config.service import RedisSettings
from offbeat.errors import Fenced
from offbeat.failpoints import VARIABLE
from offbeat.local.redis_server import RedisServer
from offbeat.streams.redis import RedisLearnerStreams, RedisVersionMark
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient
from services.checkpoint.service import SKIPPED
from services.checkpoint.store import COMMIT_POINTS
from tests.harness.checkpoints import (
    MIB,
    RUN,
    Running,
    a_process,
    client_of,
    content,
    files_at_most,
    publish,
    publish_chunk,
    publish_header,
    refusal,
    serving,
    staged_bytes,
    tensors,
    until,
)
from tests.harness.proxy import Proxy
from tests.harness.service import Service

INVALID = grpc.StatusCode.INVALID_ARGUMENT


# ---- numbers and terms


async def test_an_older_term_is_refused(client: CheckpointClient) -> None:
    first = await client.acquire_learner("learner-1")
    assert (first.term, first.latest_version) == (1, 0)
    await publish(client, tensors(99), term=1)
    second = await client.acquire_learner("learner-2")
    assert (second.term, second.latest_version) == (2, 1)
    with pytest.raises(Fenced, match="term 1 is over, the current one is 2"):
        await publish(client, tensors(98), term=1, step=2)
    assert (await publish(client, tensors(97), term=2, step=2)).manifest.version == 2


async def test_a_learner_that_was_overtaken_during_its_upload_changes_nothing(
    service: Running, client: CheckpointClient
) -> None:
    await client.acquire_learner("learner-1")
    async with Proxy(service.address) as proxy, client_of(proxy.address) as paused:
        upload = asyncio.create_task(publish(paused, tensors(20 * MIB), term=1))
        await until(lambda: proxy.bytes["up"] > 2 * MIB)
        proxy.stall()
        await client.acquire_learner("learner-2")
        proxy.resume()
        with pytest.raises(Fenced):
            await upload
    assert await client.list_versions() == []


async def test_terms_and_numbers_respect_what_the_learner_remembers(
    client: CheckpointClient,
) -> None:
    """The service has no memory of its own here, so versions that the learner never heard of may be out there, too."""
    response = await client.acquire_learner("learner", term_floor=8, version_floor=17)
    assert response.term == 9
    assert (await publish(client, tensors(99), term=9)).manifest.version == 17 + SKIPPED + 1
    await client.acquire_learner("learner", term_floor=9, version_floor=17)
    assert (await publish(client, tensors(99), term=10)).manifest.version == 17 + SKIPPED + 2


async def test_terms_outlive_the_service(tmp_path: Path) -> None:
    for term in (1, 2):
        async with serving(tmp_path / "store") as service, client_of(service.address) as client:
            assert (await client.acquire_learner("learner")).term == term
    async with serving(tmp_path / "store") as service, client_of(service.address) as client:
        with pytest.raises(Fenced):
            await publish(client, tensors(99), term=1)


async def test_a_learner_goes_on_with_a_service_that_lost_its_disk(tmp_path: Path) -> None:
    async with serving(tmp_path / "empty") as service, client_of(service.address) as client:
        await publish(client, tensors(99), term=5)
        with pytest.raises(Fenced):
            await publish(client, tensors(98), term=4)
        assert (await client.acquire_learner("learner")).term == 6


async def test_the_same_publish_is_stored_once(client: CheckpointClient) -> None:
    first = await publish(client, tensors(3 * MIB), term=1)
    again = await publish(client, tensors(3 * MIB), term=1)
    assert again.existed
    assert again.manifest == first.manifest
    both = await asyncio.gather(*(publish(client, tensors(MIB, 1), step=2) for _ in range(2)))
    assert sorted(response.existed for response in both) == [False, True]
    assert [v.version for v in await client.list_versions()] == [1, 2]
    assert not (await publish(client, tensors(3 * MIB), term=2)).existed


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


async def test_numbers_and_terms_go_on_above_those_in_redis(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    mark = RedisVersionMark(redis_server.url, RUN, patience_seconds=0.1)
    learner = RedisLearnerStreams(redis_server.url, RUN, "learner", RedisSettings())
    await mark.raise_version_high_water(17)
    await learner.begin_term(5)
    async with (
        serving(tmp_path / "empty", mark=mark) as service,
        client_of(service.address) as client,
    ):
        assert (await client.acquire_learner("learner")).term == 6
        assert (await publish(client, tensors(99), term=6)).manifest.version == 18
        assert await mark.version_high_water() == 18
        redis_server.stop()
        code, text = await refusal(service, [publish_header(term=6)])
        assert code == grpc.StatusCode.UNAVAILABLE
        assert f"Redis at {redis_server.url}" in text
        assert [v.version for v in await client.list_versions()] == [18]
    await learner.close()
    await mark.close()


# ---- broken connections, crashes, full disks


async def test_a_publish_that_broke_is_made_again(
    service: Running, client: CheckpointClient, tmp_path: Path
) -> None:
    weights = tensors(4 * MIB)
    async with Proxy(service.address) as proxy, client_of(proxy.address) as far:
        upload = asyncio.create_task(publish(far, weights))
        for cuts, count in enumerate((100, MIB, 2 * MIB + 99), start=1):
            proxy.cut_after(count, "up")
            await until(lambda cuts=cuts: proxy.cuts == cuts)
        assert (await upload).manifest.version == 1
    assert await staged_bytes(client, tmp_path / "stage") == content(weights)
    await until(lambda: not list((tmp_path / "store" / "incoming").iterdir()))


async def test_a_publish_outlives_a_kill_of_the_service(process: Service, tmp_path: Path) -> None:
    weights = tensors(12 * MIB)
    process.start()
    async with Proxy(await process.ready()) as proxy, client_of(proxy.address) as learner:
        proxy.delay_seconds = 0.001
        upload = asyncio.create_task(publish(learner, weights))
        await until(lambda: proxy.bytes["up"] > 3 * MIB)
        process.kill()
        proxy.delay_seconds = 0.0
        process.start()
        proxy.target = await process.ready()
        assert (await upload).manifest.version == 1
        assert await staged_bytes(learner, tmp_path / "stage") == content(weights)


@pytest.mark.parametrize("point", COMMIT_POINTS)
async def test_a_crash_at_any_point_of_a_publish_leaves_the_old_or_the_new(
    tmp_path: Path, point: str
) -> None:
    old, new = tensors(MIB, 1), tensors(MIB, 2)
    async with serving(tmp_path / "store") as service, client_of(service.address) as client:
        await publish(client, old, step=1)
    with a_process(tmp_path, **{VARIABLE: point}) as process:
        process.start()
        async with Proxy(await process.ready()) as proxy, client_of(proxy.address) as learner:
            upload = asyncio.create_task(publish(learner, new, step=2))
            await process.ended()
            async with serving(tmp_path / "store") as service:
                async with client_of(service.address) as client:
                    before = await staged_bytes(client, tmp_path / "stage")
                visible = point in {"publish.manifest_renamed", "publish.committed"}
                assert before == content(new if visible else old)
                burnt = service.store.last_number
                proxy.target = service.address
                response = await upload
                assert response.existed == visible
                assert response.manifest.version == (burnt if visible else burnt + 1)
                assert await staged_bytes(learner, tmp_path / "stage") == content(new)
                assert [v.step for v in await learner.list_versions()] == [1, 2]


@pytest.mark.parametrize("room", ["weights", "counters", "manifest"])
async def test_a_full_disk_refuses_a_publish_and_keeps_nothing(
    service: Running, client: CheckpointClient, tmp_path: Path, room: str
) -> None:
    many = [(f"t{index}", "uint8", (1,), b"x") for index in range(100)]
    limit = {"weights": 50, "counters": 110, "manifest": 1000}[room]
    with files_at_most(limit):
        code, text = await refusal(service, [publish_header(many), publish_chunk(0, b"x" * 100)])
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "File too large" in text
    assert "free some" in text
    store = tmp_path / "store"
    await until(lambda: not list((store / "incoming").iterdir()))
    assert {path.name for path in store.iterdir()} <= {
        "lock", "incoming", "counters.json", "counters.partial",
    }  # fmt: skip
    assert not (await publish(client, tensors(99))).existed


# ---- malformed requests


@pytest.mark.parametrize(
    ("requests", "code", "text"),
    [
        ([], INVALID, "expected a header"),
        ([publish_chunk(0, b"abcd")], INVALID, "expected a header"),
        ([publish_header(), publish_header()], INVALID, "expected a chunk"),
        ([publish_header(), checkpoint.PublishRequest()], INVALID, "expected a chunk"),
        (
            [publish_header(), publish_chunk(1, b"bcd")],
            INVALID,
            "expected a chunk at byte 0, found one at 1",
        ),
        (
            [publish_header(), publish_chunk(0, b"ab"), publish_chunk(0, b"ab")],
            INVALID,
            "at byte 2, found one at 0",
        ),
        ([publish_header(), publish_chunk(0, b"abcde")], INVALID, "more bytes than the 4"),
        (
            [publish_header(), publish_chunk(0, bytes(2 * MIB + 1))],
            INVALID,
            "at most 2097152 are accepted",
        ),
        ([publish_header(), publish_chunk(0, b"abc")], INVALID, "ended at byte 3 of 4"),
        (
            [publish_header(), publish_chunk(0, b"abcD")],
            grpc.StatusCode.DATA_LOSS,
            "tensor t does not match",
        ),
        ([publish_header(term=0)], INVALID, "term is 0"),
        ([publish_header(kind=0)], INVALID, "expected FULL"),
        ([publish_header(kind=77)], INVALID, "expected FULL"),
        ([publish_header(encoding=3)], INVALID, "encoding 3 is not accepted"),
        ([publish_header(shard_index=2, shard_count=2)], INVALID, "part 2 of 2"),
        ([publish_header(total_bytes=5)], INVALID, "total_bytes is 5"),
        ([publish_header(run_id="x")], grpc.StatusCode.FAILED_PRECONDITION, "not of 'x'"),
    ],
)
async def test_a_malformed_publish_is_refused_and_leaves_nothing(
    service: Running,
    tmp_path: Path,
    requests: list[checkpoint.PublishRequest],
    code: grpc.StatusCode,
    text: str,
) -> None:
    found, details = await refusal(service, requests)
    assert found == code
    assert text in details
    assert not list((tmp_path / "store" / "incoming").iterdir())
    assert service.store.versions() == []
