"""The client of the checkpoint service, for learners and for receivers of weights.

Every wait has a deadline, and there is one retry layer (`retry`). What the service says becomes an
error of `offbeat.errors`:

- `ServiceUnavailable`: no answer within the deadline;
- `Fenced`: a newer learner has taken over;
- `IntegrityError`: bytes do not match their hash, again after a second try from the start;
- `VersionGone`: there is no such version (any more);
- `WeightsError`: anything else that the service refuses; the text is the service's.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from offbeat import rpc
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.connection import Connection, TransferCounts
from offbeat.weights.download import Downloader
from offbeat.weights.incoming import Received
from offbeat.weights.manifest import Buffer, check_sealed
from offbeat.weights.retry import HOPELESS, VersionGone, translated
from offbeat.weights.staged import StagedWeights
from offbeat.weights.upload import WHOLE, PublishBase, Shard, Uploader

__all__ = ["CheckpointClient", "PublishBase", "Shard", "VersionGone"]

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")


class CheckpointClient:
    """Speaks with the checkpoint service about one run.

    `addresses`: HOST:PORT of the service, or of several that have the same versions (relays, and
    the service itself): the next one is used once the one in use can't be reached. `receiver_id`
    names this process in the service's status; a learner may give its own name. `deltas`: keep the
    staged weights on this host, and fetch only what changed since. `same_host`: use the service's
    own file where this process sees it.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        run_id: str,
        receiver_id: str,
        *,
        deltas: bool = False,
        same_host: bool = False,
    ) -> None:
        self.run_id = run_id
        self.receiver_id = receiver_id
        self._connection = Connection(addresses)
        self._uploader = Uploader(self._connection, run_id)
        self._downloader = Downloader(
            self._connection, run_id, receiver_id, deltas=deltas, same_host=same_host
        )

    @property
    def address(self) -> str:
        """HOST:PORT of the service in use."""
        return self._connection.address

    @property
    def counts(self) -> TransferCounts:
        """What was transferred so far."""
        return self._connection.counts

    @property
    def _stub(self) -> Any:  # the generated types of the stub's asyncio form need a cast each time
        return checkpoint_grpc.CheckpointServiceStub(self._connection.channel)

    async def acquire_learner(
        self,
        learner_id: str,
        *,
        term_floor: int = 0,
        version_floor: int = 0,
        deadline_seconds: float = 60.0,
    ) -> checkpoint.AcquireLearnerResponse:
        """A term above every earlier one and above `term_floor`. From now on older ones are refused.

        A repeated call skips a term, which does no harm.
        """
        request = checkpoint.AcquireLearnerRequest(
            run_id=self.run_id,
            learner_id=learner_id,
            term_floor=term_floor,
            version_floor=version_floor,
        )
        return await self._call(
            "AcquireLearner",
            lambda t: self._stub.AcquireLearner(request, timeout=t),
            deadline_seconds,
        )

    async def publish(
        self,
        manifest: checkpoint.Manifest,
        buffers: Sequence[Buffer],
        *,
        base: PublishBase | None = None,
        shard: Shard = WHOLE,
        deadline_seconds: float,
    ) -> checkpoint.PublishResponse:
        """Publishes a version, or a part of one; see `Uploader.publish`."""
        return await self._uploader.publish(
            manifest, buffers, base=base, shard=shard, deadline_seconds=deadline_seconds
        )

    async def stage(
        self, directory: Path, *, version: int = 0, full: bool = False, deadline_seconds: float
    ) -> StagedWeights:
        """Fetches and verifies a version; see `Downloader.stage`."""
        return await self._downloader.stage(
            directory, version=version, full=full, deadline_seconds=deadline_seconds
        )

    async def receive(
        self,
        directory: Path,
        *,
        version: int = 0,
        base: checkpoint.Manifest | None = None,
        deadline_seconds: float,
    ) -> Received:
        """What `stage` fetches, before a delta is applied; see `Downloader.receive`."""
        return await self._downloader.receive(
            directory, version=version, base=base, deadline_seconds=deadline_seconds
        )

    async def watch(self, after_version: int = 0) -> AsyncIterator[checkpoint.WatchResponse]:
        """Yields each newer version once, for ever; a slow reader misses versions in between.

        Connects again, with a growing pause, when the service is away.
        """
        seen = after_version
        pause = 0.1
        while True:
            request = checkpoint.WatchRequest(
                run_id=self.run_id, after_version=seen, receiver_id=self.receiver_id
            )
            call = self._stub.Watch(request)
            try:
                async for news in call:
                    pause = 0.1
                    if news.version > seen:
                        seen = news.version
                        yield news
            except grpc.aio.AioRpcError as error:
                if error.code() in HOPELESS:
                    raise translated(error, "Watch", self.address) from error
                log.debug("watch of %s broke: %s", self.address, error.details())
                self._connection.turn(error)
            finally:
                call.cancel()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2.0, pause * 2)

    async def get_manifest(
        self, version: int = 0, *, deadline_seconds: float = 60.0
    ) -> checkpoint.Manifest:
        """The verified manifest of a version (0: the newest), also when its bytes are gone."""
        request = checkpoint.GetManifestRequest(run_id=self.run_id, version=version)
        response: checkpoint.GetManifestResponse = await self._call(
            "GetManifest", lambda t: self._stub.GetManifest(request, timeout=t), deadline_seconds
        )
        check_sealed(response.manifest)
        return response.manifest

    async def list_versions(
        self, *, deadline_seconds: float = 60.0
    ) -> list[checkpoint.VersionSummary]:
        """All versions, oldest first."""
        request = checkpoint.ListVersionsRequest(run_id=self.run_id)
        response = await self._call(
            "ListVersions", lambda t: self._stub.ListVersions(request, timeout=t), deadline_seconds
        )
        return list(response.versions)

    async def applied(
        self,
        manifest: checkpoint.Manifest,
        parity_difference: float,
        pause_seconds: float,
        *,
        deadline_seconds: float = 60.0,
    ) -> None:
        """Confirms that this receiver serves with the version and that its parity check passed."""
        request = checkpoint.AppliedRequest(
            run_id=self.run_id,
            receiver_id=self.receiver_id,
            version=manifest.version,
            digest=manifest.digest,
            parity_difference=parity_difference,
            pause_seconds=pause_seconds,
        )
        await self.forward_applied(request, deadline_seconds=deadline_seconds)

    async def forward_applied(
        self, request: checkpoint.AppliedRequest, *, deadline_seconds: float
    ) -> None:
        """The same for another receiver, whose request this is: a relay's."""
        await self._call(
            "Applied", lambda t: self._stub.Applied(request, timeout=t), deadline_seconds
        )

    async def status(
        self, *, deadline_seconds: float = 60.0
    ) -> checkpoint.CheckpointServiceGetStatusResponse:
        """Counters and receivers."""
        request = checkpoint.CheckpointServiceGetStatusRequest()
        return await self._call(
            "GetStatus", lambda t: self._stub.GetStatus(request, timeout=t), deadline_seconds
        )

    async def close(self) -> None:
        """Closes the channels, whereby calls under way are cancelled, and removes the held file."""
        self._downloader.drop_held(at_once=True)
        await self._connection.close()

    async def _call(
        self, what: str, attempt: Callable[[float], Awaitable[Reply]], deadline_seconds: float
    ) -> Reply:
        async def turning(seconds: float) -> Reply:
            try:
                return await attempt(seconds)
            except grpc.aio.AioRpcError as error:
                self._connection.turn(error)
                raise

        try:
            return await rpc.call(what, self.address, turning, deadline_seconds=deadline_seconds)
        except grpc.aio.AioRpcError as error:
            raise translated(error, what, self.address) from error
