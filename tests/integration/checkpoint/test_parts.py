"""Publishes that come in parts from several ranks at once: whole or not at all, in full and as deltas."""

import asyncio
import contextlib
from pathlib import Path

import grpc
import numpy as np
import pytest

from offbeat import rpc
from offbeat.errors import Fenced, ServiceUnavailable, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.client import CheckpointClient, PublishBase, Shard
from offbeat.weights.manifest import describe, describe_part
from tests.harness.checkpoints import (
    MIB,
    RUN,
    Running,
    Tensor,
    client_of,
    content,
    publish,
    staged_bytes,
    until,
)
from tests.harness.proxy import Proxy

INCOMING = "store/incoming"


def weights(step: int, *, dense: bool = False) -> list[Tensor]:
    """Large and small tensors, empty ones and a scalar, of which each step changes 1 %, or half."""
    rng = np.random.default_rng(0)
    made = []
    for index, items in enumerate([3 * MIB // 2, 0, 1, 700, 2 * MIB // 2 + 3, 9, 0, MIB // 2]):
        data = rng.integers(0, 2**16, items, np.uint16)
        for number in range(step):
            noise = np.random.default_rng((index, number))
            places = noise.random(items) < (0.9 if dense else 0.01)
            data[places] += noise.integers(1, 2**16 if dense else 2, items, np.uint16)[places]
        made.append((f"t{index}", "bfloat16", (items,) if index != 2 else (), data))
    return made


class Rank:
    """One of the ranks: sends every `count`-th tensor."""

    def __init__(self, client: CheckpointClient, index: int, count: int) -> None:
        self.client = client
        self._shard = Shard(index, count)
        self._base: PublishBase | None = None

    async def publish(
        self, weights: list[Tensor], step: int, *, term: int = 1, seconds: float = 30.0
    ) -> checkpoint.PublishResponse:
        specs = describe(weights).tensors
        mine = list(range(self._shard.index, len(weights), self._shard.count))
        tensors = [weights[place] for place in mine]
        manifest = describe_part(
            tensors, [specs[place].offset for place in mine], len(content(weights))
        )
        manifest.term, manifest.step, manifest.publish_id = term, step, f"{term}-{step}"
        manifest.kind = checkpoint.WEIGHTS_KIND_FULL
        manifest.adapter_config = f"of part {self._shard.index}"
        buffers = [buffer for *_, buffer in tensors]
        reply = await self.client.publish(
            manifest, buffers, base=self._base, shard=self._shard, deadline_seconds=seconds
        )
        self._base = PublishBase(reply.manifest, buffers, manifest.tensors)
        return reply


@contextlib.asynccontextmanager
async def ranks_of(address: str, count: int):  # type: ignore[no-untyped-def]
    async with contextlib.AsyncExitStack() as stack:
        yield [
            Rank(await stack.enter_async_context(client_of(address, f"rank-{i}")), i, count)
            for i in range(count)
        ]


async def all_publish(ranks: list[Rank], step: int, **how: bool) -> checkpoint.Manifest:
    replies = await asyncio.gather(*(rank.publish(weights(step, **how), step) for rank in ranks))
    manifests = [reply.manifest for reply in replies]
    assert all(manifest == manifests[0] for manifest in manifests)
    return manifests[0]


@pytest.mark.parametrize("count", [2, 3, 8])
async def test_parts_become_the_version_that_one_publisher_would_have_sent(
    service: Running,
    client: CheckpointClient,
    receiver: CheckpointClient,
    tmp_path: Path,
    count: int,
) -> None:
    async with ranks_of(service.address, count) as ranks:
        for step in range(3):
            manifest = await all_publish(ranks, step)
            alone = describe(weights(step))
            assert list(manifest.tensors) == list(alone.tensors)
            assert manifest.weights_digest == alone.weights_digest
            assert (manifest.step, manifest.adapter_config) == (step, "of part 0")
            found = await receiver.stage(tmp_path / "delta", deadline_seconds=60.0)
            assert found.path.read_bytes() == content(weights(step))
            found.discard()
            assert await staged_bytes(client, tmp_path / "full") == content(weights(step))
        for rank in ranks:
            assert rank.client.counts.transfers == {"full": 1, "delta": 2}
            assert rank.client.counts.bytes["delta"] < 0.05 * len(content(weights(0)))
    assert receiver.counts.transfers == {"full": 1, "delta": 2}
    await until(lambda: not list((tmp_path / INCOMING).iterdir()))


async def test_the_same_weights_from_one_publisher_are_the_same_version(
    service: Running, learner: CheckpointClient
) -> None:
    async with ranks_of(service.address, 2) as ranks:
        manifest = await all_publish(ranks, 5)
    reply = await publish(learner, weights(5), step=5)
    assert (reply.existed, reply.manifest) == (True, manifest)


async def test_a_missing_part_publishes_nothing(
    service: Running, client: CheckpointClient, tmp_path: Path
) -> None:
    async with ranks_of(service.address, 3) as ranks:
        found = await asyncio.gather(
            *(rank.publish(weights(0), 0, seconds=0.5) for rank in ranks[:2]),
            return_exceptions=True,
        )
        assert all(isinstance(error, ServiceUnavailable) for error in found)
        assert await client.list_versions() == []
        await until(lambda: not list((tmp_path / INCOMING).iterdir()))
        assert (await all_publish(ranks, 0)).version == 1


async def test_a_retry_of_a_part_is_answered_with_the_version(
    service: Running, client: CheckpointClient
) -> None:
    async with ranks_of(service.address, 2) as ranks:
        manifest = await all_publish(ranks, 1)
        again = await ranks[1].publish(weights(1), 1)
        assert (again.existed, again.manifest) == (True, manifest)
        # Under the same publish id, other weights are none of this version.
        with pytest.raises(ServiceUnavailable):
            await ranks[1].publish(weights(2), 1, seconds=0.3)
    assert [v.version for v in await client.list_versions()] == [1]


@pytest.mark.parametrize("delta", [False, True])
async def test_a_part_that_broke_is_sent_again_alone(
    service: Running, tmp_path: Path, delta: bool
) -> None:
    async with (
        Proxy(service.address) as proxy,
        ranks_of(service.address, 2) as (steady, _),
        client_of(proxy.address, "far") as far,
    ):
        broken = Rank(far, 1, 2)
        if delta:
            await all_publish([steady, broken], 0)
        first = asyncio.create_task(steady.publish(weights(1, dense=delta), 1))
        await until(lambda: list((tmp_path / INCOMING).iterdir()))
        for cut in (200_000, 900_000, 100):
            proxy.cut_after(cut, "up")
            second = asyncio.create_task(broken.publish(weights(1, dense=delta), 1))
            await until(lambda: proxy.cuts)
            if cut != 100:
                # The rank gives up, and comes back.
                second.cancel()
                await asyncio.wait([second])
                proxy.cuts = 0
        assert (await second).manifest == (await first).manifest
        found = await staged_bytes(steady.client, tmp_path / "stage")
        assert found == content(weights(1, dense=delta))
        await until(lambda: not list((tmp_path / INCOMING).iterdir()))


async def test_parts_of_which_one_can_send_no_delta_all_come_in_full(
    service: Running, client: CheckpointClient, tmp_path: Path
) -> None:
    async with ranks_of(service.address, 2) as ranks:
        await all_publish(ranks, 0)
        ranks[1]._base = None
        await all_publish(ranks, 1)
        assert ranks[0].client.counts.fallbacks == {"publish_not_found": 1}
        assert await staged_bytes(client, tmp_path / "stage") == content(weights(1))
        # A delta of everything is a delta still: no rank knows what the others send.
        await all_publish(ranks, 2, dense=True)
        assert ranks[0].client.counts.transfers == {"full": 2, "delta": 1}
        assert await staged_bytes(client, tmp_path / "stage") == content(weights(2, dense=True))


async def test_a_wrong_base_at_one_rank_is_noticed_and_all_send_everything(
    service: Running, client: CheckpointClient, tmp_path: Path
) -> None:
    async with ranks_of(service.address, 2) as ranks:
        await all_publish(ranks, 0)
        base = ranks[1]._base
        assert base is not None
        wrong = [np.array(buffer, copy=True) for buffer in base.buffers]
        wrong[-1][:50] += 1
        ranks[1]._base = PublishBase(base.manifest, wrong, base.tensors)
        await all_publish(ranks, 1)
        for rank in ranks:
            assert rank.client.counts.fallbacks == {"publish_data_loss": 1}
        assert await staged_bytes(client, tmp_path / "stage") == content(weights(1))


async def test_parts_of_an_older_term_are_refused_at_the_commit(
    service: Running, client: CheckpointClient
) -> None:
    await client.acquire_learner("learner-1")
    async with ranks_of(service.address, 2) as ranks:
        early = asyncio.create_task(ranks[0].publish(weights(0), 0))
        await until(lambda: service.servicer.counters.received_bytes)
        await client.acquire_learner("learner-2")
        with pytest.raises(Fenced):
            await ranks[1].publish(weights(0), 0)
        early.cancel()
        await asyncio.wait([early])
    assert await client.list_versions() == []


async def test_parts_that_do_not_go_together_are_refused(service: Running) -> None:
    async with ranks_of(service.address, 2) as ranks, ranks_of(service.address, 3) as others:
        early = asyncio.create_task(ranks[0].publish(weights(0), 0))
        await until(lambda: service.servicer.counters.received_bytes)
        with pytest.raises(WeightsError, match="part 1 of 3, but another part is of 2"):
            await others[1].publish(weights(0), 0)
        with pytest.raises(WeightsError, match="total_bytes is"):
            await ranks[1].publish(weights(0)[:-1], 0)
        # The same tensors twice, others not at all.
        twice = Rank(ranks[1].client, 0, 2)
        twice._shard = Shard(1, 2)
        specs = describe(weights(0)).tensors
        part = describe_part(weights(0)[:1], [specs[0].offset], len(content(weights(0))))
        part.term, part.step, part.publish_id, part.kind = 1, 0, "1-0", 1
        with pytest.raises(WeightsError, match="expected offset"):
            await ranks[1].client.publish(
                part, [weights(0)[0][3]], shard=Shard(1, 2), deadline_seconds=10.0
            )
        with pytest.raises(WeightsError, match="expected offset"):
            await early
    assert service.store.versions() == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"shard_index": 2, "shard_count": 2}, "part 2 of 2"),
        ({"shard_index": 1}, "part 1 of 1"),
        ({"shard_count": 5000}, "at most 4096"),
        ({"shard_count": 2}, "publish_id is empty"),
    ],
)
async def test_a_malformed_part_is_refused(
    service: Running, fields: dict[str, int], text: str
) -> None:
    manifest = describe([("t", "uint8", (4,), b"abcd")])
    manifest.run_id, manifest.term, manifest.kind = RUN, 1, checkpoint.WEIGHTS_KIND_FULL
    header = checkpoint.PublishHeader(manifest=manifest, **fields)
    async with rpc.connect(service.address) as channel:
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=text):
            await stub.Publish(iter([checkpoint.PublishRequest(header=header)]), timeout=30.0)
