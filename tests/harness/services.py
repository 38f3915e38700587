"""The services of a run, each started on its own, as containers and pods are: nobody supervises them.

with Services(folder, schedule={"steps": 20}) as run:
    for name in ("redis", "checkpoint", "generator", "reward", "learner"):
        run.start(name)
    run.wait_for_steps(5)
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.audit import Audit, audit_run
from offbeat.local.redis_server import MIB, RedisServer, free_port
from tests.harness.whole_run import WAIT_SECONDS, write_recipe

RUN_ID = "alone"
COHORT = 8


class Services:
    """Redis and the services on ports that do not change, so that they may start in any order."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder = folder / "runs" / RUN_ID
        self.recipe = write_recipe(folder, **sections)
        self._server = RedisServer(folder / "redis", max_memory_bytes=256 * MIB, port=free_port())
        checkpoint = f"127.0.0.1:{free_port()}"
        self._overrides = [
            f"run.id={RUN_ID}",
            f"redis.url={self._server.url}",
            f"checkpoint.address={checkpoint}",
            f"checkpoint.rpc.bind={checkpoint}",
        ]
        self._logs = folder / "logs"
        self._logs.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Services":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._server.stop()

    def start(
        self, name: str, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes] | None":
        """Starts "redis" or a service; returns the service's process. A service may be started again beside itself."""
        if name == "redis":
            self._server.start()
            return None
        sets = [part for override in self._overrides for part in ("--set", override)]
        command = [sys.executable, "-m", f"services.{name}", "--recipe", str(self.recipe), *sets]
        with (self._logs / f"{len(self.processes)}.{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
            )
        self.processes.append(process)
        return process

    def wait_for(self, holds: Callable[[], Any], what: str) -> None:
        """Waits until `holds()`. Raises AssertionError that names `what`."""
        end = time.monotonic() + WAIT_SECONDS
        while not holds():
            assert time.monotonic() < end, f"waited {WAIT_SECONDS:g} s for {what}:\n{self.output()}"
            time.sleep(0.05)

    def steps(self) -> list[dict[str, Any]]:
        """The lines of the steps so far; whole ones only."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [line for line in map(json.loads, lines) if line["kind"] == "step"]

    def wait_for_steps(self, count: int) -> None:
        """Waits until so many lines of steps are there."""
        self.wait_for(lambda: len(self.steps()) >= count, f"{count} steps")

    def audit(self, *, max_lag: int) -> Audit:
        """The audit of the run, which must be clean."""
        audit = audit_run(self.folder, prompts_per_step=COHORT, max_lag=max_lag)
        assert audit.clean, audit.problems
        return audit

    def output(self) -> str:
        """The ends of all logs."""
        logs = sorted(self._logs.iterdir())
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs
        )
