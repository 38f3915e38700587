"""`docker compose` on a copy of the project's compose files, as a user with nothing else of the project has them."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.docker.engine import run

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("checkpoint", "generator", "reward", "learner")
PORT = "50051"
PROJECT = "offbeat-test"
"""Not the name of a project that may be running on the same engine."""
WAIT_SECONDS = 900
"""Longest wait for anything; generous, since a busy machine is no failure."""


class Project:
    """A folder with the compose files and runs/, and nothing else."""

    def __init__(self, folder: Path, env: Mapping[str, str], **settings: str) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.env = {**env, **settings, "COMPOSE_PROJECT_NAME": PROJECT}
        for file in ROOT.glob("docker-compose*.yml"):
            shutil.copy(file, folder)

    def compose(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """`docker compose WORDS`."""
        return run("docker", "compose", *words, env=self.env, cwd=self.folder, check=check)

    def docker(self, *words: str) -> str:
        """`docker WORDS`; returns what it prints."""
        return run("docker", *words, env=self.env).stdout

    def address(self, service: str) -> str:
        """HOST:PORT on which this machine reaches the service; "" while it has none."""
        return self.compose("port", service, PORT, check=False).stdout.strip()

    def grpcurl(self, service: str, method: str, data: str = "{}") -> dict[str, Any]:
        """Calls a method of the service on its published port, described by reflection alone; {} without an answer."""
        address = self.address(service)
        if not address:
            return {}
        words = ["grpcurl", "-plaintext", "-max-time", "10", "-emit-defaults", "-d", data]
        answer = run(*words, address, method, env=self.env, check=False).stdout
        return json.loads(answer) if answer.strip() else {}

    def health(self, service: str, name: str = "") -> str:
        """The status that the service gives on its published port; "" without an answer."""
        asked = json.dumps({"service": name})
        return str(self.grpcurl(service, "grpc.health.v1.Health/Check", asked).get("status", ""))

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of the service's container."""
        found = self.compose("ps", "--all", "--quiet", service).stdout.split()
        assert len(found) == 1, f"expected one container of {service}, found {found}"
        return json.loads(self.docker("inspect", found[0]))[0]

    def inside(self, service: str, script: str) -> str:
        """What a shell script prints in the service's container."""
        return self.compose("exec", "-T", service, "sh", "-c", script).stdout.strip()

    def wait_until(self, what: Callable[[], bool], name: str) -> None:
        """Waits; when that takes too long or a service has failed, the logs are the message."""
        end = time.monotonic() + WAIT_SECONDS
        while not what():
            failed = [s for s in SERVICES if self._failed(s)]
            if failed or time.monotonic() > end:
                logs = self.compose("logs", "--tail", "60", check=False).stdout
                raise AssertionError(f"waiting for {name}, failed services: {failed}\n{logs}")
            time.sleep(1)

    def _failed(self, service: str) -> bool:
        found = self.compose("ps", "--all", "--quiet", service, check=False).stdout.split()
        if not found:
            return False
        state = json.loads(self.docker("inspect", found[0]))[0]["State"]
        return bool(state["Status"] == "exited" and state["ExitCode"] != 0)

    def left(self) -> dict[str, list[str]]:
        """Containers, networks and volumes of the project."""
        label = f"label=com.docker.compose.project={PROJECT}"
        return {
            "containers": self.docker("ps", "--all", "--quiet", "--filter", label).split(),
            "networks": self.docker("network", "ls", "--quiet", "--filter", label).split(),
            "volumes": self.docker("volume", "ls", "--quiet", "--filter", label).split(),
        }
