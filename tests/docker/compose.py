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
    """A folder with the compose files, what they mount, and runs/, and nothing else."""

    def __init__(self, folder: Path, env: Mapping[str, str], **settings: str) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.env = {**env, **settings, "COMPOSE_PROJECT_NAME": PROJECT}
        for file in ROOT.glob("docker-compose*.yml"):
            shutil.copy(file, folder)
        shutil.copytree(ROOT / "deploy" / "monitoring", folder / "deploy" / "monitoring")

    def compose(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """`docker compose WORDS`."""
        return run("docker", "compose", *words, env=self.env, cwd=self.folder, check=check)

    def docker(self, *words: str) -> str:
        """`docker WORDS`; returns what it prints."""
        return run("docker", *words, env=self.env).stdout

    def address(self, service: str, index: int = 1, *, port: str = PORT) -> str:
        """HOST:PORT on which this machine reaches a container of the service; "" while it has none."""
        words = ["port", "--index", str(index), service, port]
        return self.compose(*words, check=False).stdout.strip()

    def grpcurl(
        self, service: str, method: str, data: str = "{}", *, index: int = 1
    ) -> dict[str, Any]:
        """Calls a method of the service on its published port, described by reflection alone; {} without an answer."""
        address = self.address(service, index)
        if not address:
            return {}
        words = ["grpcurl", "-plaintext", "-max-time", "10", "-emit-defaults", "-d", data]
        answer = run(*words, address, method, env=self.env, check=False).stdout
        return json.loads(answer) if answer.strip() else {}

    def health(self, service: str, name: str = "", *, index: int = 1) -> str:
        """The status that the service gives on its published port; "" without an answer."""
        asked = json.dumps({"service": name})
        answer = self.grpcurl(service, "grpc.health.v1.Health/Check", asked, index=index)
        return str(answer.get("status", ""))

    def inspect(self, service: str, index: int = 1) -> dict[str, Any]:
        """What the engine knows of a container of the service."""
        number = "com.docker.compose.container-number"
        found = self.compose("ps", "--all", "--quiet", service).stdout.split()
        for container in found and json.loads(self.docker("inspect", *found)):
            if container["Config"]["Labels"].get(number) == str(index):
                return dict(container)
        raise AssertionError(f"expected a container {index} of {service}, found {found}")

    def inside(self, service: str, script: str) -> str:
        """What a shell script prints in the service's container."""
        return self.compose("exec", "-T", service, "sh", "-c", script).stdout.strip()

    def wait_until(self, what: Callable[[], bool], name: str, *, may_fail: bool = False) -> None:
        """Waits; when that takes too long or a service has failed, the logs are the message.

        `may_fail`: services that have failed are expected back.
        """
        end = time.monotonic() + WAIT_SECONDS
        while not what():
            failed = [s for s in SERVICES if not may_fail and self._failed(s)]
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
