"""The newest version in memory, where uploaded deltas are applied. Used by the publisher and by the mirror.

Applying a delta to a file takes several times longer, since all of it must be written; so the
file of the new version is written afterwards, while receivers already fetch the delta.
"""

import mmap
import os
from pathlib import Path

from offbeat.errors import IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.hashing import verify_buffer
from services.checkpoint.store import StoredVersion

COPY_BYTES = 8 * 1024**2


class Head:
    """The bytes of one version, in memory of their own. All methods block; the caller has a lock."""

    def __init__(self) -> None:
        self.version = 0
        """Version whose bytes these are; 0: none."""
        self._size = 0
        self._memory: mmap.mmap | None = None

    def load(self, entry: StoredVersion) -> None:
        """Reads a version's file. Raises `OSError`."""
        self.version = 0
        size = entry.manifest.total_bytes
        if self._memory is None or self._size != size:
            self._size = size
            self._memory = mmap.mmap(-1, max(1, size))
        view = self.view
        with entry.weights.open("rb", buffering=0) as file:
            at = 0
            while at < size and (count := file.readinto(view[at : at + COPY_BYTES])):
                at += count
        if at < size:
            raise IntegrityError(f"{entry.weights} ends at byte {at}; expected {size} bytes")
        self.version = entry.version

    @property
    def view(self) -> memoryview:
        """The bytes."""
        assert self._memory is not None
        return memoryview(self._memory)[: self._size]

    def change(self, change: bytes, manifest: checkpoint.Manifest) -> None:
        """Makes this the version that `manifest` describes, by a delta. Nothing is known to be here any more
        until the caller sets `version`. Raises `IntegrityError` when the result is not what the manifest says.
        """
        self.version = 0
        if manifest.total_bytes != self._size:
            raise IntegrityError("the delta is for weights of another size than its base has")
        delta.apply(change, self.view)
        verify_buffer(self.view, manifest.tensors)

    def write(self, path: Path) -> None:
        """Writes the bytes to an existing file. Raises `OSError`."""
        view = self.view
        descriptor = os.open(path, os.O_WRONLY)
        try:
            at = 0
            while at < self._size:
                at += os.pwrite(descriptor, view[at : at + COPY_BYTES], at)
        finally:
            os.close(descriptor)

    def drop(self) -> None:
        """Frees the memory."""
        self.version, self._memory, self._size = 0, None, 0
