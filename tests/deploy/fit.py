"""Whether a deployment fits the code: images, commands, settings, probes, environment, metrics. Returns problems."""

import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import typer.main
import yaml

from offbeat.cli.app import app
from offbeat.config import Recipe, load_recipe
from offbeat.config.load import parse_recipe
from offbeat.errors import ConfigError
from offbeat.local.commands import SERVICES
from offbeat.rpc.server import LIVENESS, READINESS
from tests.deploy.manifests import ROOT, Manifest, Workload, of_kind, workloads

OTHER_IMAGES = {"redis:7-alpine"}
TAGS = {"latest", "cuda"}
"""What `make images` makes."""
OF_LIBRARIES = {"HF_HOME", "HF_TOKEN", "OMP_NUM_THREADS"}
"""Read by huggingface_hub and by OpenMP."""
LEAVING_SECONDS = 10.0
"""What a service's end takes beside its drain; as in `offbeat.local.commands.grace_seconds`."""
METRIC = re.compile(r"offbeat_[a-z_]+")
REFERENCE = re.compile(r"\$\(([A-Z_]+)\)")


def images(manifests: list[Manifest]) -> Iterator[str]:
    """An image is one that the project makes, and has the service that it is told to run."""
    for work in workloads(manifests):
        for container in work.containers:
            image = container["image"]
            if image in OTHER_IMAGES:
                continue
            repository, _, tag = image.partition(":")
            service = repository.removeprefix("offbeat/")
            if not (ROOT / "services" / service / "Dockerfile").is_file() or tag not in TAGS:
                yield f"{work.name}: there is no image {image}"
            if served(container) not in {service, None}:
                yield f"{work.name}: {image} has no service {served(container)}"


def commands(manifests: list[Manifest]) -> Iterator[str]:
    """Commands and options are those of `offbeat`; settings are the recipe's, and valid with it."""
    for work, container in _offbeat(manifests):
        try:
            _parse(container)
        except (SystemExit, KeyError, typer.BadParameter, *_click_errors()) as error:
            yield f"{work.name}: {getattr(error, 'message', error)}"
            continue
        try:
            settings(manifests, container)
        except ConfigError as error:
            yield f"{work.name}: {error}"


def probes(manifests: list[Manifest]) -> Iterator[str]:
    """Probes ask for the names that the services answer to, each for its own."""
    wanted = {"startupProbe": LIVENESS, "livenessProbe": LIVENESS, "readinessProbe": READINESS}
    for work, container in _offbeat(manifests):
        for probe, name in wanted.items():
            asked = container.get(probe, {}).get("grpc", {}).get("service")
            if container.get(probe) and asked != name:
                yield f"{work.name}: {probe} asks for {asked!r}, expected {name!r}"
        if container.get("ports") and served(container) and set(wanted) - set(container):
            yield f"{work.name}: lacks {sorted(set(wanted) - set(container))}"


def grace(manifests: list[Manifest]) -> Iterator[str]:
    """A pod has the time to drain: the wait before SIGTERM, the drain, and its end."""
    for work, container in _offbeat(manifests):
        service = served(container)
        if service not in SERVICES:
            continue
        try:
            drain = getattr(settings(manifests, container), service).rpc.drain_seconds
        except ConfigError:
            continue  # told by `commands`
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = sleep + drain + LEAVING_SECONDS
        if work.pod.get("terminationGracePeriodSeconds", 30) < needed:
            yield f"{work.name}: its grace period is shorter than the {needed:g} s that it takes to drain"


def environment(manifests: list[Manifest]) -> Iterator[str]:
    """Variables that are set are read, and those that are used are set."""
    for work in workloads(manifests):
        for container in work.containers:
            given = {variable["name"] for variable in container.get("env", [])}
            words = " ".join([*container.get("command", []), *container.get("args", [])])
            used = set(REFERENCE.findall(words))
            in_shell = set(re.findall(r"\$\{?([A-Z_]+)", words))
            for name in sorted(used - given):
                yield f"{work.name}: $({name}) is used and not set"
            recipe = "".join(
                m["data"].get("recipe.yaml", "") for m in of_kind(manifests, "ConfigMap")
            )
            for name in sorted(given - used - in_shell - OF_LIBRARIES - read_by_code()):
                if f"api_key_env: {name}" not in recipe:
                    yield f"{work.name}: nobody reads {name}"


def addresses(manifests: list[Manifest]) -> Iterator[str]:
    """HOST:PORT in the settings are those of services here."""
    ports = {
        m["metadata"]["name"]: {port["port"] for port in m["spec"].get("ports", [])}
        for m in of_kind(manifests, "Service")
    }
    outside = {
        m["metadata"]["name"]
        for m in of_kind(manifests, "Service")
        if m["spec"].get("type") == "ExternalName"
    }
    for work, container in _offbeat(manifests):
        if served(container) not in SERVICES:
            continue
        try:
            recipe = settings(manifests, container)
        except ConfigError:
            continue  # told by `commands`
        asked = [
            recipe.checkpoint.address,
            recipe.checkpoint.upstream,
            *recipe.generator.checkpoint_addresses,
        ]
        asked.append(urlsplit(recipe.redis.url or "").netloc)
        for address in filter(None, asked):
            host, _, port = address.rpartition(":")
            if host not in outside and int(port) not in ports.get(host, set()):
                yield f"{work.name}: there is no service {address}"
        bound = getattr(recipe, str(served(container))).rpc
        listening = {port["containerPort"] for port in container.get("ports", [])}
        if listening and listening != {int(bound.bind.rpartition(":")[2]), bound.metrics_port}:
            yield f"{work.name}: its ports {sorted(listening)} are not those that it binds"


def metrics(manifests: list[Manifest]) -> Iterator[str]:
    """Metrics that are asked for are exported."""
    for scaled in of_kind(manifests, "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            for name in METRIC.findall(trigger["metadata"]["query"]):
                if name not in exported():
                    yield f"ScaledObject/{scaled['metadata']['name']}: no service exports {name}"


def served(container: Manifest) -> str | None:
    """The service that a container runs; None when it runs none of ours."""
    words = [*container.get("command", []), *container.get("args", [])]
    return words[2] if words[:2] == ["offbeat", "serve"] else None


def settings(manifests: list[Manifest], container: Manifest) -> Recipe:
    """The recipe as the container's service reads it. Raises `ConfigError`."""
    maps = of_kind(manifests, "ConfigMap")
    texts = [m["data"]["recipe.yaml"] for m in maps if m["metadata"]["name"] == "recipe"]
    text = texts[0] if texts else "null"
    options = [
        word.removeprefix("--set=")
        for word in container.get("args", [])
        if word.startswith("--set=")
    ]
    return _load(text, tuple(REFERENCE.sub("10.0.0.1", option) for option in options))


@cache
def _load(text: str, overrides: tuple[str, ...]) -> Recipe:
    if not isinstance(yaml.safe_load(text), dict):
        return parse_recipe({}, source="recipe.yaml")
    with TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(text)
        return load_recipe(path, list(overrides))


@cache
def read_by_code() -> frozenset[str]:
    """Environment variables that the project's code names."""
    names: set[str] = set()
    for folder in ("offbeat", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            names.update(re.findall(r"environ(?:\.\w+)?[(\[]\"([A-Z_]+)\"", path.read_text()))
    return frozenset(names)


@cache
def exported() -> frozenset[str]:
    """Names of the metrics of all services, as Prometheus stores them."""
    from offbeat.v1 import learner_pb2
    from services.checkpoint.counters import Counters as OfCheckpoint
    from services.checkpoint.store import VersionStore
    from services.generator.counters import Counters as OfGenerator
    from services.learner.scaling import Scaling
    from services.reward.counters import Counters as OfReward

    class Board:
        checkpoint_step, waiting_seconds, started = 0, 0.0, 0.0

        def read(self) -> learner_pb2.Progress:
            return learner_pb2.Progress()

    with TemporaryDirectory() as folder:
        of_checkpoint = OfCheckpoint(VersionStore(Path(folder), "run", 1))
    collectors = (of_checkpoint, OfGenerator(), OfReward(), Scaling(Board()))  # type: ignore[arg-type]
    names: set[str] = set()
    for collector in collectors:
        for metric in collector.collect():
            suffixes = {"counter": ["_total"], "summary": ["_sum", "_count"]}
            names |= {metric.name + suffix for suffix in suffixes.get(metric.type, [""])}
    return frozenset(names)


def _offbeat(manifests: list[Manifest]) -> Iterator[tuple[Workload, Manifest]]:
    """Containers that run `offbeat`."""
    for work in workloads(manifests):
        for container in work.containers:
            if container.get("command", [""])[0] == "offbeat":
                yield work, container


def _click_errors() -> tuple[type[Exception], ...]:
    parents = typer.BadParameter.__mro__
    return (next(parent for parent in parents if parent.__name__ == "ClickException"),)  # type: ignore[return-value]


def _parse(container: Manifest) -> None:
    """Parses the command line as `offbeat` does, without running it."""
    words = [*container["command"], *container.get("args", [])]
    words = shlex.split(shlex.join(REFERENCE.sub("x", word) for word in words))
    group = typer.main.get_command(app)
    command = group.commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], words[2:])
    if words[1] == "serve" and words[2] not in SERVICES:
        raise KeyError(f"no service {words[2]}")


CHECKS: tuple[Callable[[list[Manifest]], Iterator[str]], ...] = (
    images, commands, probes, grace, environment, addresses, metrics,
)  # fmt: skip
