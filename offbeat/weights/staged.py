"""Weights that a receiver has fetched and verified, ready to be loaded by an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.v1 import checkpoint_pb2 as checkpoint


@dataclass(frozen=True)
class StagedWeights:
    """The tensors of one version in one file: raw, little-endian, one after the other.

    An engine maps the file (`mmap`) and reads each tensor at the offset that the manifest gives;
    nothing is copied before that.
    """

    path: Path
    manifest: checkpoint.Manifest
    merged: Sequence[checkpoint.TensorSpec] | None = None
    """What the file holds when that is not what was sent: an adapter was added to the weights that it is for."""

    @property
    def tensors(self) -> Sequence[checkpoint.TensorSpec]:
        """What the file holds."""
        return self.manifest.tensors if self.merged is None else self.merged

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.manifest.version

    def discard(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)
