"""A consistent host copy of the policy, as it is published and exported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """All tensors of the policy, or of its adapter, in the publish dtype, on the host, owned by the snapshot.

    `tensors`: name as in the Hugging Face checkpoint -> contiguous CPU tensor; tied embeddings
    stand there once, as in that checkpoint (no `lm_head.weight`). Empty on ranks other than 0.
    Those of an adapter have the names of a PEFT adapter file; `adapter_config` is its configuration, as JSON.
    `parity`: sequences, and for each log pi (temperature 1) of its tokens 1 .. n-1.
    """

    tensors: dict[str, Tensor]
    updates: int
    parity: list[tuple[list[int], list[float]]]
    adapter_config: str | None = None

    def raw(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """(name, dtype such as "bfloat16", shape, little-endian bytes, not copied) of each tensor.

        In the order of `tensors`, which is the same for every snapshot of a run.
        """
        for name, tensor in self.tensors.items():
            # numpy has no bfloat16: bytes go out as uint8.
            payload = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), payload
