"""The checkpoint service over sockets: round trips, broken connections, crashes, fencing, damage."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
import yaml
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client import CollectorRegistry

from offbeat import rpc
from offbeat.config.service import RedisSettings
from offbeat.errors import Fenced, IntegrityError, ServiceUnavailable, WeightsError
from offbeat.failpoints import VARIABLE
from offbeat.local.redis_server import RedisServer
from offbeat.streams.redis import RedisLearnerStreams, RedisVersionMark
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.chunks import NoRoom
from offbeat.weights.client import CheckpointClient, VersionGone
from offbeat.weights.manifest import describe
from services.checkpoint.service import (
    SERVICE_NAME,
)
from services.checkpoint.store import COMMIT_POINTS
from tests.harness.checkpoints import (
    MIB,
    RUN,
    Running,
    Tensor,
    client_of,
    content,
    publish,
    serving,
    tensors,
    until,
)
from tests.harness.proxy import Direction, Proxy
from tests.harness.service import Service, health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# ---- what the tests stand on


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with serving(tmp_path / "store") as running:
        yield running


@pytest.fixture
async def client(service: Running) -> AsyncIterator[CheckpointClient]:
    async with client_of(service.address) as client:
        yield client


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Service]:
    with a_process(tmp_path) as process:
        yield process


def a_process(tmp_path: Path, **environment: str) -> Service:
    recipe = tmp_path / "recipe.yaml"
    tree = {
        "run": {"id": RUN, "directory": str(tmp_path / "runs")},
        "model": {"path": "/no/model"},
        "data": {"train": {"kind": "jsonl", "path": "no.jsonl"}},
        "sampling": {"max_tokens": 8},
        "schedule": {"steps": 1, "prompts_per_step": 1},
        "learner": {"loss": {"name": "online_dpo"}},
        "reward": {"functions": [{"name": "length"}]},
        "checkpoint": {"directory": str(tmp_path / "store")},
    }
    recipe.write_text(yaml.safe_dump(tree))
    folder = tmp_path / "runs" / RUN
    return Service("checkpoint", recipe, folder, environment=environment)


async def refusal(
    service: Running, requests: Sequence[checkpoint.PublishRequest]
) -> tuple[grpc.StatusCode, str]:
    """What the service answers to a publish that it does not take."""
    async with rpc.connect(service.address) as channel:
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Publish(iter(requests), timeout=60.0)
        return caught.value.code(), caught.value.details() or ""


async def staged_bytes(client: CheckpointClient, folder: Path, version: int = 0) -> bytes:
    weights = await client.stage(folder, version=version, deadline_seconds=60.0)
    assert list(folder.iterdir()) == [weights.path]
    data = weights.path.read_bytes()
    weights.discard()
    return data


# ---- round trips


async def test_odd_tensors_come_back_as_they_were(client: CheckpointClient, tmp_path: Path) -> None:
    weights: list[Tensor] = [
        ("scalar", "float32", (), np.array(2.5, dtype=np.float32)),
        ("empty", "bfloat16", (0, 4), np.empty((0, 4), dtype=np.int16)),
        ("half", "float16", (3, 1, 2), np.arange(6, dtype=np.float16).reshape(3, 1, 2)),
        ("brain", "bfloat16", (5,), np.arange(5, dtype=np.uint16)),
        ("long", "int64", (2,), np.array([-1, 1], dtype=np.int64)),
        ("none", "float32", (0,), np.empty(0, dtype=np.float32)),
    ]
    response = await publish(client, weights, step=7)
    assert not response.existed
    staged = await client.stage(tmp_path / "stage", deadline_seconds=60.0)
    assert staged.path == tmp_path / "stage" / "1.weights"
    assert staged.path.read_bytes() == content(weights)
    manifest = staged.manifest
    assert manifest == response.manifest == await client.get_manifest()
    assert (manifest.run_id, manifest.version, manifest.term, manifest.step) == (RUN, 1, 1, 7)
    assert manifest.created_unix_ms > 0
    assert [list(spec.shape) for spec in manifest.tensors] == [list(w[2]) for w in weights]


async def test_only_empty_tensors(client: CheckpointClient, tmp_path: Path) -> None:
    await publish(client, [("e", "float32", (0,), np.empty(0, dtype=np.float32))])
    assert await staged_bytes(client, tmp_path / "stage") == b""


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB, MIB + 1, 9 * MIB])
async def test_sizes_around_a_chunk(client: CheckpointClient, tmp_path: Path, nbytes: int) -> None:
    weights = tensors(nbytes)
    await publish(client, weights)
    assert await staged_bytes(client, tmp_path / "stage") == content(weights)


async def test_each_version_can_be_fetched(client: CheckpointClient, tmp_path: Path) -> None:
    several = [tensors(1000, seed) for seed in range(5)]
    for step, weights in enumerate(several):
        assert (await publish(client, weights, step=step)).manifest.version == step + 1
    assert await staged_bytes(client, tmp_path / "stage") == content(several[-1])
    assert await staged_bytes(client, tmp_path / "stage", 3) == content(several[2])
    assert (await client.get_manifest(1)).step == 0
    with pytest.raises(WeightsError, match="the bytes of version 1 are gone"):
        await client.stage(tmp_path / "stage", version=1, deadline_seconds=60.0)
    with pytest.raises(WeightsError, match="has no version 6"):
        await client.stage(tmp_path / "stage", version=6, deadline_seconds=60.0)
    listed = await client.list_versions()
    assert [(v.version, v.available) for v in listed] == [
        (1, False), (2, False), (3, True), (4, True), (5, True),
    ]  # fmt: skip


async def test_no_version_yet(client: CheckpointClient, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no version yet; publish one first"):
        await client.stage(tmp_path, deadline_seconds=60.0)
    with pytest.raises(WeightsError, match="no version yet"):
        await client.get_manifest()
    assert await client.list_versions() == []


async def test_confirmed_versions_show(client: CheckpointClient, service: Running) -> None:
    for step in range(2):
        await publish(client, tensors(999, step), step=step)
    first, second = await client.get_manifest(1), await client.get_manifest(2)
    async with client_of(service.address, "receiver-2") as other:
        await client.applied(first, 1e-5, 0.1)
        await other.applied(first, 1e-5, 0.1)
        await other.applied(second, 1e-5, 0.1)
    listed = await client.list_versions()
    assert [list(v.receivers) for v in listed] == [["receiver-1"], ["receiver-2"]]
    status = await client.status()
    assert dict(status.receivers) == {"receiver-1": 1, "receiver-2": 2}
    assert (status.run_id, status.latest_version, status.available_versions) == (RUN, 2, 2)
    assert status.stored_bytes == status.received_bytes == 2 * 999
    first.digest = second.digest
    with pytest.raises(IntegrityError, match="another manifest of version 1"):
        await client.applied(first, 0.0, 0.0)


async def test_another_run_is_refused(service: Running, tmp_path: Path) -> None:
    stranger = CheckpointClient(service.address, "run-2", "receiver-1")
    calls = [
        publish(stranger, tensors(99)),
        stranger.acquire_learner("learner"),
        stranger.stage(tmp_path, deadline_seconds=60.0),
        stranger.list_versions(),
        anext(stranger.watch()),
    ]
    for call in calls:
        with pytest.raises(WeightsError, match="keeps the weights of run 'run-1', not of 'run-2'"):
            await call
    await stranger.close()


# ---- watching


async def test_watchers_see_each_newest_version_once(
    client: CheckpointClient, service: Running
) -> None:
    await publish(client, tensors(99, 1), step=1)
    seen: dict[int, list[int]] = {0: [], 1: [], 7: []}

    async def watch(after: int) -> None:
        async with client_of(service.address) as watcher:
            async for news in watcher.watch(after):
                seen[after].append(news.version)

    watchers = [asyncio.create_task(watch(after)) for after in seen]
    await until(lambda: seen[0] == [1])
    for step in range(2, 9):
        await publish(client, tensors(99, step), step=step)
        await until(lambda step=step: seen[0][-1] == step)
    await until(lambda: seen[1][-1:] == seen[7][-1:] == [8])
    for watcher in watchers:
        watcher.cancel()
    await asyncio.wait(watchers)
    assert seen[0] == list(range(1, 9))
    assert seen[1][0] >= 2
    assert seen[7] == [8]


async def test_a_watch_outlives_the_service(tmp_path: Path) -> None:
    async with Proxy("127.0.0.1:1") as proxy, client_of(proxy.address) as watcher:
        seen: list[int] = []

        async def watch() -> None:
            async for news in watcher.watch():
                seen.append(news.version)

        task = asyncio.create_task(watch())
        for step in range(1, 4):
            async with serving(tmp_path / "store") as service, client_of(service.address) as client:
                proxy.target = service.address
                await publish(client, tensors(99, step), step=step)
                await until(lambda step=step: seen == list(range(1, step + 1)))
        task.cancel()
        await asyncio.wait([task])


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
    response = await client.acquire_learner("learner", term_floor=8, version_floor=17)
    assert response.term == 9
    assert (await publish(client, tensors(99), term=9)).manifest.version == 18


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
        code, text = await refusal(service, [_header(term=6)])
        assert code == grpc.StatusCode.UNAVAILABLE
        assert f"Redis at {redis_server.url}" in text
        assert [v.version for v in await client.list_versions()] == [18]
    await learner.close()
    await mark.close()


# ---- broken connections


@pytest.mark.parametrize("cut_bytes", [MIB + MIB // 2, 2 * MIB + 4321])
async def test_a_fetch_goes_on_where_it_broke(
    service: Running, client: CheckpointClient, tmp_path: Path, cut_bytes: int
) -> None:
    weights = tensors(6 * MIB + 1234)
    await publish(client, weights)
    async with Proxy(service.address) as proxy, client_of(proxy.address) as far:
        proxy.cut_each_after(cut_bytes)
        assert await staged_bytes(far, tmp_path / "stage") == content(weights)
        assert proxy.cuts >= 2
        # No cut costs more than the chunk that it broke, with framing and manifest.
        assert proxy.bytes["down"] <= len(content(weights)) + (proxy.cuts + 1) * (MIB + 64 * 1024)


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


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_byte_that_changed_on_the_way_is_sent_again(
    service: Running, client: CheckpointClient, tmp_path: Path, direction: Direction
) -> None:
    weights = tensors(3 * MIB)
    async with Proxy(service.address) as proxy, client_of(proxy.address) as far:
        if direction == "up":
            proxy.flip_at(MIB + 5000, "up")
        await publish(far, weights)
        if direction == "down":
            proxy.flip_at(MIB + 5000, "down")
        assert await staged_bytes(far, tmp_path / "stage") == content(weights)
        assert proxy.bytes[direction] > 4 * MIB
    assert [v.version for v in await client.list_versions()] == [1]


async def test_a_cancelled_transfer_leaves_nothing(
    service: Running, client: CheckpointClient, tmp_path: Path
) -> None:
    async with Proxy(service.address) as proxy, client_of(proxy.address) as far:
        upload = asyncio.create_task(publish(far, tensors(20 * MIB)))
        await until(lambda: service.servicer.counters.received_bytes > 9 * MIB)
        upload.cancel()
        await until(lambda: not list((tmp_path / "store" / "incoming").iterdir()))
        await publish(client, tensors(20 * MIB))
        fetch = asyncio.create_task(staged_bytes(far, tmp_path / "stage"))
        await until(lambda: proxy.bytes["down"] > 9 * MIB)
        fetch.cancel()
        await asyncio.wait([upload, fetch])
        assert not list((tmp_path / "stage").iterdir())
        await until(lambda: service.store.get(1).leases == 0)
    assert [v.version for v in await client.list_versions()] == [1]


async def test_nobody_there(tmp_path: Path) -> None:
    async with Proxy("127.0.0.1:1") as proxy, client_of(proxy.address) as client:
        proxy.refuse = True
        for call in (
            publish(client, tensors(99), deadline_seconds=0.2),
            client.stage(tmp_path / "stage", deadline_seconds=0.2),
            client.status(deadline_seconds=0.2),
        ):
            with pytest.raises(
                ServiceUnavailable, match=f"{proxy.address} did not .* within 0.2 s"
            ):
                await call
    assert not list((tmp_path / "stage").iterdir())


# ---- crashes


async def test_a_fetch_outlives_kills_of_the_service(process: Service, tmp_path: Path) -> None:
    weights = tensors(12 * MIB)
    process.start()
    async with client_of(await process.ready()) as client:
        await publish(client, weights)
    async with Proxy(await process.ready()) as proxy, client_of(proxy.address) as far:
        proxy.stall()
        fetch = asyncio.create_task(staged_bytes(far, tmp_path / "stage"))
        await until(lambda: proxy.connections)
        proxy.delay_seconds = 0.001
        proxy.resume()
        await until(lambda: proxy.bytes["down"] > 3 * MIB)
        process.kill()
        proxy.delay_seconds = 0.0
        process.start()
        proxy.target = await process.ready()
        assert await fetch == content(weights)
        assert proxy.bytes["down"] < 15 * MIB
    assert process.stop() == 0


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


async def test_a_graceful_stop_lets_a_publish_end_and_ends_watches(
    process: Service, tmp_path: Path
) -> None:
    process.start()
    address = await process.ready()
    stopping = asyncio.Event()

    async def requests() -> AsyncIterator[checkpoint.PublishRequest]:
        yield _header()
        yield _chunk(0, b"ab")
        await stopping.wait()
        yield _chunk(2, b"cd")

    async with client_of(address) as client, rpc.connect(address) as channel:
        await publish(client, tensors(99), term=1)
        watch = client.watch()
        assert (await anext(watch)).version == 1
        upload = checkpoint_grpc.CheckpointServiceStub(channel).Publish(requests(), timeout=60.0)
        await until(lambda: list((tmp_path / "store" / "incoming").iterdir()))
        stopped = asyncio.create_task(asyncio.to_thread(process.stop))
        while await health(address) == SERVING:
            await asyncio.sleep(0.01)
        stopping.set()
        assert (await upload).manifest.version == 2
        assert await stopped == 0
        await watch.aclose()


# ---- leases and retention


async def test_an_open_fetch_keeps_its_version(tmp_path: Path) -> None:
    weights = tensors(20 * MIB)
    async with (
        serving(tmp_path / "store", keep=1) as service,
        client_of(service.address) as client,
        Proxy(service.address) as proxy,
        client_of(proxy.address) as far,
    ):
        await publish(client, weights, step=1)
        fetch = asyncio.create_task(staged_bytes(far, tmp_path / "stage"))
        await until(lambda: proxy.bytes["down"] > MIB)
        proxy.stall()
        for step in (2, 3):
            await publish(client, tensors(99, step), step=step)
        listed = {v.version: (v.available, v.leases) for v in await client.list_versions()}
        assert listed == {1: (True, 1), 2: (False, 0), 3: (True, 0)}
        proxy.resume()
        assert await fetch == content(weights)
        await until(lambda: not service.store.get(1).available)


async def test_a_broken_fetch_of_the_newest_goes_on_to_the_newer(tmp_path: Path) -> None:
    newest = tensors(99, 3)
    async with (
        serving(tmp_path / "store", keep=1) as service,
        client_of(service.address) as client,
        Proxy(service.address) as proxy,
        client_of(proxy.address) as far,
    ):
        await publish(client, tensors(20 * MIB), step=1)
        of_newest, of_first = (
            asyncio.create_task(staged_bytes(far, tmp_path / f"stage-{version}", version))
            for version in (0, 1)
        )
        await until(lambda: service.store.get(1).leases == 2)
        proxy.stall()
        await publish(client, newest, step=2)
        proxy.refuse = True
        proxy.cut()
        proxy.resume()
        await until(lambda: not service.store.get(1).available)
        proxy.refuse = False
        assert await of_newest == content(newest)
        with pytest.raises(VersionGone, match="the bytes of version 1 are gone"):
            await of_first
        assert not list((tmp_path / "stage-1").iterdir())


async def test_a_lease_ends(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store", keep=1, lease_seconds=0.2) as service,
        client_of(service.address) as client,
        rpc.connect(service.address) as channel,
    ):
        await publish(client, tensors(40 * MIB), step=1)
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        stuck = stub.Fetch(checkpoint.FetchRequest(run_id=RUN), timeout=60.0)
        assert (await anext(aiter(stuck))).header.manifest.version == 1
        await publish(client, tensors(99), step=2)
        await until(lambda: not service.store.get(1).available)
        with pytest.raises(grpc.aio.AioRpcError, match=r"checkpoint\.lease_seconds") as caught:
            [message async for message in stuck]
        assert caught.value.code() == grpc.StatusCode.ABORTED


# ---- damage and full disks


@pytest.mark.parametrize("damage", ["bit", "page", "short"])
async def test_damaged_weights_are_never_staged(
    service: Running, client: CheckpointClient, tmp_path: Path, damage: str
) -> None:
    await publish(client, tensors(2 * MIB, 1), step=1)
    await publish(client, tensors(2 * MIB, 2), step=2)
    path = tmp_path / "store" / "2" / "weights.bin"
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[MIB] ^= 1
    elif damage == "page":
        data[MIB : MIB + 4096] = bytes(4096)
    else:
        del data[MIB:]
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="version 2"):
        await client.stage(tmp_path / "stage", deadline_seconds=60.0)
    assert not list((tmp_path / "stage").iterdir())
    listed = {v.version: v.available for v in await client.list_versions()}
    assert listed == {1: True, 2: False}
    assert service.store.damaged == 1
    assert await staged_bytes(client, tmp_path / "stage") == content(tensors(2 * MIB, 1))
    again = await publish(client, tensors(2 * MIB, 2), step=2)
    assert (again.existed, again.manifest.version) == (False, 3)


@contextlib.contextmanager
def files_at_most(nbytes: int) -> Iterator[None]:
    """What a full disk is to writers: no file of this process may grow beyond `nbytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", ["weights", "counters", "manifest"])
async def test_a_full_disk_refuses_a_publish_and_keeps_nothing(
    service: Running, client: CheckpointClient, tmp_path: Path, room: str
) -> None:
    many = [(f"t{index}", "uint8", (1,), b"x") for index in range(100)]
    limit = {"weights": 50, "counters": 110, "manifest": 1000}[room]
    with files_at_most(limit):
        code, text = await refusal(service, [_header(many), _chunk(0, b"x" * 100)])
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "File too large" in text
    assert "free some" in text
    store = tmp_path / "store"
    await until(lambda: not list((store / "incoming").iterdir()))
    assert {path.name for path in store.iterdir()} <= {
        "lock", "incoming", "counters.json", "counters.partial",
    }  # fmt: skip
    assert not (await publish(client, tensors(99))).existed


async def test_a_receiver_without_room_says_so_at_once(
    client: CheckpointClient, tmp_path: Path
) -> None:
    await publish(client, tensors(2 * MIB))
    with files_at_most(MIB), pytest.raises(NoRoom, match=str(tmp_path / "stage")):
        await client.stage(tmp_path / "stage", deadline_seconds=60.0)
    assert not list((tmp_path / "stage").iterdir())


# ---- malformed requests


ABCD = [("t", "uint8", (4,), b"abcd")]


def _header(weights: Sequence[tuple] = ABCD, **fields: object) -> checkpoint.PublishRequest:
    manifest = describe(weights)
    manifest.run_id, manifest.term, manifest.kind = RUN, 1, checkpoint.WEIGHTS_KIND_FULL
    header = checkpoint.PublishHeader(manifest=manifest)
    for name, value in fields.items():
        target = header if name in header.DESCRIPTOR.fields_by_name else header.manifest
        setattr(target, name, value)
    return checkpoint.PublishRequest(header=header)


def _chunk(offset: int, data: bytes) -> checkpoint.PublishRequest:
    return checkpoint.PublishRequest(chunk=checkpoint.WeightsChunk(offset=offset, data=data))


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("requests", "code", "text"),
    [
        ([], INVALID, "expected a header"),
        ([_chunk(0, b"abcd")], INVALID, "expected a header"),
        ([_header(), _header()], INVALID, "expected a chunk"),
        ([_header(), checkpoint.PublishRequest()], INVALID, "expected a chunk"),
        ([_header(), _chunk(1, b"bcd")], INVALID, "expected a chunk at byte 0, found one at 1"),
        ([_header(), _chunk(0, b"ab"), _chunk(0, b"ab")], INVALID, "at byte 2, found one at 0"),
        ([_header(), _chunk(0, b"abcde")], INVALID, "more bytes than the 4"),
        ([_header(), _chunk(0, bytes(2 * MIB + 1))], INVALID, "at most 2097152 are accepted"),
        ([_header(), _chunk(0, b"abc")], INVALID, "ended at byte 3 of 4"),
        ([_header(), _chunk(0, b"abcD")], grpc.StatusCode.DATA_LOSS, "tensor t does not match"),
        ([_header(term=0)], INVALID, "term is 0"),
        ([_header(kind=0)], INVALID, "expected FULL"),
        ([_header(kind=77)], INVALID, "expected FULL"),
        ([_header(encoding=3)], INVALID, "encoding 3 is not accepted"),
        ([_header(shard_index=2, shard_count=2)], INVALID, "part 2 of 2"),
        ([_header(total_bytes=5)], INVALID, "total_bytes is 5"),
        ([_header(run_id="x")], grpc.StatusCode.FAILED_PRECONDITION, "not of 'x'"),
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


async def test_a_fetch_beyond_the_end_is_refused(
    service: Running, client: CheckpointClient
) -> None:
    await publish(client, tensors(99))
    async with rpc.connect(service.address) as channel:
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        request = checkpoint.FetchRequest(run_id=RUN, offset=100)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Fetch(request, timeout=60.0).read()
    assert caught.value.code() == INVALID


# ---- health and reflection


async def test_ready_only_once_the_versions_are_loaded(tmp_path: Path) -> None:
    async with serving(tmp_path / "store", load=False) as service:
        names = ["", "readiness", SERVICE_NAME, "liveness"]
        states = [await health(service.address, name) for name in names]
        assert states == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING]
        code, text = await refusal(service, [_header()])
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "still loading" in text
        await service.servicer.load()
        await service.server.health.set_ready(True)
        assert [await health(service.address, name) for name in names] == [SERVING] * 4


async def test_reflection_lists_the_service(service: Running) -> None:
    def described() -> tuple[set[str], set[str]]:
        with grpc.insecure_channel(service.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol(SERVICE_NAME)
            return set(database.get_services()), {m.name for m in file.service[0].method}

    services, methods = await asyncio.to_thread(described)
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= services
    assert {"Publish", "Fetch", "Watch", "AcquireLearner"} <= methods


async def test_metrics_count_what_happened(client: CheckpointClient, service: Running) -> None:
    registry = CollectorRegistry()
    registry.register(service.servicer.counters)
    await client.acquire_learner("learner", term_floor=2)
    await publish(client, tensors(500), term=3)
    with pytest.raises(Fenced):
        await publish(client, tensors(501), term=2)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"offbeat_checkpoint_{name}", labels)

    assert value("term") == 3
    assert value("latest_version") == value("published_total") == value("available_versions") == 1
    assert value("stored_bytes") == value("received_bytes_total") == 500
    assert value("refusals_total", status="FAILED_PRECONDITION") == 1
    assert value("damaged_total") == value("fetches") == 0
