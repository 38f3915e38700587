"""What every test relies on: the environment of the engines, and no process left behind.

Tests that need a server start a real one on a port that the system chooses, in `tmp_path`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

# Set before any test module imports an engine: these are read once, at import. A value that the
# caller set is kept, so that one run can be tried with another.
TEST_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in TEST_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# Helpers of the interpreter itself; they end with it.
OWN_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _descendants() -> dict[int, str]:
    """Command line of each process below this one, by pid, helpers of the interpreter left out."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            command, ended = " ".join(child.cmdline()), child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        if not ended and not any(helper in command for helper in OWN_HELPERS):
            found[child.pid] = command
    return found


@pytest.fixture(scope="module", autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test module whose processes outlive it, and ends them for the sake of the next."""
    before = set(_descendants())
    yield
    left = {pid: cmd for pid, cmd in _descendants().items() if pid not in before}
    if not left:
        return
    for process in [psutil.Process(pid) for pid in left if psutil.pid_exists(pid)]:
        process.kill()
    listed = "\n".join(f"  {pid}: {command[:200]}" for pid, command in left.items())
    pytest.fail(f"{request.node.nodeid} left processes running (now killed):\n{listed}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A whole run takes longer than other tests may."""
    for item in items:
        if "e2e" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))
