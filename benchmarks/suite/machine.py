"""The circumstances of a measurement: what ran where, and what else went on there."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


def circumstances() -> dict[str, Any]:
    """Commit, date, cores, and the load average of the last minute before the cell."""
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "cores": sorted(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu_name(),
    }


def commit() -> str:
    """The commit, with a + when files differ from it; "unknown" outside a clone."""
    try:
        found = _output("git", "rev-parse", "--short", "HEAD")
        changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found + ("+" if changed else "")


def cpu_name() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")


def gpu_name() -> str | None:
    """The first GPU's name, or None. Asked of the driver, so that nothing heavy is imported."""
    try:
        names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    except (OSError, subprocess.CalledProcessError):
        return None
    return names.splitlines()[0] if names else None


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
