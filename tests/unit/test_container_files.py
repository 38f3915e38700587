"""The Dockerfiles and compose files that are shipped: what they say fits the code, without an engine at hand."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.config import load_recipe
from offbeat.local.commands import SERVICES
from offbeat.rpc.entry import run_folder

ROOT = Path(__file__).resolve().parents[2]
PORT = 50051
METRICS_PORT = 9090
BASES = {"python:3.11-slim", "redis:7-alpine"}
OTHERS = {
    "prom/prometheus:v3.5.0", "grafana/grafana:11.6.0", "oliver006/redis_exporter:v1.62.0-alpine",
}  # fmt: skip
OWN_SETTINGS = {
    "CHECKPOINT_MEMORY", "CHECKPOINT_PORT", "GENERATOR_GPU", "GENERATOR_MEMORY",
    "GRAFANA_PORT", "LEARNER_GPU", "LEARNER_MEMORY", "LEARNER_PORT", "OFFBEAT_GPU_TAG", "OFFBEAT_TAG",
    "PIP_FIND_LINKS", "PROMETHEUS_PORT", "RECIPE", "RECIPE_DIR", "REDIS_MAXMEMORY", "REDIS_MEMORY",
    "REDIS_PASSWORD_FILE", "REWARD_GPU", "REWARD_MEMORY", "RUN_AS", "RUN_ID", "SETTINGS", "SHM_SIZE",
    "TORCH_INDEX",
}  # fmt: skip
ON_GPUS = ("generator", "reward", "learner")
MONITORING = ("prometheus", "redis-exporter", "grafana")
VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z_]+)(?::([-?])([^}]*))?\}")


class _Loader(yaml.SafeLoader):
    """YAML with compose's own tags."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def compose(name: str = "docker-compose.yml", **variables: str) -> dict[str, Any]:
    """A compose file as compose reads it: variables replaced by their values or defaults."""

    def value(match: re.Match[str]) -> str:
        default = match[3] if match[2] == "-" else match[1].lower()
        return variables.get(match[1], default or "")

    text = VARIABLE.sub(value, (ROOT / name).read_text())
    return yaml.load(text, _Loader)


def dockerfile(service: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of each line of a service's Dockerfile."""
    text = (ROOT / "services" / service / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(instruction, rest.strip()) for instruction, _, rest in found]


def values(service: str, instruction: str) -> list[str]:
    return [rest for name, rest in dockerfile(service) if name == instruction]


# --- Dockerfiles


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_made_of_official_bases_and_files_that_exist(service: str) -> None:
    bases = [rest.split()[0] for rest in values(service, "FROM")]
    assert set(bases) <= BASES
    assert len(bases) == 2, "a stage that builds and one that runs"
    for copied in values(service, "COPY"):
        words = copied.split()
        if words[0].startswith("--from="):
            continue
        for source in words[:-1]:
            assert list(ROOT.glob(source)), source


@pytest.mark.parametrize("service", SERVICES)
def test_packages_are_pinned_by_hash_and_the_service_is_alone(service: str) -> None:
    installs = [rest for rest in values(service, "RUN") if "pip install" in rest]
    words = " ".join(installs)
    assert words.count("--require-hashes") == 2
    for tag in ("", "-cuda") if service in ON_GPUS else ("",):
        assert (ROOT / "requirements" / f"{service}{tag}.txt").is_file()
    suffix = "${ACCELERATOR:+-$ACCELERATOR}" if service in ON_GPUS else ""
    assert f"requirements/{service}{suffix}.txt" in words
    assert values(service, "ARG")[:2] == ["PIP_FIND_LINKS=", "TORCH_INDEX="]
    copied = " ".join(values(service, "COPY"))
    others = [name for name in SERVICES if name != service]
    assert not [name for name in others if f"services/{name}" in copied]


@pytest.mark.parametrize("service", SERVICES)
def test_hadolint_finds_nothing(service: str) -> None:
    command = [
        Path(sys.executable).with_name("hadolint"),
        ROOT / "services" / service / "Dockerfile",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_as_no_root_is_checked_and_labelled(service: str) -> None:
    assert values(service, "USER") == ["1000:1000"]
    assert values(service, "EXPOSE") == [str(PORT)]
    assert f'"127.0.0.1:{PORT}"' in values(service, "HEALTHCHECK")[0]
    assert "org.opencontainers.image.title" in values(service, "LABEL")[0]


@pytest.mark.parametrize("service", SERVICES)
def test_the_default_command_is_the_services(service: str) -> None:
    command = yaml.safe_load(values(service, "CMD")[0])
    _check_command(command, service, needs_run=False)


def test_only_what_images_are_made_of_goes_to_the_builder() -> None:
    rules = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in "#"
    ]
    assert rules[0] == "*"
    allowed = {line[1:] for line in rules if line.startswith("!")}
    needed = {
        source.split("/")[0]
        for service in SERVICES
        for copied in values(service, "COPY")
        if not copied.startswith("--from=")
        for source in copied.split()[:-1]
    }
    assert allowed == needed


# --- compose


def test_compose_starts_every_service_from_its_own_image() -> None:
    services = compose()["services"]
    plain = {name for name, service in services.items() if "profiles" not in service}
    assert plain == {*SERVICES, "redis", "runs"}
    for name in SERVICES:
        assert services[name]["image"] == f"offbeat/{name}:latest"
        assert services[name]["build"]["dockerfile"] == f"services/{name}/Dockerfile"
        assert set(services[name]["build"]["args"]) == {"PIP_FIND_LINKS", "TORCH_INDEX"}
    assert {services[name]["image"] for name in ("redis", "runs")} <= BASES


@pytest.mark.parametrize("service", SERVICES)
def test_a_services_command_is_a_recipe_and_settings_that_exist(service: str) -> None:
    settings = "--set schedule.steps=5 --set schedule.max_lag=0"
    parsed = compose(SETTINGS=settings, RUN_ID="mine")["services"][service]
    recipe = _check_command(shlex.split(parsed["command"]), service, needs_run=True)
    assert (recipe.schedule.steps, recipe.schedule.max_lag, recipe.run.id) == (5, 0, "mine")
    assert recipe.redis.url == "redis://redis:6379/0"
    if service in {"generator", "learner"}:
        assert recipe.checkpoint.address == f"checkpoint:{PORT}"


def test_start_is_gated_by_health() -> None:
    services = compose()["services"]
    waits = {
        name: {on: given["condition"] for on, given in service.get("depends_on", {}).items()}
        for name, service in services.items()
    }
    healthy = "service_healthy"
    assert waits["checkpoint"] == {"redis": healthy}
    assert waits["reward"] == {"redis": healthy}
    assert waits["generator"] == {"redis": healthy, "checkpoint": healthy}
    # Not on the generator, which is healthy once it holds what the learner publishes.
    assert waits["learner"] == {
        "redis": healthy,
        "checkpoint": healthy,
        "runs": healthy,
    }
    for name in ("redis", "runs"):
        assert services[name]["healthcheck"]["test"]


def test_redis_keeps_what_it_was_given() -> None:
    script = compose()["services"]["redis"]["command"][0].replace("\\\n", " ")
    command = shlex.split(script.partition("exec ")[2])
    assert command[:2] == ["redis-server", "/tmp/redis.conf"]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--maxmemory"] == "1gb"
    assert options["--protected-mode"] == "no"  # or it would answer its own container alone


def test_services_that_scale_have_no_name_or_port_of_their_own() -> None:
    services = compose()["services"]
    for name in ("generator", "reward"):
        assert services[name]["ports"] == [f"127.0.0.1::{PORT}"]
        assert "container_name" not in services[name]
    published = [services[name]["ports"][0] for name in ("checkpoint", "learner")]
    assert published == [f"127.0.0.1:50051:{PORT}", f"127.0.0.1:50054:{PORT}"]


def test_containers_are_closed_and_nothing_of_the_host_is_mounted_but_results() -> None:
    parsed = compose()
    for name, service in parsed["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("privileged") is None
        assert service["mem_limit"], name
        assert service["pids_limit"], name
        assert service["restart"].startswith("on-failure"), name
        mounts = [mount.split(":")[0] for mount in service.get("volumes", [])]
        if name in MONITORING:
            mounts = [mount for mount in mounts if not mount.startswith("./deploy/monitoring/")]
        assert set(mounts) <= {"./runs", *parsed["volumes"]}, name
        if name not in {
            "runs",
            "prometheus",
            "grafana",
        }:  # these have a user of their own in their images
            assert service["user"].split(":")[0] not in {"0", "root"}
    shared = [
        name for name, s in parsed["services"].items() if "./runs:/runs" in s.get("volumes", [])
    ]
    assert shared == ["runs", "learner", "learner-gpu"]


def test_gpus_are_asked_for_in_their_profile_alone() -> None:
    services = compose()["services"]
    for name, service in services.items():
        devices = (
            service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
        )
        assert bool(devices) == (name.removesuffix("-gpu") in ON_GPUS and name.endswith("-gpu")), (
            name
        )
    for name in ON_GPUS:
        plain, gpu = services[name], services[f"{name}-gpu"]
        assert gpu["profiles"] == ["gpu"]
        assert gpu["build"]["args"]["ACCELERATOR"] == "cuda"
        assert gpu["image"] == plain["image"].replace("latest", "cuda")
        for key in ("command", "ports", "read_only", "cap_drop", "secrets", "user"):
            assert gpu[key] == plain[key], (name, key)
    # One name starts them all.
    assert {"generator-gpu", "reward-gpu"} <= set(services["learner-gpu"]["depends_on"])


def test_monitoring_is_a_profile_of_its_own() -> None:
    services = compose()["services"]
    for name in MONITORING:
        assert services[name]["profiles"] == ["monitoring"]
        assert services[name]["image"] in OTHERS
        for mount in services[name].get("volumes", []):
            if mount.startswith("./"):
                assert (ROOT / mount.split(":")[0]).exists(), mount
                assert mount.endswith(":ro")


def test_passwords_are_files_and_there_are_none_by_default() -> None:
    assert {entry["file"] for entry in compose()["secrets"].values()} == {"/dev/null"}
    set_to = compose(REDIS_PASSWORD_FILE="/secret")["secrets"]
    assert set_to == {"redis-password": {"file": "/secret"}}
    grafana = compose()["services"]["grafana"]["environment"]
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert (grafana["GF_AUTH_BASIC_ENABLED"], grafana["GF_AUTH_DISABLE_LOGIN_FORM"]) == (
        "false",
        "true",
    )
    for service in SERVICES:
        assert "redis-password" in compose()["services"][service]["secrets"]
        assert (
            "redis.password_file=/run/secrets/redis-password"
            in (compose()["services"][service]["command"])
        )


def test_the_results_folder_is_there_after_a_clone() -> None:
    assert (ROOT / "runs" / ".gitignore").read_text().splitlines()[-2:] == ["*", "!.gitignore"]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("docker-compose*.yml")), ids=lambda path: path.name
)
def test_every_variable_is_known_and_described(path: Path) -> None:
    used = {match[0] for match in VARIABLE.findall(path.read_text())}
    assert used <= OWN_SETTINGS
    described = (ROOT / "docker-compose.yml").read_text().partition("\nname:")[0]
    described += (ROOT / "docker-compose.recipe.yml").read_text().partition("\nservices:")[0]
    assert not [name for name in used if name not in described]


def test_an_own_recipe_takes_the_place_of_the_images() -> None:
    parsed = compose("docker-compose.recipe.yml", RECIPE_DIR="/data", RECIPE="mine.yaml")
    for name in (*SERVICES, *(f"{name}-gpu" for name in ON_GPUS)):
        assert parsed["services"][name] == {"volumes": ["/data:/recipes:ro"]}
    prepare = parsed["services"]["prepare"]
    assert prepare["profiles"] == ["prepare"]
    assert shlex.split(prepare["command"]) == ["offbeat", "prepare", "/recipes/mine.yaml"]


def _check_command(command: list[str], service: str, *, needs_run: bool) -> Any:
    assert command[:3] == ["offbeat", "serve", service]
    rest = command[3:]
    if needs_run:
        assert rest.pop(0) == "--share-cores"
    assert rest[::2] == ["--recipe", *["--set"] * (len(rest) // 2 - 1)]
    file, *overrides = rest[1::2]
    assert file.startswith("/recipes/")
    recipe = load_recipe(ROOT / file.removeprefix("/"), overrides)
    assert getattr(recipe, service).rpc.bind == f"0.0.0.0:{PORT}"
    if needs_run:
        assert getattr(recipe, service).rpc.metrics_port == METRICS_PORT
    if needs_run:
        assert run_folder(recipe).name == recipe.run.id
    return recipe
