"""What `offbeat run` starts: the command, environment and place in the order of each process.

Used by `offbeat.local.run`, and by ``--dry-run`` and `offbeat serve`, which show and start the same commands.
"""

import getpass
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config import Recipe
from offbeat.config.service import RpcSettings
from offbeat.errors import ConfigError
from offbeat.local.supervisor import ProcessSpec
from offbeat.local.threads import cores_available, share_threads

SERVICES = ("checkpoint", "generator", "reward", "learner")
SECTIONS = {
    "checkpoint": ("run", "checkpoint", "telemetry"),
    "generator": (
        "run",
        "model",
        "sampling",
        "schedule",
        "generator",
        "checkpoint",
        "redis",
        "telemetry",
    ),
    "reward": ("run", "model", "reward", "redis", "telemetry"),
    "learner": (
        *("run", "model", "data", "sampling", "schedule", "evaluation", "learner", "checkpoint"),
        *("redis", "telemetry"),
    ),
}
"""Sections of the recipe that matter to each service."""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

LEARNER_STOPS, WORKERS_STOP, CHECKPOINT_STOPS, REDIS_STOPS = range(4)
"""Order of stopping: each may still need those after it while it drains."""


@dataclass(frozen=True)
class Node:
    """One of several machines that the learner's ranks are spread over."""

    index: int = 0
    """0: the one with rank 0."""
    count: int = 1
    meet: str | None = None
    """HOST:PORT of node 0, where the ranks meet."""

    def ranks_here(self, ranks: int) -> int:
        """Ranks of each node. Raises `ConfigError` when they can't be spread evenly, or nobody says where to meet."""
        if not 0 <= self.index < self.count:
            raise ConfigError(f"--node: expected 0 to {self.count - 1}, found {self.index}")
        if ranks % self.count:
            raise ConfigError(
                f"learner.ranks: expected a multiple of the {self.count} nodes, found {ranks}; change one of them"
            )
        if self.count > 1 and self.meet is None:
            raise ConfigError(
                f"--meet: expected HOST:PORT of node 0, since there are {self.count} nodes"
            )
        return ranks // self.count


def service_command(
    service: str,
    recipe_file: str,
    overrides: Sequence[str] = (),
    *,
    ranks: int = 1,
    node: Node | None = None,
) -> tuple[str, ...]:
    """The command line of a service; a learner of several ranks goes through its launcher. Raises `ConfigError`."""
    node = node or Node()
    module = ["-m", f"services.{service}"]
    here = node.ranks_here(ranks)
    if ranks > 1:
        module = ["-m", f"services.{service}.launch", "--ranks", str(here)]
    if node.count > 1:
        module += ["--nodes", str(node.count), "--node", str(node.index), "--meet", str(node.meet)]
    sets = [part for override in overrides for part in ("--set", override)]
    return (sys.executable, *module, "--recipe", recipe_file, *sets)


def checkpoint_spec(
    recipe: Recipe, recipe_file: Path, *, redis_url: str, cores: int
) -> ProcessSpec:
    """The checkpoint service, which is started before the others. Redis remembers its numbers if its disk is lost."""
    return ProcessSpec(
        service="checkpoint",
        command=service_command("checkpoint", str(recipe_file), [f"redis.url={redis_url}"]),
        env=_environment(recipe, "checkpoint", cores),
        stop_order=CHECKPOINT_STOPS,
    )


def worker_specs(
    recipe: Recipe, recipe_file: Path, *, redis_url: str, checkpoint_address: str, cores: int
) -> list[ProcessSpec]:
    """Generators, reward workers, and the learner. Raises `ConfigError` when two would take one port."""
    overrides = [f"redis.url={redis_url}", f"checkpoint.address={checkpoint_address}"]
    specs = []
    for service, replicas in (
        ("generator", recipe.generator.replicas),
        ("reward", recipe.reward.replicas),
    ):
        _check_ports(service, getattr(recipe, service).rpc, replicas)
        specs += [
            ProcessSpec(
                service=service,
                index=index,
                command=service_command(service, str(recipe_file), overrides),
                env=_environment(recipe, service, cores)
                | _devices(service, getattr(recipe, service).devices, replicas, index),
                stop_order=WORKERS_STOP,
            )
            for index in range(replicas)
        ]
    ranks = recipe.learner.ranks
    learner = ProcessSpec(
        service="learner",
        command=service_command("learner", str(recipe_file), overrides, ranks=ranks),
        env=_environment(recipe, "learner", cores) | _learner_devices(recipe),
        finishes=True,
        stop_order=LEARNER_STOPS,
    )
    return [*specs, learner]


def recipe_part(recipe: Recipe, service: str) -> dict[str, Any]:
    """The sections of the recipe that matter to a service."""
    tree = recipe.model_dump(mode="json")
    return {section: tree[section] for section in SECTIONS[service] if tree[section] is not None}


def grace_seconds(recipe: Recipe) -> float:
    """Time from SIGTERM to SIGKILL: the longest drain of a service, and a little for its end."""
    parts = (recipe.learner, recipe.generator, recipe.reward, recipe.checkpoint)
    return max(part.rpc.drain_seconds for part in parts) + 10.0


def threads_environment(recipe: Recipe, service: str, cores: int | None = None) -> dict[str, str]:
    """Environment that holds a process of the service to its share of `cores` (None: those of this machine)."""
    threads = share_threads(recipe, cores_available() if cores is None else cores)[service]
    return {"OMP_NUM_THREADS": str(threads)}


def scratch_environment(scratch: str) -> dict[str, str]:
    """Environment of processes whose temporary files shall go with the folder `scratch`, however they end.

    vLLM leaves its sockets behind when it is killed. What inductor compiles stays where it is for later runs.
    """
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {
        "TMPDIR": scratch,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled),
    }


def _environment(recipe: Recipe, service: str, cores: int) -> dict[str, str]:
    return {**threads_environment(recipe, service, cores), "PYTHONUNBUFFERED": "1"}


def _devices(
    service: str, devices: Sequence[int] | None, replicas: int, index: int
) -> dict[str, str]:
    """GPUs that a replica sees: its share of `devices`; a single one is shared. Raises `ConfigError`."""
    if devices is None:
        return {}
    if len(devices) == 1:
        share = list(devices)
    elif len(devices) % replicas:
        raise ConfigError(
            f"{service}.devices: expected one GPU, or a multiple of {service}.replicas = {replicas}, found "
            f"{len(devices)}; change one of them"
        )
    else:
        size = len(devices) // replicas
        share = list(devices[index * size : (index + 1) * size])
    return {VISIBLE_DEVICES: ",".join(map(str, share))}


def _learner_devices(recipe: Recipe) -> dict[str, str]:
    devices, ranks = recipe.learner.devices, recipe.learner.ranks
    if devices is None:
        return {}
    if len(devices) != ranks:
        raise ConfigError(
            f"learner.devices: expected a GPU for each of learner.ranks = {ranks}, found {len(devices)}; "
            "change one of them"
        )
    return {VISIBLE_DEVICES: ",".join(map(str, devices))}


def _check_ports(service: str, rpc: RpcSettings, replicas: int) -> None:
    if replicas < 2:
        return
    for key, port in (
        ("bind", int(rpc.bind.rpartition(":")[2])),
        ("metrics_port", rpc.metrics_port),
    ):
        if port:
            raise ConfigError(
                f"{service}.rpc.{key}: found the fixed port {port}, but {service}.replicas is {replicas} and each "
                "process needs a port of its own; set port 0, and the system chooses"
            )
