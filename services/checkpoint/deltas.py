"""Deltas between stored versions: uploaded ones, and others encoded when they are asked for. Used by the fetcher.

A delta is a file in the folder of its target (`<n>/from-<base>.delta`), and goes with it. It is
always made from base to target directly, so a receiver applies one, however far behind it is.
"""

import asyncio
import logging
import mmap
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from offbeat.weights import delta
from offbeat.weights.hashing import hash_of
from services.checkpoint.store import DELTAS, StoredVersion, VersionStore, delta_path

log = logging.getLogger(__name__)

Written = Callable[[StoredVersion], Awaitable[None]]
"""Waits until the file of a version has its bytes."""


@dataclass(frozen=True)
class DeltaFile:
    """A delta on the disk."""

    path: Path
    nbytes: int
    hash: bytes


class Deltas:
    """The deltas that are there, and those that are not worth it (None)."""

    def __init__(self, store: VersionStore, written: Written) -> None:
        self._store = store
        self._written = written
        self._known: dict[tuple[int, int], DeltaFile | None] = {}
        self._encoding: dict[tuple[int, int], asyncio.Task[DeltaFile | None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self.refusals: Counter[str] = Counter()
        """Deltas that were asked for and could not be had, by reason."""
        self.encoded = 0

    def note(self, target: StoredVersion) -> None:
        """Takes the deltas that lie in the folder of a version that was just committed."""
        for path in target.folder.glob(DELTAS):
            base = int(path.stem.removeprefix("from-"))
            data = path.read_bytes()
            self._known[base, target.version] = DeltaFile(path, len(data), hash_of(data))

    async def find(self, base: int, base_digest: bytes, target: StoredVersion) -> DeltaFile | None:
        """The delta from a version with that manifest; None when there can't be one, for a reason that is counted."""
        if base == target.version:
            return None
        key = (base, target.version)
        try:
            entry = self._store.get(base)
        except LookupError:
            return self._refused("unknown_base")
        if entry.manifest.digest != base_digest:
            return self._refused("other_manifest")
        known = self._known.get(key)
        if known is not None and known.path.exists():
            return known
        if key in self._known and known is None:
            return self._refused("not_worth_it")
        if not entry.available:
            return self._refused("base_gone")
        if not delta.same_layout(entry.manifest.tensors, target.manifest.tensors):
            return self._refused("other_tensors")
        task = self._encoding.get(key)
        if task is None:
            task = asyncio.create_task(self._encode(entry, target))
            self._encoding[key] = task
            task.add_done_callback(lambda done: self._finish(key, done))
        return await asyncio.shield(task) or self._refused("not_worth_it")

    async def close(self) -> None:
        """Waits for encoding under way."""
        while self._encoding:
            await asyncio.wait(list(self._encoding.values()))

    def _refused(self, reason: str) -> DeltaFile | None:
        self.refusals[reason] += 1
        return None

    def _finish(self, key: tuple[int, int], done: "asyncio.Task[DeltaFile | None]") -> None:
        del self._encoding[key]
        if done.cancelled():
            return
        if done.exception() is not None:
            log.error("no delta from version %d to %d: %s", *key, done.exception())
            return
        self._known[key] = done.result()
        gone = {version.version for version in self._store.versions() if not version.available}
        self._known = {k: v for k, v in self._known.items() if k[1] not in gone}

    async def _encode(self, base: StoredVersion, target: StoredVersion) -> DeltaFile | None:
        base.leases += 1
        target.leases += 1
        try:
            async with self._one_at_a_time:
                for entry in (base, target):
                    await self._written(entry)
                return await asyncio.to_thread(self._encode_files, base, target)
        finally:
            base.leases -= 1
            target.leases -= 1

    def _encode_files(self, base: StoredVersion, target: StoredVersion) -> DeltaFile | None:
        tensors = target.manifest.tensors
        old, new = (delta.tensor_views(mapped(entry), tensors) for entry in (base, target))
        data = delta.encode(tensors, old, new)
        self.encoded += 1
        if data is None:
            return None
        path = delta_path(target.folder, base.version)
        path.write_bytes(data)
        return DeltaFile(path, len(data), hash_of(data))


def mapped(entry: StoredVersion) -> memoryview:
    """The bytes of a version's file; the mapping goes with the last view of it."""
    if not entry.manifest.total_bytes:
        return memoryview(b"")
    with entry.weights.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
