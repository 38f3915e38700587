"""Versions to send: those of a training that `training` left on the disk, or synthetic ones of any size."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Weights = list[tuple[str, str, tuple[int, ...], np.ndarray]]
"""Name, dtype, shape, and the values as unsigned integers."""


def synthetic(nbytes: int, changed: float) -> Iterator[Weights]:
    """Random bits in bfloat16, of which each step moves a share by one unit, as training does; for ever.

    The tensors are those of a Llama: one large embedding, 30 layers of 9. Two versions are held, in turn, so one may be
    looked at until the one after the next is asked for.
    """
    rng = np.random.default_rng(0)
    layer = nbytes * 4 // 5 // 30 // 9 // 2
    sizes = [nbytes // 5 // 2] + [layer] * 270
    held = [[rng.integers(0, 2**16, size, np.uint16) for size in sizes]]
    held.append([tensor.copy() for tensor in held[0]])
    for number in itertools.count():
        old, new = held[number % 2], held[(number + 1) % 2]
        for before, tensor in zip(old, new, strict=True):
            np.copyto(tensor, before)
            places = rng.integers(0, len(tensor), int(len(tensor) * changed))
            tensor[places] += rng.choice(np.array([1, 65535], np.uint16), len(places))
        yield [(f"t{index}", "bfloat16", t.shape, t) for index, t in enumerate(new)]


def write(folder: Path, name: str, weights: Weights) -> None:
    """Keeps a version of a training."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.bin").open("wb") as file:
        for *_, tensor in weights:
            file.write(np.ascontiguousarray(tensor))
    specs = [(name, dtype, list(shape)) for name, dtype, shape, _ in weights]
    (folder / "tensors.json").write_text(json.dumps(specs))


def read(folder: Path, name: str) -> Weights:
    """What `write` kept, in memory."""
    data = np.fromfile(folder / f"{name}.bin", np.uint16)
    found: Weights = []
    at = 0
    for tensor, dtype, shape in json.loads((folder / "tensors.json").read_text()):
        size = int(np.prod(shape, dtype=np.int64))
        found.append((tensor, dtype, tuple(shape), data[at : at + size]))
        at += size
    return found


def recorded(folder: Path, names: list[str]) -> Iterator[Weights]:
    """The versions of a training in their order, then back, and so on: each differs by one step from the one before."""
    there = [read(folder, name) for name in names]
    while True:
        yield from there[:-1]
        yield from reversed(there[1:])
