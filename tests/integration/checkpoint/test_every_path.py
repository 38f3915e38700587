"""Whatever the weights are like: every path ends in the bytes that were published, by hash."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient, PublishBase, Shard
from offbeat.weights.manifest import describe, describe_part
from tests.harness.checkpoints import RUN, Running, Tensor, client_of, content, serving, until

ITEM = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
SHAPES = st.one_of(
    st.just(()),
    st.just((0,)),
    st.just((3, 0, 2)),
    st.tuples(st.integers(1, 3)),
    st.tuples(st.integers(1, 257), st.integers(1, 131)),
    st.just((40_001,)),
)
SPARSITY = st.sampled_from([0.0, 0.0001, 0.003, 0.02, 0.3, 1.0])
KINDS = [checkpoint.WEIGHTS_KIND_FULL, checkpoint.WEIGHTS_KIND_ADAPTER]


@dataclass(frozen=True)
class Case:
    """Versions of one model, or of one adapter: the first one, and how much each later one changes."""

    tensors: list[tuple[str, tuple[int, ...]]]
    seed: int
    shares: list[float]
    kind: int
    far: int
    """How many versions the receivers are behind when they fetch again."""
    ranks: int = 1
    """How many publishers send a version, each a part of it."""

    def versions(self) -> list[list[Tensor]]:
        rng = np.random.default_rng(self.seed)
        made = [
            rng.integers(0, np.iinfo(ITEM[dtype]).max, shape, ITEM[dtype], endpoint=True)
            for dtype, shape in self.tensors
        ]
        found = []
        for share in [0.0, *self.shares]:
            for data in made:
                # One unit up or down, as training does, or anything at all.
                places = np.asarray(rng.random(data.shape) < share)
                change = rng.choice(np.array([1, -1, 12345]).astype(data.dtype), data.shape)
                data[...] = np.where(places, data + change, data)
            found.append(
                [
                    (f"model.{index}.weight", dtype, shape, data.copy())
                    for index, ((dtype, shape), data) in enumerate(
                        zip(self.tensors, made, strict=True)
                    )
                ]
            )
        return found


CASES = st.builds(
    Case,
    tensors=st.lists(st.tuples(st.sampled_from(list(ITEM)), SHAPES), min_size=1, max_size=7),
    seed=st.integers(0, 2**32),
    shares=st.lists(SPARSITY, min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    far=st.integers(1, 3),
    ranks=st.integers(1, 3),
)


@dataclass
class Paths:
    """A service, a relay of it, and a receiver for each way in which weights can travel."""

    learners: list[CheckpointClient]
    receivers: dict[str, CheckpointClient]
    relay: Running
    folder: Path
    step: int = 0
    bases: dict[tuple[int, int], PublishBase] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    async def publish(self, weights: list[Tensor], kind: int, ranks: int) -> checkpoint.Manifest:
        sent = [self._publish_part(weights, kind, Shard(rank, ranks)) for rank in range(ranks)]
        manifests = await asyncio.gather(*sent)
        assert all(manifest == manifests[0] for manifest in manifests)
        alone = describe(weights)
        # Tensors without elements may stand in another order where they share an offset.
        assert {t.name: t for t in manifests[0].tensors} == {t.name: t for t in alone.tensors}
        assert manifests[0].weights_digest == alone.weights_digest
        self.step += 1
        latest = self.relay.servicer.counters
        await until(lambda: latest.latest_version == manifests[0].version)
        return manifests[0]

    async def _publish_part(
        self, weights: list[Tensor], kind: int, shard: Shard
    ) -> checkpoint.Manifest:
        specs = describe(weights).tensors
        mine = range(shard.index, len(weights), shard.count)
        tensors = [weights[place] for place in mine]
        total = len(content(weights))
        manifest = describe_part(tensors, [specs[place].offset for place in mine], total)
        manifest.term, manifest.step, manifest.kind = 1, self.step, kind  # type: ignore[assignment]
        manifest.publish_id = f"step-{self.step}"
        manifest.adapter_config = '{"r": 4}' if kind == checkpoint.WEIGHTS_KIND_ADAPTER else ""
        key = (shard.index, shard.count)
        buffers = [buffer for *_, buffer in tensors]
        reply = await self.learners[shard.index].publish(
            manifest, buffers, base=self.bases.get(key), shard=shard, deadline_seconds=60
        )
        self.bases[key] = PublishBase(reply.manifest, buffers, manifest.tensors)
        return reply.manifest

    async def check(self, weights: list[Tensor], manifest: checkpoint.Manifest) -> None:
        """Every receiver stages the newest version, and has what was published."""
        expected = hashlib.sha256(content(weights)).digest()

        async def staged(path: str, client: CheckpointClient) -> None:
            found = await client.stage(
                self.folder / path, full=path == "full", deadline_seconds=60.0
            )
            data = await asyncio.to_thread(found.path.read_bytes)
            assert (path, hashlib.sha256(data).digest()) == (path, expected)
            assert found.manifest == manifest
            found.discard()
            self.used |= {f"{path}: {how}" for how, n in client.counts.transfers.items() if n}

        await asyncio.gather(*(staged(path, client) for path, client in self.receivers.items()))


@pytest.fixture
async def paths(tmp_path: Path) -> AsyncIterator[Paths]:
    async with (
        serving(tmp_path / "store", keep=5) as service,
        serving(
            tmp_path / "relay", keep=5, upstream=CheckpointClient(service.address, RUN, "relay")
        ) as relay,
        client_of(service.address, "rank-0") as first,
        client_of(service.address, "rank-1") as second,
        client_of(service.address, "rank-2") as third,
        client_of(service.address, "full") as full,
        client_of(service.address, "delta", deltas=True) as delta,
        client_of(service.address, "mapped", same_host=True) as mapped,
        client_of(relay.address, "relayed", deltas=True) as relayed,
        client_of(relay.address, "relayed in full") as relayed_full,
        client_of(relay.address, "relay's file", same_host=True) as relay_mapped,
    ):
        receivers = {
            "full": full,
            "delta": delta,
            "mapped": mapped,
            "relayed": relayed,
            "relayed-full": relayed_full,
            "relay-mapped": relay_mapped,
        }
        yield Paths([first, second, third], receivers, relay, tmp_path / "stage")


@settings(
    max_examples=25,
    deadline=None,
    # The service goes on from example to example, as in a run.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=CASES)
@example(
    case=Case([("bfloat16", (300, 111)), ("float32", ()), ("float16", (0, 2))], 0, [0.003], 1, 1)
)
async def test_weights_are_the_same_bit_for_bit_on_every_path(paths: Paths, case: Case) -> None:
    manifest = None
    for number, weights in enumerate(case.versions()):
        manifest = await paths.publish(weights, case.kind, case.ranks)
        if number == 0 or number % case.far == 0 or number == len(case.shares):
            await paths.check(weights, manifest)
    assert {"full: full", "mapped: mapped", "relay-mapped: mapped"} <= paths.used
    if case.seed == 0 and case.shares == [0.003]:
        assert {"delta: delta", "relayed: delta"} <= paths.used
