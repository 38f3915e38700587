"""Weights that a receiver has fetched and verified, ready to be loaded by an engine."""

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.hashing import verify_buffer


@dataclass(frozen=True)
class StagedWeights:
    """The tensors of one version in one file: raw, little-endian, one after the other.

    An engine maps the file (`mmap`) and reads each tensor at the offset that the manifest gives;
    nothing is copied before that. Once they are discarded the file may change or go, so an engine
    must have copied what it needs.
    """

    path: Path
    manifest: checkpoint.Manifest
    merged: Sequence[checkpoint.TensorSpec] | None = None
    """What the file holds when that is not what was sent: an adapter was added to the weights that it is for."""
    release: Callable[[], None] | None = None
    """What `discard` does when the file is not the receiver's own to remove."""

    @property
    def tensors(self) -> Sequence[checkpoint.TensorSpec]:
        """What the file holds."""
        return self.manifest.tensors if self.merged is None else self.merged

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.manifest.version

    def discard(self) -> None:
        """Gives the file up. Doing so twice does no harm."""
        if self.release is not None:
            self.release()
        else:
            self.path.unlink(missing_ok=True)


class HeldWeights:
    """The file of the version that was staged last, kept as the base of the next one's delta.

    A delta is applied in place, and only once whoever uses the file has discarded it. It stays
    mapped, since mapping it again would take longer than applying a delta.
    """

    def __init__(self, path: Path, manifest: checkpoint.Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._free = asyncio.Event()
        self._free.set()
        self._dropped = False
        with path.open("r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 0) if manifest.total_bytes else None

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.manifest.version

    def lend(self) -> StagedWeights:
        """The weights, for one user at a time; they don't change until they are discarded."""
        self._free.clear()
        loop = asyncio.get_running_loop()

        def free() -> None:
            self._free.set()
            if self._dropped:
                self.path.unlink(missing_ok=True)

        def release() -> None:
            loop.call_soon_threadsafe(free)  # the user may be a thread

        return StagedWeights(self.path, self.manifest, release=release)

    async def patch(
        self, difference: bytes, manifest: checkpoint.Manifest, wait_seconds: float
    ) -> None:
        """Makes this the version that `manifest` describes, by a delta from the one held.

        The delta itself must have been verified. Raises `TimeoutError` when the weights are still
        in use after `wait_seconds`, and `IntegrityError` when the result is wrong: the weights are
        spoilt then, and must be dropped.
        """
        async with asyncio.timeout(wait_seconds):
            await self._free.wait()
        work = asyncio.ensure_future(asyncio.to_thread(self._patch, difference, manifest))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            self.drop()
            raise

    def drop(self, *, at_once: bool = False) -> None:
        """Removes the file; while somebody uses it, and may not have opened it yet, only once that one discards it."""
        self._dropped = True
        if at_once or self._free.is_set():
            self.path.unlink(missing_ok=True)

    def _patch(self, difference: bytes, manifest: checkpoint.Manifest) -> None:
        weights = memoryview(self._mapping) if self._mapping is not None else memoryview(b"")
        delta.apply(difference, weights)
        verify_buffer(weights, manifest.tensors)
        path = self.path.with_name(f"{manifest.version}.weights")
        os.replace(self.path, path)
        self.path, self.manifest = path, manifest
