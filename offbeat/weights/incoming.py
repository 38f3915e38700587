"""A version on its way to a receiver: takes the messages of `Fetch` and checks them. Used by the client.

What comes is up to the service: all bytes (written to a file), a delta (kept in memory until it is
complete), or the name of the service's own file when both are on one host.
"""

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from offbeat.errors import IntegrityError, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.chunks import WeightsWriter
from offbeat.weights.frames import Chunk, read_chunk
from offbeat.weights.hashing import HASH_BYTES, hash_of, verify_file
from offbeat.weights.manifest import check_sealed

RAW = checkpoint.WEIGHTS_ENCODING_RAW
DELTA = checkpoint.WEIGHTS_ENCODING_DELTA
MAPPED = checkpoint.WEIGHTS_ENCODING_MAPPED


class NotThisHost(WeightsError):
    """The service offered its own file, and this process does not see the service's files."""


@dataclass(frozen=True)
class FullFile:
    """All bytes of a version, verified, in a file that belongs to the receiver."""

    manifest: checkpoint.Manifest
    path: Path


@dataclass(frozen=True)
class Delta:
    """A difference to `base_version`, verified as such; what comes of it is still to be checked."""

    manifest: checkpoint.Manifest
    base_version: int
    data: bytes
    hash: bytes


@dataclass(frozen=True)
class MappedFile:
    """The service's own file, verified, opened here: `path` stays good even when the file is removed."""

    manifest: checkpoint.Manifest
    descriptor: int
    end_lease: Callable[[], object]
    """Tells the service that the file is not needed any more."""

    @property
    def path(self) -> Path:
        """A name under which other processes of this user can open it as well."""
        return Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")


Received = FullFile | Delta | MappedFile


@dataclass
class _DeltaParts:
    """The chunks of a delta so far."""

    hash: bytes
    total: int
    position: int = 0
    parts: list[memoryview] = field(default_factory=list)

    async def add(self, data: memoryview) -> None:
        if self.position + len(data) > self.total:
            raise IntegrityError(f"more bytes than the {self.total} of the delta")
        self.parts.append(data)
        self.position += len(data)

    def finish(self) -> bytes:
        data = b"".join(self.parts)
        if len(data) != self.total or hash_of(data) != self.hash:
            raise IntegrityError(
                f"the delta does not match its hash: {len(data)} bytes of {self.total}"
            )
        return data


class Incoming:
    """One version on its way. `position` is the byte at which a broken stream is taken up."""

    def __init__(self, directory: Path, version: int) -> None:
        self.version = version
        self._directory = directory
        self._partial = directory / f".{uuid.uuid4().hex}.partial"
        self._manifest: checkpoint.Manifest | None = None
        self._header = checkpoint.FetchHeader()
        self._sink: WeightsWriter | _DeltaParts | None = None
        self._descriptor: int | None = None
        self._end_lease: Callable[[], object] | None = None
        self._damage: tuple[int, int] = (0, 0)

    @property
    def begun(self) -> bool:
        """Whether the service has sent anything."""
        return self._manifest is not None

    @property
    def position(self) -> int:
        """First byte that is still to come."""
        return 0 if self._sink is None else self._sink.position

    @property
    def transfer_hash(self) -> bytes:
        """Hash of the delta that is coming; empty when it is something else."""
        return self._header.transfer_hash

    @property
    def is_mapped(self) -> bool:
        """Whether the service's own file was found; nothing else comes then."""
        return self._descriptor is not None

    def keep_lease(self, end_lease: Callable[[], object]) -> None:
        """Hands over the stream that keeps a mapped file in place."""
        self._end_lease = end_lease

    def count_damage(self) -> int:
        """How many damaged chunks there were in a row at the position."""
        position, count = self._damage
        self._damage = (self.position, count + 1 if position == self.position else 1)
        return self._damage[1]

    async def take(self, message: bytes) -> None:
        """Takes the next message of the stream. Raises `frames.DamagedChunk`: ask again from `position` on."""
        try:
            chunk = read_chunk(message)
            if chunk is None:
                await self._begin(checkpoint.FetchResponse.FromString(message).header)
                return
        except DecodeError as error:
            raise IntegrityError(
                f"the checkpoint service sent a malformed message: {error}"
            ) from None
        await self._add(chunk)

    async def complete(self) -> Received:
        """What was received, once every hash was found right."""
        if self._manifest is None:
            raise IntegrityError("the checkpoint service sent no header")
        if self._descriptor is not None:
            assert self._end_lease is not None
            return MappedFile(self._manifest, self._descriptor, self._end_lease)
        if isinstance(self._sink, _DeltaParts):
            data = await asyncio.to_thread(self._sink.finish)
            header = self._header
            return Delta(self._manifest, header.base_version, data, header.transfer_hash)
        assert self._sink is not None
        await self._sink.finish()
        path = self._directory / f"{self.version}.weights"
        os.replace(self._partial, path)
        return FullFile(self._manifest, path)

    def clean_up(self) -> None:
        """Removes what an incomplete transfer has left."""
        self._partial.unlink(missing_ok=True)

    async def _add(self, chunk: Chunk) -> None:
        if self._sink is None:
            raise WeightsError("the checkpoint service sent bytes before their header")
        if chunk.offset != self._sink.position:
            raise IntegrityError(
                f"version {self.version}: expected byte {self._sink.position} next, "
                f"found byte {chunk.offset}"
            )
        chunk.check()
        await self._sink.add(chunk.data)

    async def _begin(self, header: checkpoint.FetchHeader) -> None:
        """The first header says what comes; those of later attempts may go on with it, or begin anew."""
        manifest = header.manifest
        if self._manifest is None:
            check_sealed(manifest)
            self._manifest, self.version = manifest, manifest.version
        elif manifest.digest != self._manifest.digest:
            raise IntegrityError(f"version {self.version} changed during its fetch")
        before, self._header = self._header, header
        same = (before.encoding, before.transfer_hash) == (header.encoding, header.transfer_hash)
        if self._sink is not None and same:
            return
        if header.encoding == MAPPED:
            self._descriptor = await asyncio.to_thread(_map, header)
        elif header.encoding == DELTA:
            if len(header.transfer_hash) != HASH_BYTES:
                raise IntegrityError("the checkpoint service sent a delta without its hash")
            # More than the weights would be no use to anybody.
            total = min(header.transfer_bytes, manifest.total_bytes)
            self._sink = _DeltaParts(header.transfer_hash, total)
        else:
            self._sink = await WeightsWriter.create(self._partial, manifest)


def _map(header: checkpoint.FetchHeader) -> int:
    """Opens the service's file. Raises `NotThisHost`, or `IntegrityError` when its bytes are wrong."""
    try:
        found = Path(header.nonce_path).read_bytes()
        if not header.nonce or found != header.nonce:
            raise NotThisHost(f"{header.nonce_path} holds something else than the service says")
        descriptor = os.open(header.mapped_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotThisHost(f"the service's files can't be read here: {error}") from error
    with contextlib.ExitStack() as unless_verified:
        unless_verified.callback(os.close, descriptor)
        verify_file(Path(f"/proc/self/fd/{descriptor}"), header.manifest, strict=False)
        unless_verified.pop_all()
    return descriptor


def closing(mapped: MappedFile) -> Callable[[], None]:
    """What ends the use of a mapped file; calling it twice does no harm."""
    open_descriptors = [mapped.descriptor]

    def close() -> None:
        if open_descriptors:
            os.close(open_descriptors.pop())
            mapped.end_lease()

    return close
