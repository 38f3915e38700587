"""Hashes of weights: BLAKE3-256, of whole buffers and of bytes that stream by.

Used by the checkpoint service (publish, start-up) and by its client (publish, stage).
"""

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from offbeat.errors import IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint

HASH_BYTES = 32
READ_BYTES = 8 * 1024**2


def hash_of(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of `data`."""
    return blake3(data).digest()


class TensorVerifier:
    """Checks the hash of each tensor while the bytes of a version are fed to it, in order.

    Blocking, about 4 GB/s; feed it from a thread when the bytes are many.
    """

    def __init__(self, tensors: Sequence[checkpoint.TensorSpec]) -> None:
        self._tensors = [(spec.name, spec.nbytes, spec.hash) for spec in tensors]
        self._index = 0
        self._filled = 0
        self._hasher = blake3()
        self._close_full_tensors()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Takes the next bytes. Raises `IntegrityError` naming the tensor that does not match."""
        rest = memoryview(data)
        while rest:
            if self._index == len(self._tensors):
                raise IntegrityError(f"{len(rest)} bytes follow the last tensor; expected none")
            part = rest[: self._tensors[self._index][1] - self._filled]
            self._hasher.update(part)
            self._filled += len(part)
            rest = rest[len(part) :]
            self._close_full_tensors()

    def finish(self) -> None:
        """Raises `IntegrityError` when bytes are missing."""
        if self._index < len(self._tensors):
            name, nbytes, _ = self._tensors[self._index]
            raise IntegrityError(
                f"the bytes end inside tensor {name}: expected {nbytes}, found {self._filled}"
            )

    def _close_full_tensors(self) -> None:
        # A loop, since tensors without elements are full at once.
        while self._index < len(self._tensors) and self._filled == self._tensors[self._index][1]:
            name, _, expected = self._tensors[self._index]
            found = self._hasher.digest()
            if found != expected:
                raise IntegrityError(
                    f"tensor {name} does not match its hash: "
                    f"expected {expected.hex()[:16]}…, found {found.hex()[:16]}…"
                )
            self._index += 1
            self._filled = 0
            self._hasher.reset()


def verify_file(path: Path, manifest: checkpoint.Manifest) -> None:
    """Reads a whole file. Raises `IntegrityError` when it is not what the manifest says."""
    size = path.stat().st_size
    if size != manifest.total_bytes:
        raise IntegrityError(f"{path} has {size} bytes; the manifest says {manifest.total_bytes}")
    verifier = TensorVerifier(manifest.tensors)
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            verifier.feed(buffer[:count])
    verifier.finish()
