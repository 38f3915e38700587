"""The rpcs of the checkpoint service; see `protos/offbeat/v1/checkpoint.proto` for what they promise."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from offbeat.errors import IntegrityError, ServiceUnavailable, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.client import CheckpointClient
from offbeat.weights.connection import SERVICE as SERVICE_NAME
from services.checkpoint.answers import Context, NotHere, WrongRun, answering
from services.checkpoint.changes import Changes
from services.checkpoint.counters import Counters
from services.checkpoint.deltas import Deltas
from services.checkpoint.fetching import Fetcher
from services.checkpoint.mirror import Mirror
from services.checkpoint.publishing import Publisher, VersionMark
from services.checkpoint.store import StoredVersion, VersionStore

__all__ = ["SERVICE_NAME", "CheckpointServicer", "VersionMark", "add_to_server"]

log = logging.getLogger(__name__)

SKIPPED = 1000
"""Numbers of versions, or more than a learner publishes between two events of its ledger."""
KEEP_RECEIVERS = 10_000
"""Receivers that are remembered; the ones that confirmed longest ago are forgotten first."""


def add_to_server(servicer: "CheckpointServicer", server: grpc.aio.Server) -> None:
    """Registers the rpcs. Messages with weights are read and written by hand (`weights.frames`)."""
    raw = {
        "Publish": grpc.stream_unary_rpc_method_handler(
            servicer.Publish,
            response_serializer=checkpoint.PublishResponse.SerializeToString,
        ),
        "Fetch": grpc.unary_stream_rpc_method_handler(
            servicer.Fetch, request_deserializer=checkpoint.FetchRequest.FromString
        ),
    }
    checkpoint_grpc.add_CheckpointServiceServicer_to_server(servicer, server)
    # The last handlers that were registered for a method are the ones that are called.
    server.add_registered_method_handlers(SERVICE_NAME, raw)


class CheckpointServicer(checkpoint_grpc.CheckpointServiceServicer):
    """Serves one `VersionStore`."""

    def __init__(
        self,
        store: VersionStore,
        *,
        lease_seconds: float,
        mark: VersionMark | None = None,
        deltas: bool = True,
        lend_files: bool = True,
        upstream: CheckpointClient | None = None,
    ) -> None:
        self._store = store
        self._mark = mark
        self._ready = False
        self._closing = asyncio.Event()
        self._changes = Changes()
        self._receivers: dict[str, int] = {}
        self._deltas = Deltas(store, self._written) if deltas else None
        self.counters = Counters(store, self._deltas)
        self._publisher = Publisher(
            store, self._changes, self.counters, mark=mark, deltas=self._deltas
        )
        self._fetcher = Fetcher(
            store,
            self._changes,
            self.counters,
            lease_seconds=lease_seconds,
            deltas=self._deltas,
            written=self._written,
            lend_files=lend_files,
            closing=self._closing,
        )

        self._mirror = None
        if upstream is not None:
            self._mirror = Mirror(upstream, store, self._publisher, deltas=deltas)
        self._mirroring: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Path:
        """Where the versions are."""
        return self._store.directory

    async def load(self) -> None:
        """Opens the store; until then every rpc is answered UNAVAILABLE."""
        await asyncio.to_thread(self._store.open)
        self._ready = True
        if self._mirror is not None:
            self._mirroring = asyncio.create_task(self._mirror.run(), name="mirror")

    @property
    def mirroring(self) -> "asyncio.Task[None] | None":
        """What a relay does all the time; it ends only by an error."""
        return self._mirroring

    def stop_watches(self) -> None:
        """Ends the streams that would never end by themselves, so that a graceful stop is quick."""
        self._closing.set()
        self._publisher.announce()

    async def close(self) -> None:
        """Waits for changes under way and gives the store up."""
        if self._mirroring is not None:
            self._mirroring.cancel()
            await asyncio.wait([self._mirroring])
        if self._mirror is not None:
            await self._mirror.close()
        await self._changes.close()
        if self._deltas is not None:
            await self._deltas.close()
        self._store.close()

    async def _written(self, entry: StoredVersion) -> None:
        await self._publisher.written(entry)

    # ---- rpcs

    @answering
    async def AcquireLearner(
        self, request: checkpoint.AcquireLearnerRequest, context: Context
    ) -> checkpoint.AcquireLearnerResponse:
        self._check_run(request.run_id)
        self._check_not_relay()
        floor, known = request.term_floor, self._store.last_number
        if self._mark is not None:
            floor = max(floor, await self._mark.newest_term())
            known = max(known, await self._mark.version_high_water())
        newest = request.version_floor
        if newest > known:
            # The memory of this service is gone. The last learner may have published versions that it could not note
            # any more, and generators may hold them: their numbers are passed over.
            log.warning("version %d is not known here: numbers go on %d later", newest, SKIPPED)
            newest += SKIPPED
        term = await self._changes.exclusively(
            asyncio.to_thread(self._store.acquire_term, floor, newest)
        )
        log.info("term %d begins, of learner %s", term, request.learner_id)
        return checkpoint.AcquireLearnerResponse(
            term=term, latest_version=self.counters.latest_version
        )

    # gRPC hands the messages of the two large streams over as bytes, which the generated types don't know.

    @answering
    async def Publish(  # type: ignore[override]
        self, requests: AsyncIterator[bytes], context: Context
    ) -> checkpoint.PublishResponse:
        header = await _header(requests)
        self._check_run(header.manifest.run_id)
        self._check_not_relay()
        entry, existed = await self._publisher.publish(header, requests)
        return checkpoint.PublishResponse(manifest=entry.manifest, existed=existed)

    # Streams are written with `context.write` rather than yielded: a time limit can't be put around
    # a `yield`. gRPC accepts both; the generated types know one.

    @answering
    async def Fetch(  # type: ignore[override]
        self, request: checkpoint.FetchRequest, context: Context
    ) -> None:
        self._check_run(request.run_id)
        if self._mirror is not None:
            entry = await self._mirror.get(request.version)
        else:
            entry = self._store.get_available(request.version)
        await self._fetcher.send(request, entry, context)

    @answering
    async def Watch(  # type: ignore[override]
        self, request: checkpoint.WatchRequest, context: Context
    ) -> None:
        self._check_run(request.run_id)
        seen = request.after_version
        self.counters.watchers += 1
        try:
            while not self._closing.is_set():
                news = self._publisher.news
                entry = self._store.latest()
                if entry is not None and entry.version > seen:
                    await context.write(_news_of(entry.manifest))
                    seen = entry.version
                else:
                    await news.wait()
        finally:
            self.counters.watchers -= 1
        raise ServiceUnavailable("the checkpoint service is stopping; connect again")

    @answering
    async def GetManifest(
        self, request: checkpoint.GetManifestRequest, context: Context
    ) -> checkpoint.GetManifestResponse:
        self._check_run(request.run_id)
        if self._mirror is not None:
            return checkpoint.GetManifestResponse(
                manifest=(await self._mirror.get(request.version)).manifest
            )
        manifest = await asyncio.to_thread(self._store.manifest, request.version)
        return checkpoint.GetManifestResponse(manifest=manifest)

    @answering
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

    @answering
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
        if self._mirror is not None:
            self._changes.keep(self._mirror.applied(request))
        return checkpoint.AppliedResponse()

    @answering
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
            upstream=self._mirror.upstream if self._mirror is not None else "",
        )

    # ---- the rest

    def _check_not_relay(self) -> None:
        if self._mirror is not None:
            raise NotHere(
                f"this is a relay of the checkpoint service at {self._mirror.upstream}: publish there"
            )

    def _check_run(self, run_id: str) -> None:
        if not self._ready:
            raise ServiceUnavailable("the checkpoint service is still loading; try again")
        if run_id != self._store.run_id:
            raise WrongRun(
                f"this service keeps the weights of run {self._store.run_id!r}, not of {run_id!r}: "
                "check the address, or the run.id of the recipe"
            )


async def _header(requests: AsyncIterator[bytes]) -> checkpoint.PublishHeader:
    async for message in requests:
        request = checkpoint.PublishRequest.FromString(message)
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
