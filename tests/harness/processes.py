"""Small real processes for tests of supervision, and waiting for them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

WAIT_SECONDS = 30.0
"""Longest wait for something that takes milliseconds; generous, since a busy machine is no failure."""

FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
near = subprocess.Popen(sleep)
far = subprocess.Popen(sleep, start_new_session=True)
(folder / "pids.part").write_text(f"{os.getpid()} {near.pid} {far.pid}")
(folder / "pids.part").rename(folder / "pids")
%s
"""
"""Starts one child in its own session and one in a session of its own, and tells all pids."""


def family(folder: Path, then: str = "time.sleep(1000)") -> list[str]:
    """A command that has two children, writes their pids to `folder`/pids, and goes on with `then`."""
    return [sys.executable, "-S", "-c", FAMILY % then, str(folder)]


def read_pids(folder: Path) -> list[psutil.Process]:
    """The processes of `family`, once they are there."""
    path = folder / "pids"
    wait_until(path.exists, f"{path} to appear")
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Waits until `holds()` is true. Raises AssertionError that names `what` otherwise."""
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, f"waited {WAIT_SECONDS:g} s for {what}"
        time.sleep(0.01)


def wait_gone(processes: list[psutil.Process]) -> None:
    """Waits until all have ended."""
    _, alive = psutil.wait_procs(processes, timeout=WAIT_SECONDS)
    assert not alive, f"still running: {alive}"
