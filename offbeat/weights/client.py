"""The client of the checkpoint service, for learners and for receivers of weights.

Every wait has a deadline, and there is one retry layer: this one. What the service says becomes an
error of `offbeat.errors`:

- `ServiceUnavailable`: no answer within the deadline;
- `Fenced`: a newer learner has taken over;
- `IntegrityError`: bytes do not match their hash, again after a second try from the start;
- `VersionGone`: there is no such version (any more);
- `WeightsError`: anything else that the service refuses; the text is the service's.
"""

import asyncio
import logging
import os
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc

from offbeat import rpc
from offbeat.errors import Fenced, IntegrityError, OffbeatError, ServiceUnavailable, WeightsError
from offbeat.failpoints import failpoint
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.chunks import WeightsWriter, chunks
from offbeat.weights.manifest import Buffer, as_bytes, check, check_sealed
from offbeat.weights.staged import StagedWeights

log = logging.getLogger(__name__)

FENCED_KEY = "offbeat-fenced"
"""Trailing metadata of a refusal whose cause is an older term."""

BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,  # by a server that stops; our own end raises asyncio's error
    grpc.StatusCode.INTERNAL,  # a stream that was reset
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Statuses after which a transfer is taken up again while there is time."""

HOPELESS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses that no amount of waiting changes."""

Reply = TypeVar("Reply")


class VersionGone(WeightsError):
    """The version does not exist, or not any more. A receiver goes on with the newest one."""


class CheckpointClient:
    """Speaks with the checkpoint service at `address` about one run.

    `receiver_id` names this process in the service's status; a learner may give its own name.
    """

    def __init__(self, address: str, run_id: str, receiver_id: str) -> None:
        self.address = address
        self.run_id = run_id
        self.receiver_id = receiver_id
        self._channel = rpc.connect(address)
        self._stub = checkpoint_grpc.CheckpointServiceStub(self._channel)

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
        deadline_seconds: float,
    ) -> checkpoint.PublishResponse:
        """Publishes the tensors that `manifest.describe` described, from the same buffers.

        The caller has set term, parent, step and so on; the run, and a publish id when there is
        none, are filled in. A broken publish is made again, under the same id, until the deadline.
        The buffers must not change meanwhile.
        """
        complete = checkpoint.Manifest()
        complete.CopyFrom(manifest)
        complete.run_id = self.run_id
        complete.publish_id = manifest.publish_id or uuid.uuid4().hex
        check(complete)
        views = [as_bytes(buffer) for buffer in buffers]
        sizes = [len(view) for view in views]
        if sizes != [spec.nbytes for spec in complete.tensors]:
            raise WeightsError("the buffers are not those that the manifest describes")
        retry = _Retry(f"Publish of step {manifest.step}", self.address, deadline_seconds)
        corrupted = False
        while True:
            try:
                stream = _publish_requests(complete, views)
                return await self._stub.Publish(stream, timeout=retry.left())
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DATA_LOSS and not corrupted:
                    corrupted = True
                    log.warning(
                        "publish of step %d: %s; trying again", manifest.step, error.details()
                    )
                    continue
                await retry.after(error)

    async def stage(
        self, directory: Path, *, version: int = 0, deadline_seconds: float
    ) -> StagedWeights:
        """Fetches a version (0: the newest) into `directory`/<version>.weights and verifies it.

        A broken fetch goes on at the byte where it broke. Bytes that don't match are fetched once
        more from the start. On failure no file is left. Raises at once when the folder has no room
        (`chunks.NoRoom`) or the version is not there (`VersionGone`); when the newest was asked for
        and is replaced during an interruption, the then newest is fetched.
        """
        directory.mkdir(parents=True, exist_ok=True)
        retry = _Retry(f"Fetch of version {version or '(newest)'}", self.address, deadline_seconds)
        corrupted = False
        while True:
            transfer = _Transfer(directory, version)
            try:
                return await self._fetch(transfer, retry)
            except VersionGone as error:
                if version or not transfer.begun:
                    raise
                log.info("%s; fetching the newest version instead", error)
            except IntegrityError as error:
                if corrupted:
                    raise
                corrupted = True
                log.warning("%s; fetching from the start again", error)
            finally:
                transfer.clean_up()

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
                    raise _translated(error, "Watch", self.address) from error
                log.debug("watch of %s broke: %s", self.address, error.details())
            finally:
                call.cancel()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2.0, pause * 2)

    async def get_manifest(
        self, version: int = 0, *, deadline_seconds: float = 60.0
    ) -> checkpoint.Manifest:
        """The verified manifest of a version (0: the newest), also when its bytes are gone."""
        request = checkpoint.GetManifestRequest(run_id=self.run_id, version=version)
        response = await self._call(
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
        """Closes the channel; calls under way are cancelled."""
        await self._channel.close()

    async def _call(
        self, what: str, attempt: Callable[[float], Awaitable[Reply]], deadline_seconds: float
    ) -> Reply:
        try:
            return await rpc.call(what, self.address, attempt, deadline_seconds=deadline_seconds)
        except grpc.aio.AioRpcError as error:
            raise _translated(error, what, self.address) from error

    async def _fetch(self, transfer: "_Transfer", retry: "_Retry") -> StagedWeights:
        while not await self._go_on(transfer, retry):
            pass
        return await transfer.complete()

    async def _go_on(self, transfer: "_Transfer", retry: "_Retry") -> bool:
        """Receives from where the transfer stands. False when the stream broke and may go on."""
        request = checkpoint.FetchRequest(
            run_id=self.run_id,
            version=transfer.version,
            offset=transfer.position,
            accepted=[checkpoint.WEIGHTS_ENCODING_RAW],
            receiver_id=self.receiver_id,
        )
        before = transfer.position
        call = self._stub.Fetch(request, timeout=retry.left())
        try:
            async for response in call:
                await transfer.take(response)
        except grpc.aio.AioRpcError as error:
            if transfer.position > before:
                retry.reset()
            await retry.after(error)
            return False
        finally:
            call.cancel()
        return True


class _Transfer:
    """One version on its way into a folder."""

    def __init__(self, directory: Path, version: int) -> None:
        self.version = version
        self._directory = directory
        self._partial = directory / f".{uuid.uuid4().hex}.partial"
        self._manifest: checkpoint.Manifest | None = None
        self._writer: WeightsWriter | None = None

    @property
    def begun(self) -> bool:
        """Whether the service has sent anything."""
        return self._manifest is not None

    @property
    def position(self) -> int:
        """First byte that is still to come."""
        return 0 if self._writer is None else self._writer.position

    async def take(self, response: checkpoint.FetchResponse) -> None:
        """Takes the next message of the stream."""
        if response.WhichOneof("part") == "header":
            await self._begin(response.header)
            return
        if self._writer is None:
            raise WeightsError("the checkpoint service sent bytes before their header")
        chunk = response.chunk
        if chunk.offset != self._writer.position:
            raise IntegrityError(
                f"version {self.version}: expected byte {self._writer.position} next, "
                f"found byte {chunk.offset}"
            )
        await self._writer.add(chunk.data)

    async def complete(self) -> StagedWeights:
        """The staged weights, once every hash was found right."""
        if self._writer is None or self._manifest is None:
            raise IntegrityError("the checkpoint service sent no header")
        await self._writer.finish()
        path = self._directory / f"{self.version}.weights"
        os.replace(self._partial, path)
        return StagedWeights(path, self._manifest)

    def clean_up(self) -> None:
        """Removes what an incomplete transfer has left."""
        self._partial.unlink(missing_ok=True)

    async def _begin(self, header: checkpoint.FetchHeader) -> None:
        """The first header starts the file; those of later attempts must speak of the same one."""
        manifest = header.manifest
        if self._manifest is None:
            check_sealed(manifest)
            self._manifest = manifest
            self.version = manifest.version
            self._writer = await WeightsWriter.create(self._partial, manifest)
        elif manifest.digest != self._manifest.digest:
            raise IntegrityError(f"version {self.version} changed during its fetch")


class _Retry:
    """The deadline of a transfer and the growing pause between its attempts."""

    def __init__(self, what: str, address: str, deadline_seconds: float) -> None:
        self._what = what
        self._address = address
        self._total = deadline_seconds
        self._end = asyncio.get_running_loop().time() + deadline_seconds
        self._pause = 0.05
        self._refusal: grpc.aio.AioRpcError | None = None

    def left(self) -> float:
        """Seconds until the deadline; a call's timeout."""
        return max(0.001, self._end - asyncio.get_running_loop().time())

    def reset(self) -> None:
        """Makes the next pause short again: there was progress."""
        self._pause = 0.05

    async def after(self, error: grpc.aio.AioRpcError) -> None:
        """Pauses before the next attempt, or raises what `error` and the deadline mean."""
        expired = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if error.code() not in BROKEN and not expired:
            raise _translated(error, self._what, self._address) from error
        if not expired:
            self._refusal = error
        if self.left() <= self._pause:
            # An attempt that merely ran out of time says less than the one before it.
            error = self._refusal or error
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise _translated(error, self._what, self._address) from error
            raise ServiceUnavailable(
                f"{self._what} at {self._address} did not end within {self._total:g} s (last "
                f"answer: {error.code().name} {error.details() or ''}); is the service running?"
            ) from error
        full = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        level = logging.WARNING if full else logging.INFO
        log.log(level, "%s at %s: %s; going on", self._what, self._address, error.details())
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2.0, self._pause * 2)


async def _publish_requests(
    manifest: checkpoint.Manifest, views: Sequence[memoryview]
) -> AsyncIterator[checkpoint.PublishRequest]:
    yield checkpoint.PublishRequest(
        header=checkpoint.PublishHeader(
            manifest=manifest, shard_count=1, encoding=checkpoint.WEIGHTS_ENCODING_RAW
        )
    )
    offset = 0
    for data in chunks(views):
        yield checkpoint.PublishRequest(chunk=checkpoint.WeightsChunk(offset=offset, data=data))
        offset += len(data)
        failpoint("publish.sending")


def _translated(error: grpc.aio.AioRpcError, what: str, address: str) -> OffbeatError:
    """The error of `offbeat.errors` that a final status stands for."""
    text = f"{what} at {address}: {error.details() or error.code().name}"
    if error.code() == grpc.StatusCode.DATA_LOSS:
        return IntegrityError(text)
    if error.code() == grpc.StatusCode.NOT_FOUND:
        return VersionGone(text)
    if any(key == FENCED_KEY for key, _ in error.trailing_metadata() or ()):
        return Fenced(text)
    return WeightsError(text)
