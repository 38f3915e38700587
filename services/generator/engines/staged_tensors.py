"""Reads staged weights as torch tensors, without a copy. Used by both engines that have a model."""

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from offbeat.weights.staged import StagedWeights

TensorEntry = tuple[str, str, Sequence[int], int]
"""Name, dtype, shape, offset."""


def entries(weights: StagedWeights) -> list[TensorEntry]:
    """What `mapped_tensors` needs of them, as plain values."""
    return [(s.name, s.dtype, list(s.shape), s.offset) for s in weights.tensors]


def staged_tensors(weights: StagedWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each."""
    return mapped_tensors(weights.path, entries(weights))


def mapped_tensors(
    path: str | Path, tensors: Iterable[TensorEntry]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each entry, as views of the file's pages. The views keep the mapping alive."""
    with open(path, "rb") as file:
        # A private mapping: torch wants memory that can be written, and the file must stay as it is.
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, dtype_name, shape, offset in tensors:
        dtype = getattr(torch, dtype_name)
        nbytes = math.prod(shape) * dtype.itemsize
        if offset + nbytes > len(buffer):
            raise ValueError(
                f"tensor {name} ends at byte {offset + nbytes}, the staged file {path} at byte {len(buffer)}"
            )
        if nbytes == 0:
            yield name, torch.empty(list(shape), dtype=dtype)
            continue
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset)
        if offset % dtype.itemsize:
            raw = raw.clone()
        yield name, raw.view(dtype).view(list(shape))
