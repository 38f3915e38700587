"""The receiving side of `Publish`: in full or as a delta. Used by rpcs and mirror.

A delta is applied to the newest version in memory (`Head`) and verified there; then the version is
committed, and its file is written while receivers already fetch the delta.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import Fenced, IntegrityError, WeightsError
from offbeat.failpoints import failpoint
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.chunks import MAX_CHUNK_BYTES, WeightsWriter
from offbeat.weights.frames import read_chunk
from offbeat.weights.hashing import hash_of
from offbeat.weights.incoming import DELTA, RAW, Delta, FullFile
from offbeat.weights.manifest import check, check_part, seal
from services.checkpoint.changes import Changes
from services.checkpoint.counters import Counters
from services.checkpoint.deltas import Deltas
from services.checkpoint.head import Head
from services.checkpoint.parts import MAX_PARTS, Parts
from services.checkpoint.store import (
    WEIGHTS,
    StoredVersion,
    UnknownVersion,
    VersionStore,
    delta_path,
)

log = logging.getLogger(__name__)


class VersionMark(Protocol):
    """A second memory of the run's numbers, beside this service's disk (`RedisVersionMark`)."""

    async def version_high_water(self) -> int:
        """The largest version number; 0 when there is none. Raises `ServiceUnavailable`."""

    async def raise_version_high_water(self, version: int) -> int:
        """Makes it at least `version`; returns it. Raises `ServiceUnavailable`."""

    async def newest_term(self) -> int:
        """The newest term that a learner began; 0 when there is none."""


Commit = Callable[
    [Path, checkpoint.Manifest, Callable[[StoredVersion], None]],
    Coroutine[Any, Any, tuple[StoredVersion, bool]],
]


@dataclass(frozen=True)
class Change:
    """A version that came as a delta."""

    manifest: checkpoint.Manifest
    base: StoredVersion
    delta: bytes


class Publisher:
    """Receives, verifies and commits versions."""

    def __init__(
        self,
        store: VersionStore,
        changes: Changes,
        counters: Counters,
        *,
        mark: VersionMark | None,
        deltas: Deltas | None,
    ) -> None:
        self._store = store
        self._changes = changes
        self._counters = counters
        self._mark = mark
        self._deltas = deltas
        self._head = Head()
        self._head_lock = asyncio.Lock()
        self._writing: dict[int, asyncio.Task[None]] = {}
        self._parts = Parts(
            store,
            changes,
            reserve=_reserved,
            receive=self._receive_part,
            commit=self._commit_received,
        )
        self.news = asyncio.Event()
        """Set, and replaced, when there is a new version."""

    async def publish(
        self, header: checkpoint.PublishHeader, messages: AsyncIterator[bytes]
    ) -> tuple[StoredVersion, bool]:
        """The version that a stream became, and whether it had been there before."""
        manifest = header.manifest
        self._check_header(header)
        self._check_term(manifest)
        whole = header.shard_count <= 1
        earlier = (
            self._store.find(manifest.term, manifest.step, manifest.weights_digest)
            if whole
            else self._store.find_part(manifest)
        )
        if earlier is not None:
            return earlier, True
        if self._mark is not None:
            await self._mark.version_high_water()  # Fails now rather than after the upload.
        if header.encoding == DELTA:
            self._base_of(header)
        if not whole:
            return await self._parts.publish(header, messages)
        # Not in a thread: a stream that breaks meanwhile would leave the folder.
        folder = self._store.begin_publish()
        commit = None
        try:
            received = await self._receive(folder, header, messages)
            failpoint("publish.received")
            commit = self._changes.keep(self._commit_received(folder, header, received))
        finally:
            if commit is None:
                await self._end(folder)
        return await asyncio.shield(commit)

    async def adopt(self, folder: Path, received: FullFile | Delta) -> StoredVersion:
        """Takes in a version of the upstream; `folder` is where a whole file lies. For relays.

        Raises `IntegrityError` when a delta does not lead to what the manifest says.
        """
        manifest = received.manifest
        if isinstance(received, Delta):
            base = self._store.get_available(received.base_version)
            change = Change(manifest, base, received.data)
            return (await self._commit_change(folder, change, self._adopt))[0]
        await asyncio.to_thread(os.replace, received.path, folder / WEIGHTS)
        entry, _ = await self._changes.exclusively(self._adopt(folder, manifest))
        if self._deltas is not None:
            self._changes.keep(self._load_head(entry))
        return entry

    async def written(self, entry: StoredVersion) -> None:
        """Waits until the file of a version has its bytes. Raises `UnknownVersion` when they could not be written."""
        task = self._writing.get(entry.version)
        if task is not None:
            await asyncio.shield(task)

    # ---- receiving

    async def _receive(
        self, folder: Path, header: checkpoint.PublishHeader, messages: AsyncIterator[bytes]
    ) -> bytes | None:
        """The bytes of a delta; None when the whole weights came, which lie in the folder then."""
        if header.encoding == DELTA:
            return await self._receive_delta(header, messages)
        writer = await WeightsWriter.create(folder / WEIGHTS, header.manifest, strict=True)
        await self._receive_weights(messages, writer)
        return None

    async def _receive_part(
        self,
        header: checkpoint.PublishHeader,
        messages: AsyncIterator[bytes],
        writer: WeightsWriter | None,
    ) -> bytes | None:
        """The same for a part of a version, whose bytes go where `writer` puts them; without one a delta comes."""
        if writer is None:
            return await self._receive_delta(header, messages)
        await self._receive_weights(messages, writer)
        return None

    async def _receive_weights(self, messages: AsyncIterator[bytes], writer: WeightsWriter) -> None:
        async for data in self._chunks(messages, lambda: writer.position):
            await writer.add(data)
        if writer.position < writer.total:
            raise WeightsError(f"the stream ended at byte {writer.position} of {writer.total}")
        await writer.finish()

    async def _receive_delta(
        self, header: checkpoint.PublishHeader, messages: AsyncIterator[bytes]
    ) -> bytes:
        parts: list[memoryview] = []
        async for data in self._chunks(messages, lambda: sum(map(len, parts))):
            if sum(map(len, parts)) + len(data) > header.transfer_bytes:
                raise WeightsError(f"more bytes than the {header.transfer_bytes} of the delta")
            parts.append(data)
        found = await asyncio.to_thread(b"".join, parts)
        if len(found) != header.transfer_bytes or hash_of(found) != header.transfer_hash:
            raise IntegrityError("the delta does not match its hash")
        return found

    async def _chunks(
        self, messages: AsyncIterator[bytes], position: Callable[[], int]
    ) -> AsyncIterator[memoryview]:
        async for message in messages:
            chunk = read_chunk(message)
            if chunk is None:
                raise WeightsError("expected a chunk after the header, found something else")
            if chunk.offset != position():
                raise WeightsError(
                    f"expected a chunk at byte {position()}, found one at {chunk.offset}"
                )
            if len(chunk.data) > MAX_CHUNK_BYTES:
                raise WeightsError(
                    f"a chunk has {len(chunk.data)} bytes; at most {MAX_CHUNK_BYTES} are accepted"
                )
            chunk.check()
            yield chunk.data
            self._counters.received_bytes += len(chunk.data)

    # ---- committing

    async def _end(self, folder: Path) -> None:
        # Shielded: the folder goes even when the stream broke in the midst of this.
        await self._changes.exclusively(asyncio.to_thread(self._store.end_publish, folder))

    async def _commit_received(
        self, folder: Path, header: checkpoint.PublishHeader, received: bytes | None
    ) -> tuple[StoredVersion, bool]:
        try:
            if received is None:
                return await self._commit_file(folder, header.manifest)
            change = Change(header.manifest, self._base_of(header), received)
            return await self._commit_change(folder, change, self._commit)
        finally:
            await self._end(folder)

    async def _commit_file(
        self, folder: Path, manifest: checkpoint.Manifest
    ) -> tuple[StoredVersion, bool]:
        entry, existed = await self._changes.exclusively(self._commit(folder, manifest))
        if self._deltas is not None and not existed:
            self._changes.keep(self._load_head(entry))
        return entry, existed

    async def _commit_change(
        self, folder: Path, change: Change, commit: Commit
    ) -> tuple[StoredVersion, bool]:
        """Applies a delta to its base in memory, and commits what comes of it."""
        base = change.base
        await self._head_lock.acquire()
        base.leases += 1
        written = False

        def begin_to_write(entry: StoredVersion) -> None:
            """Before anybody hears of the version: its file does not have its bytes yet."""
            nonlocal written
            written = True
            self._head.version = entry.version
            self._writing[entry.version] = self._changes.keep(self._write(entry, base))

        try:
            await self.written(base)
            # Room for what is written after the commit: a full disk is noticed before it.
            reserving = self._changes.keep(
                asyncio.to_thread(_reserve, folder / WEIGHTS, change.manifest.total_bytes)
            )
            await asyncio.gather(reserving, asyncio.to_thread(self._change_head, folder, change))
            return await self._changes.exclusively(commit(folder, change.manifest, begin_to_write))
        finally:
            if not written:
                base.leases -= 1
                self._head_lock.release()

    def _change_head(self, folder: Path, change: Change) -> None:
        base = change.base
        if not delta.same_layout(base.manifest.tensors, change.manifest.tensors):
            raise WeightsError(f"version {base.version} has other tensors: publish in full")
        if self._head.version != base.version:
            self._head.load(base)
        self._head.change(change.delta, change.manifest)
        delta_path(folder, base.version).write_bytes(change.delta)

    async def _write(self, entry: StoredVersion, base: StoredVersion) -> None:
        """Gives a committed version's file its bytes, then the head to the next publish."""
        try:
            await asyncio.to_thread(self._head.write, entry.weights)
        except OSError as error:
            log.error("version %d could not be written, so it is dropped: %s", entry.version, error)
            await self._changes.exclusively(asyncio.to_thread(self._store.drop_bytes, entry))
        finally:
            base.leases -= 1
            self._head_lock.release()
            del self._writing[entry.version]

    async def _load_head(self, entry: StoredVersion) -> None:
        """Gets ready for a delta to this version."""
        async with self._head_lock:
            try:
                await asyncio.to_thread(self._head.load, entry)
            except OSError as error:
                log.info("version %d is not kept in memory: %s", entry.version, error)

    async def _commit(
        self,
        folder: Path,
        manifest: checkpoint.Manifest,
        on_commit: Callable[[StoredVersion], None] = lambda entry: None,
    ) -> tuple[StoredVersion, bool]:
        """Numbers, seals and stores a version that was received. Runs exclusively."""
        self._check_term(manifest)  # A newer learner may have come during the upload.
        entry = self._store.find(manifest.term, manifest.step, manifest.weights_digest)
        if entry is not None:
            return entry, True
        await asyncio.to_thread(self._store.raise_term, manifest.term)
        manifest.version = await self._next_number(manifest.parent)
        manifest.created_unix_ms = time.time_ns() // 1_000_000
        seal(manifest)
        failpoint("publish.marked")
        entry = await asyncio.to_thread(self._store.commit, folder, manifest)
        self._note_deltas(entry)
        on_commit(entry)
        self._counters.published += 1
        self.announce()
        failpoint("publish.committed")
        log.info(
            "version %d: step %d of term %d, %d bytes",
            entry.version,
            manifest.step,
            manifest.term,
            manifest.total_bytes,
        )
        self._prune_soon()
        return entry, False

    async def _adopt(
        self,
        folder: Path,
        manifest: checkpoint.Manifest,
        on_commit: Callable[[StoredVersion], None] = lambda entry: None,
    ) -> tuple[StoredVersion, bool]:
        """Stores a version under the number that the upstream gave it. Runs exclusively."""
        entry = await asyncio.to_thread(self._store.adopt, folder, manifest)
        self._note_deltas(entry)
        on_commit(entry)
        self._counters.published += 1
        self.announce()
        log.info("version %d mirrored, %d bytes", entry.version, manifest.total_bytes)
        self._prune_soon()
        return entry, False

    def _prune_soon(self) -> None:
        """Once this change is done; nobody waits for it, as removing a large file takes as long as sending a delta."""
        self._changes.start(asyncio.to_thread(self._store.prune))

    def _note_deltas(self, entry: StoredVersion) -> None:
        """The delta that a version was uploaded as is what its receivers get."""
        if self._deltas is not None:
            self._deltas.note(entry)

    async def _next_number(self, parent: int) -> int:
        """A number above all that the disk, the mark, or the learner has seen; the mark is raised first.

        The learner's counts where both memories were lost under it.
        """
        newest = max(self._store.last_number, parent)
        if self._mark is None:
            return newest + 1
        number = max(newest, await self._mark.version_high_water()) + 1
        await self._mark.raise_version_high_water(number)
        return number

    def announce(self) -> None:
        """Wakes all watchers."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    # ---- checks

    def _check_header(self, header: checkpoint.PublishHeader) -> None:
        count, index = max(1, header.shard_count), header.shard_index
        if index >= count or count > MAX_PARTS:
            raise WeightsError(
                f"part {index} of {count}: expected a shard_index below shard_count, and at most {MAX_PARTS} parts"
            )
        if count > 1 and not header.manifest.publish_id:
            raise WeightsError(
                "publish_id is empty; expected the one that all parts of a publish have"
            )
        if header.encoding not in (checkpoint.WEIGHTS_ENCODING_UNSPECIFIED, RAW, DELTA):
            raise WeightsError(f"encoding {header.encoding} is not accepted; send RAW (1)")
        if header.manifest.kind not in (
            checkpoint.WEIGHTS_KIND_FULL,
            checkpoint.WEIGHTS_KIND_ADAPTER,
        ):
            raise WeightsError(f"kind is {header.manifest.kind}; expected FULL (1) or ADAPTER (2)")
        if header.manifest.term == 0:
            raise WeightsError("term is 0; expected the one that AcquireLearner returned")
        check(header.manifest) if count == 1 else check_part(header.manifest)

    def _base_of(self, header: checkpoint.PublishHeader) -> StoredVersion:
        """The base of a delta. Raises `UnknownVersion`, or `WeightsError` when no delta is taken."""
        if self._deltas is None:
            raise WeightsError("no deltas are accepted (checkpoint.deltas); send RAW (1)")
        if header.transfer_bytes > header.manifest.total_bytes + len(delta.MAGIC):
            raise WeightsError("the delta is larger than the weights; send RAW (1)")
        if not header.base_version:
            raise UnknownVersion("a delta needs its base_version")
        return self._store.get_available(header.base_version)

    def _check_term(self, manifest: checkpoint.Manifest) -> None:
        if manifest.term < self._store.term:
            raise Fenced(
                f"term {manifest.term} is over, the current one is {self._store.term}: "
                "a newer learner has taken over; this one must stop"
            )


async def _reserved(folder: Path, nbytes: int) -> Path:
    """The file of a publish's weights, with room for them."""
    await asyncio.to_thread(_reserve, folder / WEIGHTS, nbytes)
    return folder / WEIGHTS


def _reserve(path: Path, nbytes: int) -> None:
    """An empty file with room for `nbytes`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)
