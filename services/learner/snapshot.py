"""A consistent host copy of the policy, as it is published and exported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Which part of a version a rank publishes: number `index` of `count`.

    `offsets`: where each of its tensors stands among the version's `total_bytes`.
    """

    index: int
    count: int
    offsets: tuple[int, ...]
    total_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """All tensors of the policy, or of its adapter, in the publish dtype, on the host, owned by the snapshot.

    `tensors`: name as in the Hugging Face checkpoint -> contiguous CPU tensor; tied embeddings
    stand there once, as in that checkpoint (no `lm_head.weight`). Empty on ranks other than 0, unless each rank has a
    `part` of them.
    Those of an adapter have the names of a PEFT adapter file; `adapter_config` is its configuration, as JSON.
    `parity`: sequences, and for each log pi (temperature 1) of its tokens 1 .. n-1.
    """

    tensors: dict[str, Tensor]
    updates: int
    parity: list[tuple[list[int], list[float]]]
    adapter_config: str | None = None
    part: Part | None = None

    def raw(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """(name, dtype such as "bfloat16", shape, little-endian bytes, not copied) of each tensor.

        In the order of `tensors`, which is the same for every snapshot of a run.
        """
        for name, tensor in self.tensors.items():
            # numpy has no bfloat16: bytes go out as uint8.
            payload = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), payload


def write_candidate(snapshot: Snapshot, stem: Path) -> None:
    """Writes the tensors to a file that `candidate_files` finds: the stem and an ending, with a part's number."""
    from safetensors.torch import save_file

    part = snapshot.part
    ending = ".safetensors" if part is None else f".{part.index}-of-{part.count}.safetensors"
    stem.parent.mkdir(parents=True, exist_ok=True)
    save_file(snapshot.tensors, stem.with_name(stem.name + ending), metadata={"format": "pt"})


def candidate_files(stem: Path) -> list[Path]:
    """The files that `write_candidate` wrote, in the order of the parts."""
    whole = stem.with_name(stem.name + ".safetensors")
    if whole.exists():
        return [whole]
    parts = stem.parent.glob(f"{stem.name}.*-of-*.safetensors")
    return sorted(parts, key=lambda path: int(path.name.split(".")[1].split("-")[0]))
