"""Whole runs, and what their folders say about them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

OFFBEAT = ("-m", "offbeat", "run")
EMULATED = ("-m", "benchmarks.suite.emulated.run")
RUN_SECONDS = 900.0
READ_SECONDS = 0.5


@dataclass(frozen=True)
class RunResult:
    """`started`: when the command was given, seconds since 1970. `cpu`: (time, CPU seconds by service so far)."""

    folder: Path
    started: float
    steps: list[dict[str, Any]]
    cpu: list[tuple[float, dict[str, float]]]

    def step_seconds(self, skip: int) -> list[float]:
        """Wall seconds of each step but the first `skip`, which fill the pipeline, and the last two, which drain it."""
        return [line["time/step_seconds"] for line in self.steps[skip:-2]]

    def cycle_seconds(self, skip: int, cycle: int) -> list[float]:
        """Wall seconds of a step, averaged over each `cycle` steps in a row.

        With max_lag S there are S + 1 cohorts under way, which may be unevenly spaced: their steps then take turns in
        being short and long.
        """
        steps = self.step_seconds(skip)
        return [sum(steps[at : at + cycle]) / cycle for at in range(len(steps) - cycle + 1)]

    def cpu_of_a_step(self, skip: int) -> float:
        """CPU seconds of all services for one step: the mean of those that `step_seconds` is about."""
        ends = self.ends()[skip - 1 : -2]
        return (self._cpu_at(ends[-1]) - self._cpu_at(ends[0])) / (len(ends) - 1)

    def _cpu_at(self, moment: float) -> float:
        """CPU seconds of all processes until then, between two readings in proportion."""
        times = [at for at, _ in self.cpu]
        return float(np.interp(moment, times, [sum(used.values()) for _, used in self.cpu]))

    def ends(self) -> list[float]:
        """When each step ended, seconds since 1970."""
        return [line["time"] for line in self.steps]


def run(
    tree: Mapping[str, Any],
    scratch: Path,
    *,
    name: str,
    program: tuple[str, ...] = OFFBEAT,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[psutil.Process], None] | None = None,
) -> RunResult:
    """Runs a recipe to its end. `watch` is called again and again with the process of `offbeat run`.

    Raises `RuntimeError` with the end of its output when it fails. The folder stays until the next run of that name.
    """
    runs = scratch / "runs" / name
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    tree = dict(tree) | {"run": {**tree.get("run", {}), "name": "bench", "directory": str(runs)}}
    recipe = runs / "bench.yaml"
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    log = runs / "output.log"
    with log.open("wb") as output:
        started = time.time()
        child = subprocess.Popen(
            [sys.executable, *program, str(recipe)],
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
        cpu = _wait(child, watch)
    if child.returncode != 0:
        end = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"run {name} ended with {child.returncode}; its output ends so:\n{end}")
    folder = next(path for path in runs.iterdir() if path.is_dir())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return RunResult(folder, started, steps, cpu)


def _wait(
    child: "subprocess.Popen[bytes]", watch: Callable[[psutil.Process], None] | None
) -> list[tuple[float, dict[str, float]]]:
    """Waits for the end; what `RunResult.cpu` holds."""
    cpu: dict[tuple[str, int], float] = {}
    readings: list[tuple[float, dict[str, float]]] = []
    end = time.monotonic() + RUN_SECONDS
    process = psutil.Process(child.pid)
    try:
        while child.poll() is None:
            if time.monotonic() > end:
                raise RuntimeError(f"expected the run to end within {RUN_SECONDS:g} s")
            for member in members(process):
                try:
                    times = member.cpu_times()
                    cpu[service_of(member), member.pid] = times.user + times.system
                except psutil.Error:
                    continue  # it has just ended
            found: dict[str, float] = {}
            for (service, _), seconds in cpu.items():
                found[service] = found.get(service, 0.0) + seconds
            readings.append((time.time(), found))
            if watch is not None:
                watch(process)
            time.sleep(READ_SECONDS)
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait()
    return readings


def members(process: psutil.Process) -> list[psutil.Process]:
    """The processes of a run."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def service_of(process: psutil.Process) -> str:
    """What a process of a run is: a service, "redis", "engine" (vLLM's own processes), or "supervisor"."""
    line = " ".join(process.cmdline())
    for service in ("checkpoint", "generator", "reward", "learner"):
        if f"services.{service}" in line or f"emulated.{service}" in line:
            return service
    if "valkey-server" in line or "redis-server" in line:
        return "redis"
    return "engine" if "VLLM" in line or "multiprocessing" in line else "supervisor"
