"""A whole run as a user starts it, `offbeat run RECIPE`, whose processes a test can kill.

The recipe is small: a Llama with random weights, prompts of a few characters, and a reward that any model can raise
(the share of letters from the first half of the alphabet).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from offbeat.audit import Audit, audit_run
from offbeat.config.recipe import ScheduleSettings

WAIT_SECONDS = 400.0
"""Longest wait for anything; generous, since a busy machine is no failure."""

REWARD = '''
def early_letters(completions):
    """Share of characters from the first half of the alphabet, in [0, 1]."""
    return [sum("a" <= c <= "m" for c in text) / max(1, len(text)) for text in completions]
'''

DETERMINISTIC = {"name": "deterministic", "min_tokens": 2}
VLLM = {"name": "vllm", "max_num_seqs": 16, "kv_cache_memory_mb": 64}


def write_recipe(folder: Path, **sections: Any) -> Path:
    """Writes model, data, reward and recipe into `folder`; returns the recipe. `sections` are merged over it."""
    from tests.harness.tiny_models import make_tiny_model

    model = folder / "model"
    if not model.exists():
        make_tiny_model(model, tied=False).save_pretrained(model)
    (folder / "reward.py").write_text(REWARD)
    prompts = [{"prompt": f"{chr(97 + i % 26)}{chr(97 + i // 26)}"} for i in range(60)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts[:50]))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts[50:]))
    recipe: dict[str, Any] = {
        "run": {"name": "test", "directory": str(folder / "runs")},
        "model": {"path": "model", "dtype": "float32", "max_context": 32},
        "data": {
            "train": {"kind": "jsonl", "path": "train.jsonl"},
            "heldout": {"kind": "jsonl", "path": "heldout.jsonl"},
        },
        "sampling": {"k": 2, "max_tokens": 8},
        "schedule": {"steps": 4, "prompts_per_step": 8, "max_lag": 1},
        "learner": {
            "loss": {"name": "online_dpo"},
            "optimizer": {"lr": 1e-3, "schedule": "constant"},
            "checkpoints": {"every_steps": 2},
        },
        "generator": {"engine": DETERMINISTIC},
        "reward": {"functions": [{"name": "early_letters", "path": "reward.py:early_letters"}]},
        "redis": {"min_idle_seconds": 2.0, "beat_seconds": 0.5},
    }
    merge(recipe, sections)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def merge(tree: dict[str, Any], over: dict[str, Any]) -> None:
    """Merges `over` into `tree`, section by section. A section with a `name` or `kind` of its own replaces."""
    for key, value in over.items():
        inner = tree.get(key)
        if (
            isinstance(value, dict)
            and isinstance(inner, dict)
            and not {"name", "kind"} & set(value)
        ):
            merge(inner, value)
        else:
            tree[key] = value


class WholeRun:
    """A running `offbeat run`. Use `start` or `resume`."""

    def __init__(self, recipe: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self._runs = recipe.parent / "runs"
        self._known = set(self._runs.glob("*")) if self._runs.exists() else set()
        self._log = (recipe.parent / "output.txt").open("ab")
        self._process = subprocess.Popen(
            [str(Path(sys.executable).parent / "offbeat"), *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=recipe.parent,
        )
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The run's folder, once it is there."""
        if self._folder is None:
            found = self.wait_for(lambda: set(self._runs.glob("*/recipe.yaml")), "the run's folder")
            new = [path.parent for path in found if path.parent not in self._known]
            self._folder = new[0] if new else max(path.parent for path in found)
        return self._folder

    def output(self) -> str:
        """What the command printed so far, and the ends of all logs."""
        text = Path(self._log.name).read_text()
        for log in sorted(self.folder.glob("logs/*")):
            text += f"\n== {log.name}\n{log.read_text(errors='replace')[-1500:]}"
        return text

    def wait_for(self, what: Any, name: str) -> Any:
        """Waits until `what()` is true, and returns it. Fails when the run ends before."""
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            found = what()
            if found:
                return found
            assert self._process.poll() is None, f"the run ended before {name}:\n{self.output()}"
            time.sleep(0.02)
        raise AssertionError(f"waited {WAIT_SECONDS:g} s for {name}:\n{self.output()}")

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far; whole ones only."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def step(self) -> int:
        """The newest step in metrics.jsonl."""
        return max((line["step"] for line in self.metrics() if "loss" in line), default=0)

    def wait_for_step(self, step: int) -> None:
        """Waits until that many steps are done."""
        self.wait_for(lambda: self.step() >= step, f"step {step}")

    def address(self, service: str) -> str:
        """HOST:PORT of a service, once it is bound."""
        files = self.wait_for(lambda: list(self.folder.glob(f"addresses/{service}.*")), service)
        return str(files[0].read_text()).strip()

    def pids(self, service: str) -> list[int]:
        """Process ids of a service; of its keepers and engine processes none."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if self._is(service, command):
                    found.append(process.pid)
        return found

    def _is(self, service: str, command: list[str]) -> bool:
        if service == "redis":
            return any("valkey" in part or "redis-server" in part for part in command[:1])
        return f"services.{service}" in command and "offbeat.local.keeper" not in command

    def kill(self, service: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal (`kill -9`) to one process of the service; returns its pid."""
        pid = self.wait_for(lambda: self.pids(service), f"a process of {service}")[0]
        os.kill(pid, number)
        return int(pid)

    def kill_all(self) -> None:
        """`kill -9` of the command itself; everything must go with it."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        return self._process.wait(WAIT_SECONDS)

    def succeed(self) -> None:
        """Waits for the end, which must be a good one."""
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output()}"

    def audit(self) -> Audit:
        """The audit of the run, which must be clean."""
        tree = yaml.safe_load((self.folder / "recipe.yaml").read_text())["schedule"]
        schedule = ScheduleSettings.model_validate(tree)
        audit = audit_run(
            self.folder, prompts_per_step=schedule.cohort_size, max_lag=schedule.max_lag
        )
        assert audit.clean, audit.problems
        return audit

    def close(self) -> None:
        """Ends the run if it still goes on."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


@contextlib.contextmanager
def start(
    recipe: Path, *overrides: str, environment: dict[str, str] | None = None
) -> Iterator[WholeRun]:
    """`offbeat run recipe`; ended when the block ends."""
    sets = [part for override in overrides for part in ("--set", override)]
    run = WholeRun(recipe, ["run", str(recipe), *sets], environment or {})
    try:
        yield run
    finally:
        run.close()


@contextlib.contextmanager
def resume(recipe: Path, folder: Path, *overrides: str) -> Iterator[WholeRun]:
    """`offbeat run --resume folder`; ended when the block ends."""
    sets = [part for override in overrides for part in ("--set", override)]
    run = WholeRun(recipe, ["run", "--resume", str(folder), *sets], {})
    run._folder = folder
    try:
        yield run
    finally:
        run.close()
