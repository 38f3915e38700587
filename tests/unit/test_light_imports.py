"""The library stays light: a client or the command line never waits for an engine's import."""

import subprocess
import sys

HEAVY = ("datasets", "deepspeed", "torch", "transformers", "trl", "vllm")

IMPORT_EVERYTHING = f"""
import importlib, pkgutil, sys
import offbeat

def fail(name):
    raise

names = [m.name for m in pkgutil.walk_packages(offbeat.__path__, "offbeat.", onerror=fail)]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
loaded = sorted(set({HEAVY!r}) & set(sys.modules))
sys.exit(f"importing offbeat loads {{loaded}}" if loaded or not names else 0)
"""


def test_no_module_of_the_library_loads_an_engine() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
