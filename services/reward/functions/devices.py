"""Where a reward function's model runs. Used by `reward_model` and `perplexity`."""

import contextlib

import torch

from offbeat.errors import ModelError


def find_device(name: str) -> torch.device:
    """auto: a GPU when there is one; else as PyTorch names it. Raises `ModelError` when there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type != "cuda" or (device.index or 0) < torch.cuda.device_count():
            return device
    raise ModelError(f"device: expected auto, cpu, or a GPU of this machine, found {name!r}")
