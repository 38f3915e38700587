"""Each fault at each chunk of each path: what was staged stays as it is, and what is staged next is right.

Chunks are small here, so that small weights have many of them.
"""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import psutil
import pytest

from offbeat import rpc
from offbeat.errors import OffbeatError, ServiceUnavailable, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights import chunks
from offbeat.weights.client import CheckpointClient, PublishBase
from offbeat.weights.staged import StagedWeights
from tests.harness.checkpoints import (
    MIB,
    RUN,
    Running,
    Tensor,
    base_of,
    client_of,
    content,
    publish,
    serving,
    tensors,
    until,
)
from tests.harness.proxy import Proxy
from tests.harness.service import Service
from tests.harness.tamper import CHUNK_FAULTS, HEADER, Fault, Tamperer

CHUNK = 4096
FULL_CHUNKS = 6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)


def weights(step: int) -> list[Tensor]:
    """Six chunks, of which each step changes so much that the difference takes several."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 2**16, FULL_CHUNKS * CHUNK // 2 - 700, np.uint16)
    for number in range(step):
        places = np.random.default_rng(number + 1).random(len(large)) < 0.5
        large[places] += np.random.default_rng(number).integers(1, 900, len(large), np.uint16)[
            places
        ]
    return [
        ("scalar", "float32", (), np.array(step, np.float32)),
        ("large", "bfloat16", (len(large),), large),
        ("small", "uint8", (999,), rng.integers(0, 256, 999, np.uint8)),
    ]


async def staged(client: CheckpointClient, folder: Path, **how: float) -> StagedWeights:
    return await client.stage(folder, deadline_seconds=how.get("deadline_seconds", 60.0))


class Publisher:
    """Publishes step after step, as deltas or in full."""

    def __init__(self, client: CheckpointClient, *, deltas: bool) -> None:
        self._client = client
        self._deltas = deltas
        self._base: PublishBase | None = None
        self.step = -1

    async def next(self) -> bytes:
        self.step += 1
        new = weights(self.step)
        base = self._base if self._deltas else None
        self._base = base_of(await publish(self._client, new, step=self.step, base=base), new)
        return content(new)


@pytest.mark.parametrize("fault", CHUNK_FAULTS)
@pytest.mark.parametrize("path", ["full", "delta"])
async def test_a_fetch_survives_each_fault_at_each_chunk(
    service: Running, learner: CheckpointClient, tmp_path: Path, path: str, fault: Fault
) -> None:
    publisher = Publisher(learner, deltas=path == "delta")
    folder = tmp_path / "stage"
    async with (
        Tamperer(service.address) as middle,
        client_of(middle.address, deltas=path == "delta") as receiver,
    ):
        old = await publisher.next()
        weights = await staged(receiver, folder)
        place = 0
        while True:
            new = await publisher.next()
            middle.arm(fault, place)
            before = middle.done
            fetch = asyncio.create_task(staged(receiver, folder))
            if path == "delta":
                # The base is changed only by a whole delta, and only once nobody uses it.
                await asyncio.sleep(0.02)
                assert weights.path.read_bytes() == old
                weights.discard()
            weights = await fetch
            assert weights.path.read_bytes() == new
            assert weights.manifest.step == publisher.step
            if path == "full":
                weights.discard()
            if middle.done == before:
                break  # there is no such chunk
            old, place = new, place + 1
        assert place >= (FULL_CHUNKS if path == "full" else 3)
        if path == "delta":
            # A lost chunk costs a chunk; only what is wrong as a whole is fetched in full.
            assert receiver.counts.transfers["delta"] >= (place if fault in {"cut", "flip"} else 1)


@pytest.mark.parametrize("fault", ["flip", "reorder", "shorten", "end"])
@pytest.mark.parametrize("path", ["full", "delta"])
async def test_a_fault_that_stays_leaves_the_old_weights(
    service: Running, learner: CheckpointClient, tmp_path: Path, path: str, fault: Fault
) -> None:
    publisher = Publisher(learner, deltas=path == "delta")
    folder = tmp_path / "stage"
    async with (
        Tamperer(service.address) as middle,
        client_of(middle.address, deltas=True) as receiver,
    ):
        old = await publisher.next()
        first = await staged(receiver, folder)
        new = await publisher.next()
        middle.arm(fault, 0, every_time=True)
        with pytest.raises(WeightsError):
            await staged(receiver, folder)
        assert [file.name for file in folder.iterdir()] == [first.path.name]
        assert first.path.read_bytes() == old
        middle.disarm()
        first.discard()
        assert (await staged(receiver, folder)).path.read_bytes() == new


async def test_a_cut_that_stays_ends_at_the_deadline(
    service: Running, learner: CheckpointClient, tmp_path: Path
) -> None:
    publisher = Publisher(learner, deltas=False)
    new = await publisher.next()
    async with Tamperer(service.address) as middle, client_of(middle.address) as receiver:
        middle.arm("cut", 0, every_time=True)
        with pytest.raises(ServiceUnavailable, match=r"did not end within 0\.3 s"):
            await staged(receiver, tmp_path / "stage", deadline_seconds=0.3)
        assert not list((tmp_path / "stage").iterdir())
        middle.disarm()
        assert (await staged(receiver, tmp_path / "stage")).path.read_bytes() == new


@pytest.mark.parametrize("fault", CHUNK_FAULTS)
@pytest.mark.parametrize("path", ["full", "delta"])
async def test_a_publish_survives_each_fault_at_each_chunk(
    service: Running, client: CheckpointClient, tmp_path: Path, path: str, fault: Fault
) -> None:
    async with (
        Tamperer(service.address) as middle,
        client_of(middle.address, "learner") as learner,
    ):
        publisher = Publisher(learner, deltas=path == "delta")
        await publisher.next()
        place = 0
        while True:
            middle.arm(fault, place, "up")
            before = middle.done
            try:
                new = await publisher.next()
            except OffbeatError:
                # Nonsense is refused for good: a publisher that sends it would send it again.
                assert fault in {"reorder", "repeat", "shorten", "end"}
                listed = await client.list_versions()
                assert [v.step for v in listed] == list(range(publisher.step))
                publisher.step -= 1
                new = await publisher.next()
            found = await staged(client, tmp_path / "stage")
            assert found.path.read_bytes() == new
            found.discard()
            if middle.done == before:
                break
            place += 1
        assert place >= (FULL_CHUNKS if path == "full" else 3)
        assert not list((tmp_path / "store" / "incoming").iterdir())


@pytest.mark.parametrize("fault", CHUNK_FAULTS)
@pytest.mark.parametrize("path", ["full", "delta"])
async def test_a_relay_survives_each_fault_at_each_chunk(
    service: Running, learner: CheckpointClient, tmp_path: Path, path: str, fault: Fault
) -> None:
    """The middleman stands between the service and its relay; a receiver of the relay sees nothing of it."""
    publisher = Publisher(learner, deltas=path == "delta")
    async with Tamperer(service.address) as middle:
        upstream = CheckpointClient(middle.address, RUN, "relay")
        deltas = path == "delta"
        async with (
            serving(tmp_path / "relay", upstream=upstream, deltas=deltas) as relay,
            client_of(relay.address, deltas=deltas) as receiver,
        ):
            place = 0
            await publisher.next()
            await until(lambda: relay.store.latest() is not None)
            while True:
                before = middle.done
                middle.arm(fault, place)
                new = await publisher.next()
                await until(lambda: relay.store.latest().manifest.step == publisher.step)
                found = await staged(receiver, tmp_path / "stage")
                assert found.path.read_bytes() == new
                found.discard()
                if middle.done == before:
                    break
                place += 1
            assert place >= (FULL_CHUNKS if path == "full" else 3)


@pytest.mark.parametrize("who", ["receiver", "relay"])
async def test_a_delta_that_names_another_base_leads_to_a_full_fetch(
    service: Running, learner: CheckpointClient, tmp_path: Path, who: str
) -> None:
    publisher = Publisher(learner, deltas=True)
    async with Tamperer(service.address) as middle:
        upstream = CheckpointClient(middle.address, RUN, "relay")
        async with (
            serving(tmp_path / "relay", upstream=upstream) as relay,
            client_of(relay.address if who == "relay" else middle.address, deltas=True) as receiver,
        ):
            await publisher.next()
            await until(lambda: relay.store.latest() is not None)
            (await staged(receiver, tmp_path / "stage")).discard()
            middle.arm("base", HEADER)
            new = await publisher.next()
            if who == "relay":
                await until(lambda: relay.store.latest().version == 2)
            found = await staged(receiver, tmp_path / "stage")
            assert found.path.read_bytes() == new
            assert middle.done == 1


# ---- receivers that read slowly


async def test_a_slow_receiver_goes_on_under_another_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads more slowly than a lease lasts; the weights that it had stay, and it gets the new ones in the end."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", MIB)  # beyond what connections hold by themselves
    async with (
        serving(tmp_path / "store", lease_seconds=0.15) as service,
        client_of(service.address, "learner") as learner,
        Tamperer(service.address) as middle,
        client_of(middle.address) as receiver,
    ):
        await publish(learner, tensors(MIB), step=0)
        old = content(tensors(MIB))
        first = await staged(receiver, tmp_path / "first")
        await publish(learner, tensors(9 * MIB, 1), step=1)
        new = content(tensors(9 * MIB, 1))
        middle.slow_seconds = 0.08
        fetch = asyncio.create_task(staged(receiver, tmp_path / "second"))
        await until(lambda: service.servicer.counters.refusals["ABORTED"])
        assert first.path.read_bytes() == old
        assert not list((tmp_path / "second").glob("*.weights"))
        assert (await fetch).path.read_bytes() == new
        await until(lambda: service.store.get(2).leases == 0)


@pytest.mark.parametrize("place", range(FULL_CHUNKS))
async def test_a_receiver_that_stops_at_a_chunk_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    size = 96 * 1024  # beyond what the connection takes in by itself
    monkeypatch.setattr(chunks, "CHUNK_BYTES", size)
    data: list[Tensor] = [
        ("t", "uint8", (FULL_CHUNKS * size,), np.arange(FULL_CHUNKS * size).astype(np.uint8))
    ]
    async with (
        serving(tmp_path / "store", keep=1, lease_seconds=0.5) as service,
        client_of(service.address, "learner") as learner,
        Proxy(service.address) as proxy,
        client_of(proxy.address, "stuck") as stuck,
        client_of(service.address, "other") as other,
    ):
        await publish(learner, data, step=0)
        fetch = asyncio.create_task(staged(stuck, tmp_path / "stuck"))
        proxy.delay_seconds = 0.001
        await until(lambda: proxy.bytes["down"] > place * size)
        proxy.stall()
        # Others publish and fetch meanwhile.
        newer: list[Tensor] = [("t", "uint8", (9,), np.arange(9).astype(np.uint8))]
        await publish(learner, newer, step=1)
        found = await staged(other, tmp_path / "other")
        assert found.path.read_bytes() == content(newer)
        # The lease ends, and with it what retention spared for it; or all had been sent already.
        await until(lambda: not service.store.get(1).available)
        assert not list((tmp_path / "stuck").glob("*.weights"))
        proxy.delay_seconds = 0.0
        proxy.resume()
        assert (await fetch).path.read_bytes() in {content(newer), content(data)}
        await until(lambda: service.store.get(2).leases == 0)


async def test_receivers_that_stop_reading_take_little_memory_of_the_service(
    process: Service, tmp_path: Path
) -> None:
    """Of 64 MiB each gets a few; what they don't read is not read from the disk for them either."""
    process.start()
    address = await process.ready()
    async with client_of(address, "learner") as learner:
        await publish(learner, tensors(64 * MIB), step=0)
        memory = psutil.Process(process.process.pid).memory_info
        before = memory().rss
        async with contextlib.AsyncExitStack() as stack:
            for number in range(5):
                channel = await stack.enter_async_context(rpc.connect(address))
                request = checkpoint.FetchRequest(run_id=RUN, receiver_id=f"stuck-{number}")
                stub = checkpoint_grpc.CheckpointServiceStub(channel)
                stuck = stub.Fetch(request, timeout=60.0)
                assert (await anext(aiter(stuck))).header.manifest.version == 1
            sent = -1
            while sent != (sent := (await learner.status()).sent_bytes):
                await asyncio.sleep(0.1)
            assert sent < 5 * 16 * MIB
            # Two batches of 8 MiB for each, and what the connection holds; beside them the newest version, for deltas.
            assert memory().rss - before < (64 + 5 * 24) * MIB
            async with client_of(address, "other") as other:
                found = await staged(other, tmp_path / "other")
                assert found.path.stat().st_size == 64 * MIB
