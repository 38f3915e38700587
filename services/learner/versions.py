"""The learner's versions at the checkpoint service: published, and again when that service has lost them.

Used by `coordinator`, on its event loop. The service keeps weights as a cache; the learner can upload them again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ServiceUnavailable, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient, PublishBase, Shard
from offbeat.weights.manifest import describe, describe_part
from services.learner.cohorts import Lineage
from services.learner.snapshot import Part

log = logging.getLogger(__name__)

PUBLISH_SECONDS = 600.0
"""Longest time for a publish, restarts of the checkpoint service included."""
LOOK_SECONDS = 10.0
"""How often the service is asked whether it still has the newest version."""


@dataclass(frozen=True)
class Publication:
    """Weights to publish: the manifest but for its tensors, and name, dtype, shape and bytes of each tensor.

    `part`: when the tensors are only some of the version's, and other ranks publish the rest.
    """

    manifest: checkpoint.Manifest
    tensors: list[tuple[str, str, tuple[int, ...], memoryview]]
    part: Part | None = None

    @property
    def buffers(self) -> list[Any]:
        """The bytes of each tensor."""
        return [buffer for *_, buffer in self.tensors]

    def describe(self) -> checkpoint.Manifest:
        """The manifest of the tensors. Blocking: all bytes are hashed."""
        if self.part is None:
            return describe(self.tensors)
        return describe_part(self.tensors, self.part.offsets, self.part.total_bytes)


OnPublish = Callable[[int, Publication, float], None]
"""Is told version, publication, and the seconds that it took."""


class Versions:
    """Publishes versions. `keep`: the newest one's bytes are kept, for a delta to the next and for a second upload."""

    def __init__(self, client: CheckpointClient, lineage: Lineage, *, keep: bool) -> None:
        self._client = client
        self._lineage = lineage
        self._keep = keep
        self._busy = asyncio.Lock()
        self._base: PublishBase | None = None
        self._newest: Publication | None = None
        self.term = 0
        self.on_publish: OnPublish = lambda version, publication, seconds: None

    async def acquire(self, learner_id: str, *, term_floor: int, version_floor: int) -> int:
        """A new term, above every other one."""
        reply = await self._client.acquire_learner(
            learner_id,
            term_floor=term_floor,
            version_floor=max(version_floor, *self._lineage.versions, 0),
        )
        self.term = reply.term
        return self.term

    async def publish(self, publication: Publication) -> int:
        """Publishes weights; returns their version, which is in the lineage then."""
        began = time.monotonic()
        # Hashing takes longer than anything else here, and needs neither this loop nor the thread that trains.
        publication.manifest.MergeFrom(await asyncio.to_thread(publication.describe))
        async with self._busy:
            version = await self._publish(publication, self._base)
        self.on_publish(version, publication, time.monotonic() - began)
        return version

    async def _publish(self, publication: Publication, base: PublishBase | None) -> int:
        given = publication.manifest
        given.term = self.term
        given.parent = max(self._lineage.versions, default=0)
        part = publication.part
        reply = await self._client.publish(
            given,
            publication.buffers,
            base=base,
            shard=Shard() if part is None else Shard(part.index, part.count),
            deadline_seconds=PUBLISH_SECONDS,
        )
        if self._keep:
            own = None if part is None else given.tensors
            self._base = PublishBase(reply.manifest, publication.buffers, own)
            # A part alone is no version: the other ranks don't know that theirs is wanted again.
            self._newest = publication if part is None else None
        version = int(reply.manifest.version)
        self._lineage.add(version, given.step, given.update)
        return version

    async def settled(self) -> None:
        """Returns once no publish is under way."""
        async with self._busy:
            pass

    async def guard(self, told: Callable[[int, Publication], Awaitable[None]]) -> None:
        """For ever: publishes the newest version again when the service has lost it. `told` is then called.

        Raises `WeightsError` when its bytes were not kept.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                async with self._busy:
                    lost = await self._lost()
                    if lost is None:
                        continue
                    version = await self._publish(lost, None)
            except ServiceUnavailable as error:
                log.warning("is the newest version still there? %s", error)
                continue
            await told(version, lost)

    async def _lost(self) -> Publication | None:
        """The newest version, when the service does not have it any more."""
        newest = max(self._lineage.versions)
        status = await self._client.status(deadline_seconds=LOOK_SECONDS)
        if status.latest_version >= newest:
            return None
        text = f"the checkpoint service has lost version {newest}, its newest one is {status.latest_version}"
        if self._newest is None:
            raise WeightsError(
                f"{text}; this learner kept no copy of it (checkpoint.deltas is off, or each rank has a part), so it "
                "must go on from its last checkpoint"
            )
        log.error("%s; publishing it again", text)
        return self._newest
