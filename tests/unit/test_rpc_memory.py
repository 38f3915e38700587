"""What a process does with memory that it freed."""

import subprocess
import sys

MEASURE = """
import resource, sys
from offbeat.rpc.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(3):
    [bytes(2 * 1024**2) for _ in range(20)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    [bytes(2 * 1024**2) for _ in range(20)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that are given to the process while it allocates and frees 40 MiB again and again."""
    words = [sys.executable, "-c", MEASURE, how]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def test_freed_memory_is_used_again_without_being_handed_back() -> None:
    assert faults("kept") < faults("not kept") / 10
