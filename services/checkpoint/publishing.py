"""The receiving side of `Publish`: in full or as a delta, in one part or in several. Used by rpcs and mirror.

A delta is applied to the newest version in memory (`Head`) and verified there; then the version is
committed, and its file is written while receivers already fetch the delta.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import Fenced, IntegrityError, ServiceUnavailable, WeightsError
from offbeat.failpoints import failpoint
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.chunks import MAX_CHUNK_BYTES, WeightsWriter
from offbeat.weights.frames import read_chunk
from offbeat.weights.hashing import hash_of
from offbeat.weights.incoming import DELTA, RAW, Delta, FullFile
from offbeat.weights.manifest import check, seal, weights_digest
from services.checkpoint.changes import Changes
from services.checkpoint.counters import Counters
from services.checkpoint.deltas import Deltas
from services.checkpoint.head import Head
from services.checkpoint.store import (
    WEIGHTS,
    StoredVersion,
    UnknownVersion,
    VersionStore,
    delta_path,
)

log = logging.getLogger(__name__)

MAX_SHARDS = 4096
PARTS_SECONDS = 120.0
"""Longest time for which a part of a publish waits for the others."""


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
class Part:
    """A part of a publish that was received: a delta, or (None) bytes in the folder's file."""

    header: checkpoint.PublishHeader
    delta: bytes | None

    @property
    def offset(self) -> int:
        """Where it begins in the version."""
        return self.header.shard_offset

    @property
    def size(self) -> int:
        """Its bytes in the version."""
        return self.header.manifest.total_bytes


@dataclass
class Assembly:
    """The parts of one publish that are there; all of them wait for the last one."""

    folder: Path
    parts: dict[int, Part] = field(default_factory=dict)
    waiting: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    commit: "asyncio.Task[tuple[StoredVersion, bool]] | None" = None


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
        self._assemblies: dict[tuple[int, int, str, int], Assembly] = {}
        self._writing: dict[int, asyncio.Task[None]] = {}
        self.news = asyncio.Event()
        """Set, and replaced, when there is a new version."""

    async def publish(
        self, header: checkpoint.PublishHeader, messages: AsyncIterator[bytes]
    ) -> tuple[StoredVersion, bool]:
        """The version that a stream became, and whether it had been there before."""
        self._check_header(header)
        self._check_term(header.manifest)
        if (earlier := self._existing(header)) is not None:
            return earlier, True
        if self._mark is not None:
            await self._mark.version_high_water()  # Fails now rather than after the upload.
        if header.encoding == DELTA:
            self._base_of(header)
        key = (header.manifest.term, header.manifest.step, header.manifest.publish_id)
        if header.shard_count <= 1:
            # Not in a thread: a stream that breaks meanwhile would leave the folder.
            assembly = Assembly(self._store.begin_publish())
            return await self._take_part(assembly, header, messages)
        assembly = await self._join((*key, header.shard_count), header)
        try:
            return await self._take_part(assembly, header, messages)
        finally:
            if (
                assembly.waiting == 0
                and self._assemblies.get((*key, header.shard_count)) is assembly
            ):
                del self._assemblies[(*key, header.shard_count)]

    async def adopt(self, folder: Path, received: FullFile | Delta) -> StoredVersion:
        """Takes in a version of the upstream; `folder` is where a whole file lies. For relays.

        Raises `IntegrityError` when a delta does not lead to what the manifest says.
        """
        manifest = received.manifest
        if isinstance(received, Delta):
            header = checkpoint.PublishHeader(manifest=manifest, base_version=received.base_version)
            base = self._store.get_available(received.base_version)
            part = Part(header, received.data)
            return (await self._commit_changes(folder, manifest, base, [part], self._adopt))[0]
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

    # ---- one part

    async def _join(
        self, key: tuple[int, int, str, int], header: checkpoint.PublishHeader
    ) -> Assembly:
        assembly = self._assemblies.get(key)
        if assembly is None or assembly.complete.is_set():
            assembly = self._assemblies[key] = Assembly(self._store.begin_publish())
            _reserve(assembly.folder / WEIGHTS, header.version_bytes)
        return assembly

    async def _take_part(
        self,
        assembly: Assembly,
        header: checkpoint.PublishHeader,
        messages: AsyncIterator[bytes],
    ) -> tuple[StoredVersion, bool]:
        """Receives a part; the last one commits, the others wait for that."""
        index = header.shard_index
        assembly.waiting += 1
        try:
            part = await self._receive(assembly.folder, header, messages)
            assembly.parts[index] = part
            failpoint("publish.received")
            if len(assembly.parts) == max(1, header.shard_count):
                assembly.commit = self._changes.keep(self._commit_all(assembly))
                assembly.complete.set()
            async with asyncio.timeout(PARTS_SECONDS):
                await assembly.complete.wait()
            assert assembly.commit is not None
            return await asyncio.shield(assembly.commit)
        except TimeoutError:
            missing = sorted(set(range(header.shard_count)) - assembly.parts.keys())
            raise ServiceUnavailable(
                f"parts {missing[:8]} of {header.shard_count} did not come within {PARTS_SECONDS:g} s"
            ) from None
        finally:
            assembly.waiting -= 1
            if not assembly.complete.is_set():
                assembly.parts.pop(index, None)
                if assembly.waiting == 0:
                    await self._end(assembly)

    async def _receive(
        self, folder: Path, header: checkpoint.PublishHeader, messages: AsyncIterator[bytes]
    ) -> Part:
        if header.encoding == DELTA:
            return Part(header, await self._receive_delta(header, messages))
        shared = header.shard_count > 1
        writer = await WeightsWriter.create(
            folder / WEIGHTS,
            header.manifest,
            strict=True,
            start=header.shard_offset if shared else None,
        )
        async for data in self._chunks(messages, lambda: writer.position):
            await writer.add(data)
        if writer.position < writer.total:
            raise WeightsError(f"the stream ended at byte {writer.position} of {writer.total}")
        await writer.finish()
        return Part(header, None)

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

    # ---- all parts

    async def _end(self, assembly: Assembly) -> None:
        # Shielded: the folder goes even when the stream broke in the midst of this.
        await self._changes.exclusively(asyncio.to_thread(self._store.end_publish, assembly.folder))

    async def _commit_all(self, assembly: Assembly) -> tuple[StoredVersion, bool]:
        try:
            parts = [assembly.parts[index] for index in sorted(assembly.parts)]
            manifest = merged(parts)
            if all(part.delta is None for part in parts):
                return await self._commit_file(assembly.folder, manifest)
            base = self._base_of(next(part.header for part in parts if part.delta is not None))
            return await self._commit_changes(assembly.folder, manifest, base, parts)
        finally:
            await self._end(assembly)

    async def _commit_file(
        self, folder: Path, manifest: checkpoint.Manifest
    ) -> tuple[StoredVersion, bool]:
        entry, existed = await self._changes.exclusively(self._commit(folder, manifest))
        if self._deltas is not None and not existed:
            self._changes.keep(self._load_head(entry))
        return entry, existed

    async def _commit_changes(
        self,
        folder: Path,
        manifest: checkpoint.Manifest,
        base: StoredVersion,
        parts: Sequence[Part],
        commit: Commit | None = None,
    ) -> tuple[StoredVersion, bool]:
        """Applies the parts to the base in memory, and commits what comes of it."""
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
            path = folder / WEIGHTS
            if not path.exists():
                # Room for what is written after the commit: a full disk is noticed before it.
                reserving = self._changes.keep(
                    asyncio.to_thread(_reserve, path, manifest.total_bytes)
                )
                changing = asyncio.to_thread(self._change_head, folder, manifest, base, parts)
                await asyncio.gather(reserving, changing)
            else:
                await asyncio.to_thread(self._change_head, folder, manifest, base, parts)
            entry, existed = await self._changes.exclusively(
                (commit or self._commit)(folder, manifest, begin_to_write)
            )
        finally:
            if not written:
                base.leases -= 1
                self._head_lock.release()
        return entry, existed

    def _change_head(
        self,
        folder: Path,
        manifest: checkpoint.Manifest,
        base: StoredVersion,
        parts: Sequence[Part],
    ) -> None:
        if not delta.same_layout(base.manifest.tensors, manifest.tensors):
            raise WeightsError(f"version {base.version} has other tensors: publish in full")
        path = folder / WEIGHTS
        if self._head.version != base.version:
            self._head.load(base)
        changes = [(part.offset, part.size, part.delta or path) for part in parts]
        self._head.change(changes, manifest)
        if any(part.delta is None for part in parts):
            # Start-up could not make the version again, so its file is written now.
            self._head.write(path)
            return
        joined = delta.joined([(part.offset, part.delta or b"") for part in parts])
        delta_path(folder, base.version).write_bytes(joined)

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
        manifest.version = await self._next_number()
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
        await asyncio.to_thread(self._store.prune)
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
        await asyncio.to_thread(self._store.prune)
        return entry, False

    def _note_deltas(self, entry: StoredVersion) -> None:
        """The delta that a version was uploaded as is what its receivers get."""
        if self._deltas is not None:
            self._deltas.note(entry)

    async def _next_number(self) -> int:
        """A number above all that the disk or the mark has seen; the mark is raised first."""
        if self._mark is None:
            return self._store.last_number + 1
        number = max(self._store.last_number, await self._mark.version_high_water()) + 1
        await self._mark.raise_version_high_water(number)
        return number

    def announce(self) -> None:
        """Wakes all watchers."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    # ---- checks

    def _check_header(self, header: checkpoint.PublishHeader) -> None:
        count = header.shard_count
        if count > MAX_SHARDS or header.shard_index >= max(1, count):
            raise WeightsError(
                f"part {header.shard_index} of {count}: expected an index below the count, and at "
                f"most {MAX_SHARDS} parts"
            )
        if count > 1 and not header.manifest.publish_id:
            raise WeightsError("a publish in several parts needs a publish_id")
        end = header.shard_offset + header.manifest.total_bytes
        if count > 1 and end > header.version_bytes:
            raise WeightsError(
                f"the part ends at byte {end} of a version of {header.version_bytes} bytes"
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
        check(header.manifest)

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

    def _existing(self, header: checkpoint.PublishHeader) -> StoredVersion | None:
        manifest = header.manifest
        if header.shard_count > 1:
            return self._store.find_parts(manifest)
        return self._store.find(manifest.term, manifest.step, manifest.weights_digest)


def merged(parts: Sequence[Part]) -> checkpoint.Manifest:
    """The manifest of a version that came in parts. Raises `WeightsError` when they don't fit together."""
    manifest = parts[0].header.manifest
    if len(parts) == 1:
        return manifest
    end = 0
    tensors = []
    for part in parts:
        if part.offset != end:
            raise WeightsError(f"a part begins at byte {part.offset}; expected byte {end}")
        for spec in part.header.manifest.tensors:
            shifted = checkpoint.TensorSpec()
            shifted.CopyFrom(spec)
            shifted.offset += end
            tensors.append(shifted)
        end += part.size
    whole = checkpoint.Manifest()
    whole.CopyFrom(manifest)
    del whole.tensors[:]
    whole.tensors.extend(tensors)
    whole.total_bytes = end
    whole.weights_digest = weights_digest(whole.tensors)
    check(whole)
    return whole


def _reserve(path: Path, nbytes: int) -> None:
    """An empty file with room for `nbytes`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)
