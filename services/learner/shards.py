"""Which rank publishes which tensors, so that no rank ever holds the whole model. Used by the trainer, under ZeRO-3.

Every rank takes part in gathering every parameter, one at a time; only its owner keeps a copy. The layout (names,
offsets) is that of the whole model, whatever the number of ranks, so what is published does not tell how it was
sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from services.learner.snapshot import Part

ALIGNMENT = 64
"""Of tensors in memory, in bytes."""


@dataclass(frozen=True)
class Placed:
    """A tensor of the published model."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    owner: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class ShardPlan:
    """All tensors of the model in the order in which they are published, and the rank that publishes each."""

    def __init__(self, tensors: list[Placed], world: int) -> None:
        self.tensors = tensors
        self.world = world
        self.total_bytes = sum(tensor.nbytes for tensor in tensors)

    @classmethod
    def of(cls, model: nn.Module, world: int) -> ShardPlan:
        """Neighbours go to one rank, each rank gets about as many bytes. Equal on every rank."""
        found = [(name, p.dtype, whole_shape(p)) for name, p in model.named_parameters()]
        found += [(name, b.dtype, tuple(b.shape)) for name, b in saved_buffers(model).items()]
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in found]
        total, offset, tensors = sum(sizes), 0, []
        for (name, dtype, shape), size in zip(found, sizes, strict=True):
            owner = min(world - 1, (2 * offset + size) * world // max(1, 2 * total))
            tensors.append(Placed(name, dtype, shape, offset, owner))
            offset += size
        return cls(tensors, world)

    def owned(self, rank: int) -> list[Placed]:
        """What a rank publishes, in order."""
        return [tensor for tensor in self.tensors if tensor.owner == rank]

    def allocate(self, rank: int) -> dict[str, Tensor]:
        """Host memory for what a rank publishes, by name, in one piece.

        Pieces of their own would lie between the buffers of the gathers, and keep the memory of those from being used
        again: up to twice as much.
        """
        owned = self.owned(rank)
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in owned]
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
        found, at = {}, 0
        for tensor, size in zip(owned, sizes, strict=True):
            raw = memory[at : at + tensor.nbytes]
            found[tensor.name] = raw.view(tensor.dtype).view(tensor.shape)
            at += size
        return found

    def part(self, rank: int) -> Part:
        """The same as a publisher needs it."""
        offsets = tuple(tensor.offset for tensor in self.owned(rank))
        return Part(rank, self.world, offsets, self.total_bytes)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of a parameter when it is gathered; under ZeRO-3 its own is that of nothing."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a checkpoint, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def is_stored_as_computed(model: nn.Module) -> bool:
    """Whether each tensor of a checkpoint is one of the model's, as it is.

    transformers fuses or renames some models' tensors when it loads them (experts, for one). Undoing that takes several
    tensors at once, so such a model is gathered on one rank.
    """
    shapes = {name: whole_shape(p) for name, p in model.named_parameters()}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    stored = revert_weight_conversion(model, dict(empty))
    return {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
