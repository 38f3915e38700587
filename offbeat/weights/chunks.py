"""Moves the bytes of a version in chunks: from buffers, to a file, from a file.

Used on both sides of the wire. Blocking work is done in threads, many chunks at a time.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path

from offbeat.errors import IntegrityError, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.frames import write_chunk
from offbeat.weights.hashing import TensorVerifier

CHUNK_BYTES = 1024**2
"""Size of the chunks that are sent."""
MAX_CHUNK_BYTES = 2 * 1024**2
"""Size of the largest chunk that is accepted."""
BATCH_BYTES = 8 * CHUNK_BYTES
"""What a thread gets to do at once."""
BATCH_CHUNKS = 512
"""Most chunks of a batch; the system writes at most 1024 at once."""

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What the system says when a file system, a quota, or a file is full."""


class NoRoom(WeightsError):
    """The file system has no room for the weights."""


def chunks(buffers: Sequence[memoryview], size: int | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of all buffers, one after the other, in pieces of `size` (None: `CHUNK_BYTES`; the last one: the rest).

    Small buffers share a piece, so a model with thousands of biases takes no more messages; a piece
    of one buffer is a view of it.
    """
    size = size or CHUNK_BYTES
    gathered: list[memoryview] = []
    room = size
    for buffer in buffers:
        rest = buffer
        while rest:
            part = rest[:room]
            rest = rest[len(part) :]
            gathered.append(part)
            room -= len(part)
            if room == 0:
                yield gathered[0] if len(gathered) == 1 else b"".join(gathered)
                gathered, room = [], size
    if gathered:
        yield b"".join(gathered)


def read_batch(path: Path, offset: int, end: int) -> list[tuple[int, bytes]]:
    """Chunks of the file from `offset` on, as messages (`frames`), each with its number of bytes.

    A batch, or less when `end` is nearer. The file is opened anew each time, so an abandoned read
    in a thread leaves nothing open. Raises `IntegrityError` when the file is shorter than `end`.
    """
    batch = []
    stop = min(end, offset + BATCH_BYTES)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, stop - offset)))
    with path.open("rb", buffering=0) as file:
        while offset < stop:
            count = os.preadv(file.fileno(), [buffer[: stop - offset]], offset)
            if not count:
                raise IntegrityError(f"{path} ends at byte {offset}; expected {end} bytes")
            batch.append((count, write_chunk(offset, buffer[:count])))
            offset += count
    return batch


class WeightsWriter:
    """Writes the bytes of a version to a new file, and checks each tensor's hash on the way.

    Of a part of a version the tensors go to their places in a file that is there (`of_part`). Bytes are handed over
    in order (`add`); a thread writes and hashes one batch while the next one arrives. Errors of that work are raised
    by a later `add` or by `finish`: `IntegrityError`, or `NoRoom`. A writer that is not finished may simply be
    dropped; removing the file is up to its owner.
    """

    def __init__(self, path: Path, manifest: checkpoint.Manifest, *, strict: bool) -> None:
        """For `create`."""
        self.path = path
        self._runs = list(_runs(manifest.tensors))
        self.total = manifest.total_bytes
        self.position = 0
        """Number of bytes taken so far: where the next ones must start."""
        self._verifier = TensorVerifier(manifest.tensors, strict=strict)
        self._written = 0
        self._batch: list[bytes | memoryview] = []
        self._batch_bytes = 0
        self._work: asyncio.Future[None] | None = None

    @classmethod
    def of_part(cls, path: Path, manifest: checkpoint.Manifest) -> "WeightsWriter":
        """For a part of a version, whose file has its room already; strict."""
        writer = cls(path, manifest, strict=True)
        writer.total = sum(nbytes for _, nbytes in writer._runs)
        return writer

    @classmethod
    async def create(
        cls, path: Path, manifest: checkpoint.Manifest, *, strict: bool = False
    ) -> "WeightsWriter":
        """Creates the file and begins to reserve its room; `strict`: see `TensorVerifier`.

        Raises `NoRoom` when the file system has less free; where a quota or a limit forbids it, the first batch does.
        """
        writer = cls(path, manifest, strict=strict)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        free = os.fstatvfs(descriptor)
        if free.f_bavail * free.f_frsize < writer.total:
            os.close(descriptor)
            path.unlink()
            raise writer._explained(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        # In shared memory this takes a third of the time of the transfer, which comes in meanwhile.
        writer._begin(asyncio.to_thread(writer._reserve, descriptor))
        return writer

    async def add(self, data: bytes | memoryview) -> None:
        """Takes the next bytes; they must not change afterwards."""
        if self.position + len(data) > self.total:
            raise WeightsError(f"more bytes than the {self.total} that the manifest names")
        self._batch.append(data)
        self._batch_bytes += len(data)
        self.position += len(data)
        if self._batch_bytes >= BATCH_BYTES or len(self._batch) >= BATCH_CHUNKS:
            await self._start_batch()

    async def finish(self) -> None:
        """Waits until everything is written and checked. Raises when bytes are missing."""
        await self._start_batch()
        await self._start_batch()
        self._verifier.finish()

    async def settled(self) -> None:
        """Waits until no thread writes any more, whether or not that went well."""
        if self._work is not None:
            await asyncio.wait([self._work])

    async def _start_batch(self) -> None:
        """Hands the batch to a thread once the one before is done."""
        if self._work is not None:
            await self._work
            self._work = None
        if self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            self._begin(asyncio.to_thread(self._write, batch))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._work = asyncio.ensure_future(work)
        # Marks the error as seen, for the case that the writer is dropped.
        self._work.add_done_callback(lambda work: work.cancelled() or work.exception())

    def _write(self, batch: list[bytes | memoryview]) -> None:
        for data in batch:
            self._verifier.feed(data)
        # Opened anew for each batch, and never created: a thread that outlives its owner leaves
        # neither a descriptor nor a file.
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            rest = [memoryview(data) for data in batch]
            while rest:
                offset, room = self._place(self._written)
                count = os.pwritev(descriptor, _first(rest, room), offset)
                self._written += count
                rest = _after(rest, count)
        except OSError as error:
            raise self._explained(error) from error
        finally:
            os.close(descriptor)

    def _place(self, position: int) -> tuple[int, int]:
        """Where in the file the byte at `position` of the stream belongs, and how many follow it there."""
        for offset, nbytes in self._runs:
            if position < nbytes:
                return offset + position, nbytes - position
            position -= nbytes
        raise ValueError(f"{position} bytes beyond the end")

    def _reserve(self, descriptor: int) -> None:
        try:
            if self.total:
                os.posix_fallocate(descriptor, 0, self.total)
        except OSError as error:
            raise self._explained(error) from error
        finally:
            os.close(descriptor)

    def _explained(self, error: OSError) -> Exception:
        if error.errno not in NO_ROOM:
            return error
        free = shutil.disk_usage(self.path.parent).free
        return NoRoom(
            f"no room for {self.total} bytes of weights in {self.path.parent} ({error.strerror}, "
            f"{free} bytes are free): free some, or choose another folder"
        )


def _runs(tensors: Sequence[checkpoint.TensorSpec]) -> Iterator[tuple[int, int]]:
    """Offset and number of bytes of each run of tensors that stand one after the other."""
    start = end = 0
    for spec in tensors:
        if spec.offset != end and spec.nbytes:
            if end > start:
                yield start, end - start
            start = end = spec.offset
        end += spec.nbytes
    if end > start:
        yield start, end - start


def _first(views: list[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of the views, or all of them."""
    found = []
    for view in views:
        if count <= 0:
            break
        found.append(view[:count])
        count -= len(view)
    return found


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """The views without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
