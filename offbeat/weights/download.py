"""Fetching: brings versions onto this host, verified and ready to be loaded. The client's `stage` and `receive`."""

import logging
from pathlib import Path
from typing import Any

import grpc

from offbeat.errors import IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.connection import SERVICE, Connection
from offbeat.weights.frames import DamagedChunk
from offbeat.weights.incoming import (
    DELTA,
    MAPPED,
    RAW,
    Delta,
    FullFile,
    Incoming,
    MappedFile,
    NotThisHost,
    Received,
    closing,
)
from offbeat.weights.retry import Retry, VersionGone
from offbeat.weights.staged import HeldWeights, StagedWeights

log = logging.getLogger(__name__)

BAD_CHUNKS = 5
"""Damaged chunks in a row after which a connection is not trusted any more."""


class Downloader:
    """Fetches versions of one run. `deltas`, `same_host`: see `CheckpointClient`."""

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        receiver_id: str,
        *,
        deltas: bool,
        same_host: bool,
    ) -> None:
        self._connection = connection
        self._run_id = run_id
        self._receiver_id = receiver_id
        self._deltas = deltas
        self._same_host = same_host
        self._held: HeldWeights | None = None

    async def stage(
        self, directory: Path, *, version: int = 0, full: bool = False, deadline_seconds: float
    ) -> StagedWeights:
        """Fetches a version (0: the newest) into `directory`/<version>.weights and verifies it.

        With `deltas`, the file of the version before is made into it, once that one is discarded;
        `full` forbids that. A broken fetch goes on at the chunk where it broke. Bytes that don't
        match are fetched once more from the start, in full. On failure no file is left. Raises at
        once when the folder has no room (`chunks.NoRoom`) or the version is not there
        (`VersionGone`); when the newest was asked for and is replaced during an interruption, the
        then newest is fetched.
        """
        retry = Retry(
            f"Fetch of version {version or '(newest)'}", self._connection.address, deadline_seconds
        )
        held = None if full or not self._deltas else self._held
        base = held.manifest if held is not None else None
        received = await self._receive(directory, version, base, full, retry)
        if isinstance(received, Delta):
            assert held is not None
            if await self._patch(held, received, retry):
                return held.lend()
            received = await self._receive(directory, received.manifest.version, None, True, retry)
        assert not isinstance(received, Delta)
        return self._stage_file(received)

    async def receive(
        self,
        directory: Path,
        *,
        version: int = 0,
        base: checkpoint.Manifest | None = None,
        deadline_seconds: float,
    ) -> Received:
        """What `stage` fetches, before a delta is applied: for a relay, which applies it its own way."""
        retry = Retry(
            f"Fetch of version {version or '(newest)'}", self._connection.address, deadline_seconds
        )
        return await self._receive(directory, version, base, True, retry)

    def drop_held(self, *, at_once: bool = False) -> None:
        """Forgets the base of the next delta, and removes its file; see `HeldWeights.drop`."""
        if self._held is not None:
            self._held.drop(at_once=at_once)
            self._held = None

    async def _patch(self, held: HeldWeights, received: Delta, retry: Retry) -> bool:
        """Applies a delta to the held file; False when everything must be fetched instead."""
        try:
            if received.base_version != held.version:
                raise IntegrityError(f"a delta to version {received.base_version}, not to the base")
            await held.patch(received.data, received.manifest, retry.left() / 2)
        except (IntegrityError, TimeoutError) as error:
            reason = "in_use" if isinstance(error, TimeoutError) else "damaged"
            self._connection.counts.fallbacks[reason] += 1
            log.warning(
                "version %d: %s; fetching it in full", received.manifest.version, error or reason
            )
            self.drop_held()
            return False
        return True

    def _stage_file(self, received: FullFile | MappedFile) -> StagedWeights:
        """Staged weights of a whole file; it becomes the base of the next delta."""
        if isinstance(received, MappedFile):
            return StagedWeights(received.path, received.manifest, release=closing(received))
        if not self._deltas:
            return StagedWeights(received.path, received.manifest)
        if self._held is not None and self._held.path != received.path:
            self._held.drop()
        self._held = HeldWeights(received.path, received.manifest)
        return self._held.lend()

    async def _receive(
        self,
        directory: Path,
        version: int,
        base: checkpoint.Manifest | None,
        full: bool,
        retry: Retry,
    ) -> Received:
        """Receives a version; damage and what is no good here lead to a second try, in full."""
        directory.mkdir(parents=True, exist_ok=True)
        corrupted = False
        mapped = self._same_host and not full
        while True:
            incoming = Incoming(directory, version)
            try:
                while not await self._go_on(incoming, base, mapped, retry):
                    pass
                received = await incoming.complete()
                self._count_received(received, base)
                return received
            except VersionGone as error:
                if version or not incoming.begun:
                    raise
                log.info("%s; fetching the newest version instead", error)
            except NotThisHost as error:
                log.info("%s; fetching the bytes", error)
                self._connection.counts.fallbacks["not_this_host"] += 1
                mapped = self._same_host = False
            except IntegrityError as error:
                if corrupted:
                    raise
                corrupted = True
                if base is not None or mapped:
                    self._connection.counts.fallbacks["damaged"] += 1
                base, mapped = None, False
                log.warning("%s; fetching from the start again", error)
            finally:
                incoming.clean_up()

    async def _go_on(
        self, incoming: Incoming, base: checkpoint.Manifest | None, mapped: bool, retry: Retry
    ) -> bool:
        """Receives from where the transfer stands. False when the stream broke and may go on."""
        request = checkpoint.FetchRequest(
            run_id=self._run_id,
            version=incoming.version,
            offset=incoming.position,
            accepted=[RAW] + [DELTA] * (base is not None) + [MAPPED] * mapped,
            receiver_id=self._receiver_id,
            transfer_hash=incoming.transfer_hash,
        )
        if base is not None:
            request.base_version, request.base_digest = base.version, base.digest
        before = incoming.position
        open_call: Any = self._connection.channel.unary_stream(
            f"/{SERVICE}/Fetch", request_serializer=checkpoint.FetchRequest.SerializeToString
        )
        call = open_call(request, timeout=retry.left())
        try:
            async for message in call:
                await incoming.take(message)
                if incoming.is_mapped:
                    incoming.keep_lease(call.cancel)
                    return True
        except DamagedChunk as error:
            self._connection.counts.damaged_chunks += 1
            if incoming.count_damage() > BAD_CHUNKS:
                raise IntegrityError(f"{BAD_CHUNKS} times in a row: {error}") from None
            log.warning("version %d: %s; going on there", incoming.version, error)
            return False
        except grpc.aio.AioRpcError as error:
            if incoming.position > before:
                retry.reset()
            self._connection.turn(error)
            await retry.after(error)
            return False
        finally:
            if not incoming.is_mapped:
                call.cancel()
        return True

    def _count_received(self, received: Received, base: checkpoint.Manifest | None) -> None:
        if isinstance(received, Delta):
            self._connection.counts.add("delta", len(received.data))
        elif isinstance(received, MappedFile):
            self._connection.counts.add("mapped", 0)
        else:
            self._connection.counts.add("full", received.manifest.total_bytes)
            if base is not None:
                # The base is not known there, or nearly everything changed.
                self._connection.counts.fallbacks["no_delta"] += 1
