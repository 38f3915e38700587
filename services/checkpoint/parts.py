"""Publishes that come in parts, each from a rank of its own: kept until all are there. Used by the publisher.

A part is kept as long as its call is open, so a rank that is gone leaves nothing, and one whose call broke sends its
part again. The tensors of all parts lie in one file, each at its own place, so nothing has to be put together when
the last one arrives; deltas are joined, which copies only what changed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.errors import IntegrityError, ServiceUnavailable, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.chunks import WeightsWriter
from offbeat.weights.incoming import DELTA
from offbeat.weights.manifest import join
from services.checkpoint.changes import Changes
from services.checkpoint.store import StoredVersion, UnknownVersion, VersionStore

MAX_PARTS = 4096

Published = tuple[StoredVersion, bool]
Receive = Callable[
    [checkpoint.PublishHeader, AsyncIterator[bytes], WeightsWriter | None], Awaitable[bytes | None]
]
Commit = Callable[[Path, checkpoint.PublishHeader, bytes | None], Awaitable[Published]]
Reserve = Callable[[Path, int], Awaitable[Path]]
"""Makes the file of the weights with room for so many bytes in the folder of a publish."""


@dataclass
class _Gathering:
    """A publish some of whose parts have come, or are coming."""

    header: checkpoint.PublishHeader
    """That of the part that came first."""
    folder: Path
    weights: "asyncio.Task[Path] | None"
    """The file, once it has its room; None for deltas."""
    done: "asyncio.Future[Published]"
    open: set[int] = field(default_factory=set)
    parts: dict[int, tuple[checkpoint.Manifest, bytes | None]] = field(default_factory=dict)
    committing: bool = False

    def check(self, header: checkpoint.PublishHeader) -> None:
        """Raises `WeightsError` when another part does not go together with this one."""
        ours, theirs = self.header, header
        for name in ("run_id", "kind", "total_bytes"):
            expected, found = getattr(ours.manifest, name), getattr(theirs.manifest, name)
            if expected != found:
                raise WeightsError(
                    f"part {header.shard_index} of publish {header.manifest.publish_id}: {name} is {found}, but "
                    f"{expected} in another part of it"
                )
        if ours.shard_count != theirs.shard_count:
            raise WeightsError(
                f"part {header.shard_index} of {header.shard_count}, but another part is of {ours.shard_count}"
            )

    @property
    def encoding(self) -> tuple[bool, int]:
        """What all parts have in common when they are sent alike."""
        return _encoding(self.header)


class Parts:
    """The publishes under way that come in parts."""

    def __init__(
        self,
        store: VersionStore,
        changes: Changes,
        *,
        reserve: Reserve,
        receive: Receive,
        commit: Commit,
    ) -> None:
        self._store = store
        self._changes = changes
        self._reserve = reserve
        self._receive = receive
        self._commit = commit
        self._gatherings: dict[tuple[int, int, str], _Gathering] = {}

    async def publish(
        self, header: checkpoint.PublishHeader, messages: AsyncIterator[bytes]
    ) -> Published:
        """The version that this part and the others became. Waits for the others, as long as its caller does.

        Raises `ServiceUnavailable` when the same part is still coming in on another connection, `UnknownVersion` when
        it is a delta and another part came in full, `WeightsError` when the parts don't go together.
        """
        gathering, index = self._gathering(header), header.shard_index
        if gathering.committing:
            if header.manifest.tensors != gathering.parts[index][0].tensors:
                raise WeightsError(
                    f"part {index} of publish {header.manifest.publish_id} has come with other weights"
                )
            return await asyncio.shield(gathering.done)
        if index in gathering.open:
            raise ServiceUnavailable(f"part {index} is still coming in on another connection")
        gathering.open.add(index)
        writer = None
        try:
            if gathering.weights is not None:
                path = await asyncio.shield(gathering.weights)
                writer = WeightsWriter.of_part(path, header.manifest)
            received = await self._receive(header, messages, writer)
            gathering.parts[index] = (header.manifest, received)
            if len(gathering.parts) == header.shard_count and not gathering.done.done():
                gathering.committing = True
                self._changes.keep(self._finish(gathering))
            return await asyncio.shield(gathering.done)
        finally:
            self._changes.keep(self._leave(gathering, index, writer))

    def _gathering(self, header: checkpoint.PublishHeader) -> _Gathering:
        """The publish that a part belongs to; a new one when it is the first."""
        key = _key(header)
        found = self._gatherings.get(key)
        if found is not None and not found.committing and found.encoding != _encoding(header):
            # One rank could not send a delta, or not to this base: then all send everything.
            refusal = UnknownVersion("another part of this publish came in full: send RAW (1)")
            if header.encoding == DELTA:
                raise refusal
            self._give_up(found, refusal)
            found = None
        if found is None:
            folder = self._store.begin_publish()
            weights = None
            if header.encoding != DELTA:
                reserving = self._reserve(folder, header.manifest.total_bytes)
                weights = self._changes.keep(_awaited(reserving))
            done: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
            done.add_done_callback(lambda future: future.cancelled() or future.exception())
            found = self._gatherings[key] = _Gathering(header, folder, weights, done)
        found.check(header)
        return found

    def _give_up(self, gathering: _Gathering, reason: Exception) -> None:
        del self._gatherings[_key(gathering.header)]
        gathering.done.set_exception(reason)

    async def _finish(self, gathering: _Gathering) -> None:
        """Commits a publish whose parts are all there, and tells all who wait for it."""
        ordered = [gathering.parts[index] for index in range(gathering.header.shard_count)]
        try:
            header = checkpoint.PublishHeader()
            header.CopyFrom(gathering.header)
            header.manifest.CopyFrom(join([manifest for manifest, _ in ordered]))
            difference = None
            if header.encoding == DELTA:
                found = [received for _, received in ordered if received is not None]
                total = header.manifest.total_bytes
                difference = await asyncio.to_thread(delta.join, found, total)
            gathering.done.set_result(await self._commit(gathering.folder, header, difference))
        except (WeightsError, IntegrityError, LookupError, OSError, ServiceUnavailable) as error:
            gathering.done.set_exception(error)
        finally:
            if not gathering.done.done():
                gathering.done.cancel()
            if self._gatherings.get(_key(gathering.header)) is gathering:
                del self._gatherings[_key(gathering.header)]

    async def _leave(self, gathering: _Gathering, index: int, writer: WeightsWriter | None) -> None:
        """A call has ended: what it brought goes with it, unless all parts were there by then."""
        if writer is not None:
            await writer.settled()  # before somebody else writes the same part
        gathering.open.discard(index)
        if gathering.committing:
            return
        gathering.parts.pop(index, None)
        if gathering.open:
            return
        if self._gatherings.get(_key(gathering.header)) is gathering:
            del self._gatherings[_key(gathering.header)]
        if gathering.weights is not None:
            await asyncio.wait([gathering.weights])
        await self._changes.exclusively(
            asyncio.to_thread(self._store.end_publish, gathering.folder)
        )


async def _awaited(work: Awaitable[Path]) -> Path:
    return await work


def _key(header: checkpoint.PublishHeader) -> tuple[int, int, str]:
    return header.manifest.term, header.manifest.step, header.manifest.publish_id


def _encoding(header: checkpoint.PublishHeader) -> tuple[bool, int]:
    is_delta = header.encoding == DELTA
    return is_delta, header.base_version if is_delta else 0
