"""The training state as files: written by any number of ranks and ZeRO stage, read by any other.

The trainer uses it. Every parameter's float32 master copy and Adam moments are gathered one by one to
rank 0, which writes them as safetensors in files of at most about SHARD_BYTES, and the counters as
JSON. So the files do not depend on how the run was spread, and resuming with other ranks is the same
code. The price: rank 0 writes all 12 bytes per parameter alone, and holds one file's worth of them in
memory. A rank reads what it needs from storage that all ranks see.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.errors import CheckpointError
from services.learner.engine import MOMENTS, Engine

FORMAT = 1
SCALARS = "trainer.json"
SHARD_BYTES = 2**30
MASTER = "master"

Entry = tuple[str, Tensor]


def entries(engine: Engine) -> Iterator[Entry]:
    """(key, CPU tensor) of everything that training needs to go on, owned by the reader. Collective."""
    kinds = (None, *MOMENTS) if engine.adam_step else (None,)
    for name, parameter in engine.trained():
        for kind in kinds:
            value = engine.master(parameter, kind).detach().to("cpu", copy=True).contiguous()
            yield f"{kind or MASTER}/{name}", value.view(_shape(parameter))
    for rank, generator in enumerate(_gather_generators(engine.device)):
        yield f"rng/{rank}", generator


def save(folder: Path, engine: Engine, scalars: dict[str, Any]) -> None:
    """Writes an engine's state; rank 0 writes. Collective. CheckpointError on rank 0 when that fails."""
    content = entries(engine)
    try:
        if dist.get_rank() == 0:
            write(folder, content, scalars | {"adam_step": engine.adam_step})
    finally:
        for _ in content:
            pass  # the other ranks take part in gathering each entry, so rank 0 must too


def write(folder: Path, content: Iterable[Entry], scalars: dict[str, Any]) -> None:
    """Writes the entries and the scalars, fsynced, scalars last. CheckpointError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, list[str]] = {}
        for number, shard in enumerate(_shards(content)):
            name = f"state-{number:05d}.safetensors"
            save_file(shard, folder / name)
            _fsync(folder / name)
            files[name] = list(shard)
        text = json.dumps({"format": FORMAT, **scalars, "files": files}, indent=1)
        (folder / SCALARS).write_text(text)
        _fsync(folder / SCALARS)
        _fsync(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"can't write the training state to {folder}: {error}; free space or change run.directory"
        ) from error


def read(folder: Path, engine: Engine) -> dict[str, Any]:
    """Restores the engine from the files; returns the scalars. CheckpointError when they do not fit."""
    scalars = _read_scalars(folder)
    where = {key: folder / name for name, keys in scalars["files"].items() for key in keys}
    step = int(scalars["adam_step"])
    kinds = (None, *MOMENTS) if step else (None,)
    wanted = {f"{kind or MASTER}/{name}" for name, _ in engine.trained() for kind in kinds}
    found = {key for key in where if not key.startswith("rng/")}
    if wanted != found:
        raise CheckpointError(
            f"{folder} is of another model: it lacks {sorted(wanted - found)[:3]} and has "
            f"{sorted(found - wanted)[:3]} beyond; resume with the recipe that it was made with"
        )
    with _Reader(where) as get:
        engine.restore_adam(step)
        for name, parameter in engine.trained():
            for kind in kinds:
                _restore(engine, parameter, kind, get(f"{kind or MASTER}/{name}"), folder)
        _restore_generator(engine.device, scalars, get)
    return scalars


@contextmanager
def masters(folder: Path) -> Iterator[Callable[[str], Tensor]]:
    """Reads the float32 master weights alone: gives a function from a parameter's name to its value."""
    scalars = _read_scalars(folder)
    where = {key: folder / name for name, keys in scalars["files"].items() for key in keys}
    with _Reader(where) as get:
        yield lambda name: get(f"{MASTER}/{name}")


def _restore(
    engine: Engine, parameter: torch.nn.Parameter, kind: str | None, value: Tensor, folder: Path
) -> None:
    if tuple(value.shape) != _shape(parameter):
        raise CheckpointError(
            f"{folder} is of another model: expected shape {_shape(parameter)}, found "
            f"{tuple(value.shape)}; resume with the recipe that it was made with"
        )
    value = value.to(engine.device)
    if kind is None:
        with engine.gathered(parameter, write=True), torch.no_grad():
            parameter.data.copy_(value)
    engine.set_master(parameter, value, kind)


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    # Under ZeRO-3 a parameter's own shape is that of nothing; its whole shape stands beside it.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _shards(content: Iterable[Entry]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for key, tensor in content:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[key] = tensor
        size += tensor.nbytes
    yield shard


def _read_scalars(folder: Path) -> dict[str, Any]:
    try:
        scalars: dict[str, Any] = json.loads((folder / SCALARS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"can't read the training state in {folder}: {error}; resume from another checkpoint"
        ) from error
    if scalars.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: expected a training state of format {FORMAT}, found {scalars.get('format')}; "
            "resume with the version of Offbeat that wrote it"
        )
    return scalars


class _Reader:
    """Reads entries by key from the files that hold them, each opened once."""

    def __init__(self, where: dict[str, Path]) -> None:
        self._where = where
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Callable[[str], Tensor]:
        return self._get

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def _get(self, key: str) -> Tensor:
        path = self._where[key]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            return self._open[path].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"can't read {key} from {path}: {error}; resume from another checkpoint"
            ) from error


def seed_generator(seed: int, rank: int, *, updates: int = 0) -> None:
    """Starts a rank's random generators from the run's seed; left alone, they start anywhere."""
    torch.manual_seed((seed * 1_000_003 + updates) * 4_096 + rank)


def _gather_generators(device: torch.device) -> list[Tensor]:
    """State of every rank's random generators, on every rank: the CPU's and, where there is one, the GPU's."""
    mine = torch.get_rng_state()
    if device.type == "cuda":
        mine = torch.cat([mine, torch.cuda.get_rng_state(device)])
    if dist.get_world_size() == 1:
        return [mine]
    states = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(states, mine)
    return states


def _restore_generator(
    device: torch.device, scalars: dict[str, Any], get: Callable[[str], Tensor]
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if scalars["ranks"] != world or scalars["device"] != device.type:
        # There is no state for this rank: start a stream that no other point of the run has.
        seed_generator(scalars["seed"], rank, updates=scalars["updates"])
        return
    state = get(f"rng/{rank}")
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
