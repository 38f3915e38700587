"""The rpcs of the checkpoint service; see `protos/offbeat/v1/checkpoint.proto` for what they promise."""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from offbeat.errors import Fenced, IntegrityError, ServiceUnavailable, StreamError, WeightsError
from offbeat.failpoints import failpoint
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.chunks import MAX_CHUNK_BYTES, NO_ROOM, NoRoom, WeightsWriter, read_batch
from offbeat.weights.client import FENCED_KEY
from offbeat.weights.manifest import check, seal
from services.checkpoint.counters import Counters
from services.checkpoint.store import WEIGHTS, StoredVersion, UnknownVersion, VersionStore

log = logging.getLogger(__name__)

SERVICE_NAME = checkpoint.DESCRIPTOR.services_by_name["CheckpointService"].full_name

KEEP_RECEIVERS = 10_000
"""Receivers that are remembered; the ones that confirmed longest ago are forgotten first."""

Context = grpc.aio.ServicerContext
Reply = TypeVar("Reply")
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class VersionMark(Protocol):
    """A second memory of the run's numbers, beside this service's disk (`RedisVersionMark`)."""

    async def version_high_water(self) -> int:
        """The largest version number; 0 when there is none. Raises `ServiceUnavailable`."""

    async def raise_version_high_water(self, version: int) -> int:
        """Makes it at least `version`; returns it. Raises `ServiceUnavailable`."""

    async def newest_term(self) -> int:
        """The newest term that a learner began; 0 when there is none."""


class WrongRun(WeightsError):
    """The caller speaks of another run than the one that is served."""


class LeaseOver(WeightsError):
    """A fetch took too long. One that is merely slow goes on under a new lease, if it still can."""


STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (UnknownVersion, grpc.StatusCode.NOT_FOUND),
    (Fenced, grpc.StatusCode.FAILED_PRECONDITION),
    (WrongRun, grpc.StatusCode.FAILED_PRECONDITION),
    (IntegrityError, grpc.StatusCode.DATA_LOSS),
    (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ServiceUnavailable, grpc.StatusCode.UNAVAILABLE),
    (StreamError, grpc.StatusCode.UNAVAILABLE),
    (LeaseOver, grpc.StatusCode.ABORTED),
    (WeightsError, grpc.StatusCode.INVALID_ARGUMENT),
)
"""What an error becomes on the wire; the first that fits."""
REFUSALS = tuple(kind for kind, _ in STATUS)


def _answering(handler: Handler) -> Handler:
    """Turns the errors that a handler raises on purpose into statuses."""

    @functools.wraps(handler)
    async def answer(self: "CheckpointServicer", request: Any, context: Context) -> Any:
        try:
            return await handler(self, request, context)
        except REFUSALS as error:
            code = next(code for kind, code in STATUS if isinstance(error, kind))
            self.counters.refusals[code.name] += 1
            log.info("%s: %s (%s)", handler.__name__, error, code.name)
            trailing = ((FENCED_KEY, "1"),) if isinstance(error, Fenced) else ()
            await context.abort(code, str(error), trailing)
        except OSError as error:
            full = error.errno in NO_ROOM
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.INTERNAL
            self.counters.refusals[code.name] += 1
            hint = "free some room there" if full else "look at the disk"
            text = f"can't use {self.directory}: {error.strerror}; {hint}"
            log.error("%s: %s (%s)", handler.__name__, text, code.name)
            await context.abort(code, text)

    return answer  # type: ignore[return-value]


class CheckpointServicer(checkpoint_grpc.CheckpointServiceServicer):
    """Serves one `VersionStore`. Everything that changes it happens in `_exclusively`, one by one."""

    def __init__(
        self, store: VersionStore, *, lease_seconds: float, mark: VersionMark | None = None
    ) -> None:
        self._store = store
        self._lease_seconds = lease_seconds
        self._mark = mark
        self._ready = False
        self._closing = asyncio.Event()
        self._news = asyncio.Event()
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._receivers: dict[str, int] = {}
        self._fetched: set[tuple[str, int]] = set()
        self.counters = Counters(store)

    @property
    def directory(self) -> Path:
        """Where the versions are."""
        return self._store.directory

    async def load(self) -> None:
        """Opens the store; until then every rpc is answered UNAVAILABLE."""
        await asyncio.to_thread(self._store.open)
        self._ready = True

    def stop_watches(self) -> None:
        """Ends the streams that would never end by themselves, so that a graceful stop is quick."""
        self._closing.set()
        self._news.set()

    async def close(self) -> None:
        """Waits for changes under way and gives the store up."""
        while self._changes:
            await asyncio.wait(self._changes)
        self._store.close()

    # ---- rpcs

    @_answering
    async def AcquireLearner(
        self, request: checkpoint.AcquireLearnerRequest, context: Context
    ) -> checkpoint.AcquireLearnerResponse:
        self._check_run(request.run_id)
        floor = request.term_floor
        if self._mark is not None:
            floor = max(floor, await self._mark.newest_term())
        term = await self._exclusively(
            asyncio.to_thread(self._store.acquire_term, floor, request.version_floor)
        )
        log.info("term %d begins, of learner %s", term, request.learner_id)
        return checkpoint.AcquireLearnerResponse(
            term=term, latest_version=self.counters.latest_version
        )

    @_answering
    async def Publish(
        self, requests: AsyncIterator[checkpoint.PublishRequest], context: Context
    ) -> checkpoint.PublishResponse:
        header = await _header(requests)
        manifest = header.manifest
        self._check_publishable(header)
        self._check_term(manifest)
        if (earlier := self._existing(manifest)) is not None:
            return checkpoint.PublishResponse(manifest=earlier.manifest, existed=True)
        if self._mark is not None:
            await self._mark.version_high_water()  # Fails now rather than after the upload.
        folder = await asyncio.to_thread(self._store.begin_publish)
        try:
            await self._receive(requests, await WeightsWriter.create(folder / WEIGHTS, manifest))
            failpoint("publish.received")
            entry, existed = await self._exclusively(self._commit(folder, manifest))
        finally:
            # Shielded: the folder goes even when the stream broke in the midst of this.
            await self._exclusively(asyncio.to_thread(self._store.end_publish, folder))
        return checkpoint.PublishResponse(manifest=entry.manifest, existed=existed)

    # Streams are written with `context.write` rather than yielded: a time limit can't be put around
    # a `yield`. gRPC accepts both; the generated types know one.

    @_answering
    async def Fetch(  # type: ignore[override]
        self, request: checkpoint.FetchRequest, context: Context
    ) -> None:
        self._check_run(request.run_id)
        entry = self._store.get_available(request.version)
        if request.offset > entry.manifest.total_bytes:
            raise WeightsError(
                f"version {entry.version} has {entry.manifest.total_bytes} bytes; "
                f"can't start at byte {request.offset}"
            )
        with self._lease(entry):
            await self._check_if_suspect(request, entry)
            try:
                async with asyncio.timeout(self._lease_seconds):
                    await self._send(entry, request.offset, context)
            except TimeoutError:
                raise LeaseOver(
                    f"the fetch took over {self._lease_seconds:g} s (checkpoint.lease_seconds)"
                ) from None

    @_answering
    async def Watch(  # type: ignore[override]
        self, request: checkpoint.WatchRequest, context: Context
    ) -> None:
        self._check_run(request.run_id)
        seen = request.after_version
        self.counters.watchers += 1
        try:
            while not self._closing.is_set():
                news = self._news
                entry = self._store.latest()
                if entry is not None and entry.version > seen:
                    await context.write(_news_of(entry.manifest))
                    seen = entry.version
                else:
                    await news.wait()
        finally:
            self.counters.watchers -= 1
        raise ServiceUnavailable("the checkpoint service is stopping; connect again")

    @_answering
    async def GetManifest(
        self, request: checkpoint.GetManifestRequest, context: Context
    ) -> checkpoint.GetManifestResponse:
        self._check_run(request.run_id)
        manifest = await asyncio.to_thread(self._store.manifest, request.version)
        return checkpoint.GetManifestResponse(manifest=manifest)

    @_answering
    async def ListVersions(
        self, request: checkpoint.ListVersionsRequest, context: Context
    ) -> checkpoint.ListVersionsResponse:
        self._check_run(request.run_id)
        holders: dict[int, list[str]] = {}
        for receiver, version in sorted(self._receivers.items()):
            holders.setdefault(version, []).append(receiver)
        return checkpoint.ListVersionsResponse(
            versions=[
                _summary(entry, holders.get(entry.version, [])) for entry in self._store.versions()
            ]
        )

    @_answering
    async def Applied(
        self, request: checkpoint.AppliedRequest, context: Context
    ) -> checkpoint.AppliedResponse:
        self._check_run(request.run_id)
        if not request.receiver_id:
            raise WeightsError("receiver_id is empty; expected the name of the receiver")
        entry = self._store.get(request.version)
        if request.digest != entry.manifest.digest:
            raise IntegrityError(
                f"receiver {request.receiver_id} verified another manifest of version "
                f"{request.version} than the one that is stored"
            )
        self._receivers.pop(request.receiver_id, None)
        self._receivers[request.receiver_id] = request.version
        if len(self._receivers) > KEEP_RECEIVERS:
            del self._receivers[next(iter(self._receivers))]
        log.info(
            "%s serves version %d (parity difference %.2g, pause %.3f s)",
            request.receiver_id,
            request.version,
            request.parity_difference,
            request.pause_seconds,
        )
        return checkpoint.AppliedResponse()

    @_answering
    async def GetStatus(
        self, request: checkpoint.CheckpointServiceGetStatusRequest, context: Context
    ) -> checkpoint.CheckpointServiceGetStatusResponse:
        self._check_run(self._store.run_id)
        return checkpoint.CheckpointServiceGetStatusResponse(
            run_id=self._store.run_id,
            term=self._store.term,
            latest_version=self.counters.latest_version,
            available_versions=sum(entry.available for entry in self._store.versions()),
            stored_bytes=self.counters.stored_bytes,
            sent_bytes=self.counters.sent_bytes,
            received_bytes=self.counters.received_bytes,
            receivers=self._receivers,
        )

    # ---- publishing

    def _check_publishable(self, header: checkpoint.PublishHeader) -> None:
        self._check_run(header.manifest.run_id)
        if header.shard_count > 1 or header.shard_index:
            raise WeightsError(
                f"part {header.shard_index} of {header.shard_count}: only whole publishes are "
                "accepted (shard_count 0 or 1)"
            )
        if header.encoding not in (
            checkpoint.WEIGHTS_ENCODING_UNSPECIFIED,
            checkpoint.WEIGHTS_ENCODING_RAW,
        ):
            raise WeightsError(f"encoding {header.encoding} is not accepted; send RAW (1)")
        if header.manifest.kind not in (
            checkpoint.WEIGHTS_KIND_FULL,
            checkpoint.WEIGHTS_KIND_ADAPTER,
        ):
            raise WeightsError(f"kind is {header.manifest.kind}; expected FULL (1) or ADAPTER (2)")
        if header.manifest.term == 0:
            raise WeightsError("term is 0; expected the one that AcquireLearner returned")
        check(header.manifest)

    def _check_term(self, manifest: checkpoint.Manifest) -> None:
        if manifest.term < self._store.term:
            raise Fenced(
                f"term {manifest.term} is over, the current one is {self._store.term}: "
                "a newer learner has taken over; this one must stop"
            )

    def _existing(self, manifest: checkpoint.Manifest) -> StoredVersion | None:
        return self._store.find(manifest.term, manifest.step, manifest.weights_digest)

    async def _receive(
        self, requests: AsyncIterator[checkpoint.PublishRequest], writer: WeightsWriter
    ) -> None:
        async for request in requests:
            if request.WhichOneof("part") != "chunk":
                raise WeightsError("expected a chunk after the header, found something else")
            chunk = request.chunk
            data = chunk.data
            if chunk.offset != writer.position:
                raise WeightsError(
                    f"expected a chunk at byte {writer.position}, found one at {chunk.offset}"
                )
            if len(data) > MAX_CHUNK_BYTES:
                raise WeightsError(
                    f"a chunk has {len(data)} bytes; at most {MAX_CHUNK_BYTES} are accepted"
                )
            await writer.add(data)
            self.counters.received_bytes += len(data)
        if writer.position < writer.total:
            raise WeightsError(f"the stream ended at byte {writer.position} of {writer.total}")
        await writer.finish()

    async def _commit(
        self, folder: Path, manifest: checkpoint.Manifest
    ) -> tuple[StoredVersion, bool]:
        """Numbers, seals and stores a version that was received. Runs exclusively."""
        self._check_term(manifest)  # A newer learner may have come during the upload.
        if (entry := self._existing(manifest)) is not None:
            return entry, True
        await asyncio.to_thread(self._store.raise_term, manifest.term)
        manifest.version = await self._next_number()
        manifest.created_unix_ms = time.time_ns() // 1_000_000
        seal(manifest)
        failpoint("publish.marked")
        entry = await asyncio.to_thread(self._store.commit, folder, manifest)
        self.counters.published += 1
        self._announce()
        failpoint("publish.committed")
        log.info(
            "version %d: step %d of term %d, %d bytes",
            entry.version,
            manifest.step,
            manifest.term,
            manifest.total_bytes,
        )
        await asyncio.to_thread(self._store.prune)
        return entry, False

    async def _next_number(self) -> int:
        """A number above all that the disk or the mark has seen; the mark is raised first."""
        if self._mark is None:
            return self._store.last_number + 1
        number = max(self._store.last_number, await self._mark.version_high_water()) + 1
        await self._mark.raise_version_high_water(number)
        return number

    def _announce(self) -> None:
        """Wakes all watchers."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    # ---- fetching

    @contextmanager
    def _lease(self, entry: StoredVersion) -> Iterator[None]:
        """Keeps the version's bytes; retention looks again once the last lease ends."""
        entry.leases += 1
        try:
            yield
        finally:
            entry.leases -= 1
            if entry.leases == 0:
                self._start(asyncio.to_thread(self._store.prune))

    async def _check_if_suspect(
        self, request: checkpoint.FetchRequest, entry: StoredVersion
    ) -> None:
        """Reads the stored bytes once more when a receiver starts over, maybe for a wrong hash."""
        if request.offset:
            return
        key = (request.receiver_id, entry.version)
        if key in self._fetched:
            await self._exclusively(asyncio.to_thread(self._store.verify, entry))
        self._fetched.add(key)
        if len(self._fetched) > KEEP_RECEIVERS:
            self._fetched.clear()

    async def _send(self, entry: StoredVersion, offset: int, context: Context) -> None:
        total = entry.manifest.total_bytes
        header = checkpoint.FetchHeader(
            manifest=entry.manifest,
            encoding=checkpoint.WEIGHTS_ENCODING_RAW,
            transfer_bytes=total - offset,
        )
        await context.write(checkpoint.FetchResponse(header=header))
        while offset < total:
            for data in await asyncio.to_thread(self._read, entry, offset):
                chunk = checkpoint.WeightsChunk(offset=offset, data=data)
                await context.write(checkpoint.FetchResponse(chunk=chunk))
                offset += len(data)
                self.counters.sent_bytes += len(data)

    @staticmethod
    def _read(entry: StoredVersion, offset: int) -> list[bytes]:
        try:
            return read_batch(entry.weights, offset, entry.manifest.total_bytes)
        except FileNotFoundError:
            raise UnknownVersion(f"the bytes of version {entry.version} are gone") from None

    # ---- the rest

    def _check_run(self, run_id: str) -> None:
        if not self._ready:
            raise ServiceUnavailable("the checkpoint service is still loading; try again")
        if run_id != self._store.run_id:
            raise WrongRun(
                f"this service keeps the weights of run {self._store.run_id!r}, not of {run_id!r}: "
                "check the address, or the run.id of the recipe"
            )

    async def _exclusively(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Does `work` when no other change is under way, to its end even if the caller goes away."""
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, Reply]) -> "asyncio.Task[Reply]":
        async def alone() -> Reply:
            async with self._changing:
                return await work

        task = asyncio.create_task(alone())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        # Marks an error as seen: its reader may be gone.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


async def _header(requests: AsyncIterator[checkpoint.PublishRequest]) -> checkpoint.PublishHeader:
    async for request in requests:
        if request.WhichOneof("part") == "header":
            return request.header
        break
    raise WeightsError("expected a header as the first message of a publish, found none")


def _news_of(manifest: checkpoint.Manifest) -> checkpoint.WatchResponse:
    return checkpoint.WatchResponse(
        version=manifest.version,
        step=manifest.step,
        term=manifest.term,
        digest=manifest.digest,
        total_bytes=manifest.total_bytes,
    )


def _summary(entry: StoredVersion, receivers: list[str]) -> checkpoint.VersionSummary:
    manifest = entry.manifest
    return checkpoint.VersionSummary(
        version=manifest.version,
        parent=manifest.parent,
        term=manifest.term,
        step=manifest.step,
        total_bytes=manifest.total_bytes,
        digest=manifest.digest,
        created_unix_ms=manifest.created_unix_ms,
        available=entry.available,
        leases=entry.leases,
        receivers=receivers,
    )
