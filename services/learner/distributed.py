"""The learner's ranks: how they meet, and how rank 0 tells the others what it got. Never pickles.

The trainer uses it. Payloads go over the CPU backend as bytes, whatever device the model is on.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from offbeat.errors import ConfigError
from services.learner.batching import WIRE_DTYPES, Group, pack, unpack

# Ranks wait in a broadcast while rank 0 waits for its cohort, which has deadlines of its own. A dead
# rank 0 is noticed at once by its closed connections, not by this limit.
COLLECTIVE_TIMEOUT = timedelta(hours=12)


def join(rank: int, world: int, rendezvous: str | None) -> None:
    """Makes the process group unless there is one. It lives as long as the process: DeepSpeed keeps hold of it.

    ConfigError when the group that exists has other ranks, or there is no way to meet.
    """
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank, world):
            raise ConfigError(
                f"expected to be rank {rank} of {world}, found a process group in which this is "
                f"rank {found[0]} of {found[1]}: start as many ranks as learner.ranks says"
            )
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if world == 1 and rendezvous is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if rendezvous is None and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"rank {rank} of {world} does not know where to meet the others: expected MASTER_ADDR and "
            "MASTER_PORT in the environment, found neither; start the ranks with `offbeat` or torchrun"
        )
    dist.init_process_group(
        backend,
        init_method=rendezvous or "env://",
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    atexit.register(dist.destroy_process_group)


def device_of(rank: int) -> torch.device:
    """The device of a rank: its GPU on this machine, or the CPU."""
    # DeepSpeed insists on the variable, which only some launchers set.
    local = int(os.environ.setdefault("LOCAL_RANK", str(rank % max(1, torch.cuda.device_count()))))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def broadcast_arrays(
    arrays: Sequence[np.ndarray] | None, dtypes: Sequence[type[np.generic]]
) -> list[np.ndarray]:
    """Rank 0's one-dimensional arrays, on every rank. Other ranks pass None."""
    if dist.get_world_size() == 1:
        return list(arrays or ())
    sizes = torch.zeros(len(dtypes), dtype=torch.int64)
    if arrays is not None:
        sizes = torch.tensor([array.nbytes for array in arrays], dtype=torch.int64)
    dist.broadcast(sizes, src=0)
    blob = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    if arrays is not None:
        blob = torch.from_numpy(np.concatenate([array.view(np.uint8) for array in arrays]))
    dist.broadcast(blob, src=0)
    ends = np.cumsum(sizes.numpy())
    return [
        blob.numpy()[end - size : end].view(dtype)
        for size, end, dtype in zip(sizes.tolist(), ends, dtypes, strict=True)
    ]


def broadcast_groups(groups: Sequence[Group]) -> list[Group]:
    """Rank 0's groups, on every rank; what other ranks pass does not count."""
    if dist.get_world_size() == 1:
        return list(groups)
    arrays = pack(groups) if dist.get_rank() == 0 else None
    return unpack([array.copy() for array in broadcast_arrays(arrays, WIRE_DTYPES)])


def broadcast_sequences(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rank 0's token sequences, on every rank."""
    arrays = None
    if dist.get_rank() == 0:
        tokens = [token for sequence in sequences for token in sequence]
        arrays = [np.array([len(s) for s in sequences], np.int64), np.array(tokens, np.int64)]
    lengths, tokens_flat = broadcast_arrays(arrays, (np.int64, np.int64))
    ends = np.cumsum(lengths)
    return [
        tokens_flat[end - length : end].tolist() for length, end in zip(lengths, ends, strict=True)
    ]


def sum_over_ranks(values: np.ndarray) -> np.ndarray:
    """Element-wise sum of an array over all ranks. Exact where one rank has the value, others 0."""
    if dist.get_world_size() == 1 or not values.size:
        return values
    tensor = torch.from_numpy(values)
    dist.all_reduce(tensor)
    return tensor.numpy()
