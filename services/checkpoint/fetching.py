"""The sending side of `Fetch`: chooses between all bytes, a delta, and the service's own file. Used by the rpcs."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import psutil

from offbeat.errors import WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.chunks import read_batch
from offbeat.weights.incoming import DELTA, MAPPED, RAW
from services.checkpoint.answers import Context, LeaseOver
from services.checkpoint.changes import Changes
from services.checkpoint.counters import Counters
from services.checkpoint.deltas import DeltaFile, Deltas, Written
from services.checkpoint.store import StoredVersion, UnknownVersion, VersionStore

log = logging.getLogger(__name__)

NONCE = "nonce"
REMEMBERED_FETCHES = 10_000
"""Fetches that are remembered, to notice a receiver that starts over."""


class Fetcher:
    """Sends versions. A version that is being sent keeps its bytes, up to a time limit."""

    def __init__(
        self,
        store: VersionStore,
        changes: Changes,
        counters: Counters,
        *,
        lease_seconds: float,
        deltas: Deltas | None,
        written: Written,
        lend_files: bool,
        closing: asyncio.Event,
    ) -> None:
        self._store = store
        self._changes = changes
        self._counters = counters
        self._lease_seconds = lease_seconds
        self._deltas = deltas
        self._written = written
        self._lend_files = lend_files
        self._closing = closing
        self._fetched: set[tuple[str, int]] = set()

    async def send(
        self, request: checkpoint.FetchRequest, entry: StoredVersion, context: Context
    ) -> None:
        """Answers a fetch of `entry`. Raises `LeaseOver`, `UnknownVersion`, `IntegrityError`, `WeightsError`."""
        with self._lease(entry):
            await self._check_if_suspect(request, entry)
            try:
                async with asyncio.timeout(self._lease_seconds):
                    await self._answer(request, entry, context)
            except TimeoutError:
                raise LeaseOver(
                    f"the fetch took over {self._lease_seconds:g} s (checkpoint.lease_seconds)"
                ) from None

    async def _answer(
        self, request: checkpoint.FetchRequest, entry: StoredVersion, context: Context
    ) -> None:
        if MAPPED in request.accepted and self._lend_files and self._is_local(context.peer()):
            await self._lend(entry, context)
            return
        found = await self._delta(request, entry)
        if found is not None:
            offset = request.offset if request.transfer_hash == found.hash else 0
            header = checkpoint.FetchHeader(
                manifest=entry.manifest,
                encoding=DELTA,
                base_version=request.base_version,
                transfer_hash=found.hash,
            )
            await self._stream(header, found.path, offset, found.nbytes, entry, context)
            self._counters.fetches["delta"] += 1
            return
        offset = 0 if request.transfer_hash else request.offset
        total = entry.manifest.total_bytes
        if offset > total:
            raise WeightsError(
                f"version {entry.version} has {total} bytes; can't start at byte {offset}"
            )
        await self._written(entry)
        header = checkpoint.FetchHeader(manifest=entry.manifest, encoding=RAW)
        await self._stream(header, entry.weights, offset, total, entry, context)
        self._counters.fetches["full"] += 1

    async def _delta(
        self, request: checkpoint.FetchRequest, entry: StoredVersion
    ) -> DeltaFile | None:
        begun_in_full = request.offset and not request.transfer_hash
        wanted = DELTA in request.accepted and request.base_version and not begun_in_full
        if self._deltas is None or not wanted:
            return None
        return await self._deltas.find(request.base_version, request.base_digest, entry)

    async def _stream(
        self,
        header: checkpoint.FetchHeader,
        path: Path,
        offset: int,
        end: int,
        entry: StoredVersion,
        context: Context,
    ) -> None:
        """The header, then the bytes of the file; the next batch is read while one is sent."""
        header.transfer_bytes = end - offset
        await context.write(checkpoint.FetchResponse(header=header).SerializeToString())
        work = asyncio.ensure_future(self._read(path, offset, end, entry))
        try:
            while offset < end:
                batch = await work
                offset += sum(count for count, _ in batch)
                work = asyncio.ensure_future(self._read(path, offset, end, entry))
                for count, message in batch:
                    await context.write(message)
                    self._counters.sent_bytes += count
        finally:
            work.add_done_callback(lambda done: done.cancelled() or done.exception())

    @staticmethod
    async def _read(
        path: Path, offset: int, end: int, entry: StoredVersion
    ) -> list[tuple[int, bytes]]:
        try:
            return await asyncio.to_thread(read_batch, path, offset, end) if offset < end else []
        except FileNotFoundError:
            raise UnknownVersion(f"the bytes of version {entry.version} are gone") from None

    # ---- the service's own file

    async def _lend(self, entry: StoredVersion, context: Context) -> None:
        """Names the file, and keeps it until the receiver ends the call."""
        await self._written(entry)
        header = checkpoint.FetchHeader(
            manifest=entry.manifest,
            encoding=MAPPED,
            mapped_path=str(entry.weights.absolute()),
            nonce_path=str(self._nonce[0].absolute()),
            nonce=self._nonce[1],
        )
        await context.write(checkpoint.FetchResponse(header=header).SerializeToString())
        self._counters.fetches["mapped"] += 1
        # The receiver has opened the file, so it may go on without the lease when the service stops.
        await self._closing.wait()

    @cached_property
    def _nonce(self) -> tuple[Path, bytes]:
        """A file that tells a receiver whether it sees the service's files; new with each start."""
        path, nonce = self._store.directory / NONCE, os.urandom(32)
        path.write_bytes(nonce)
        return path, nonce

    @staticmethod
    def _is_local(peer: str) -> bool:
        """Whether the other end has an address of this host, or of this container."""
        kind, _, rest = peer.partition(":")
        if kind == "unix":
            return True
        host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
        found = {
            a.address.partition("%")[0] for all_ in psutil.net_if_addrs().values() for a in all_
        }
        return host.partition("%")[0] in found

    # ---- leases and suspicion

    @contextmanager
    def _lease(self, entry: StoredVersion) -> Iterator[None]:
        """Keeps the version's bytes; retention looks again once the last lease ends."""
        entry.leases += 1
        try:
            yield
        finally:
            entry.leases -= 1
            if entry.leases == 0:
                self._changes.start(asyncio.to_thread(self._store.prune))

    async def _check_if_suspect(
        self, request: checkpoint.FetchRequest, entry: StoredVersion
    ) -> None:
        """Reads the stored bytes once more when a receiver starts over, maybe for a wrong hash."""
        if request.offset:
            return
        key = (request.receiver_id, entry.version)
        if key in self._fetched:
            await self._written(entry)
            await self._changes.exclusively(asyncio.to_thread(self._store.verify, entry))
        self._fetched.add(key)
        if len(self._fetched) > REMEMBERED_FETCHES:
            self._fetched.clear()
