"""`docker compose config` of each profile: compose's own schema and rules take the files, and what they then mean."""

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORT = 50051
SCALED = ("generator", "reward")
PLAIN = {"runs", "redis", "checkpoint", "generator", "reward", "learner"}
PROFILES = {
    "": set(),
    "gpu": {"generator-gpu", "reward-gpu", "learner-gpu"},
    "monitoring": {"prometheus", "grafana", "redis-exporter"},
}


def binary() -> list[str] | None:
    """The words that start compose: of requirements/docker.txt, or of this machine's Docker."""
    spec = find_spec("compose")
    if spec is not None and spec.origin is not None:
        return [str(Path(spec.origin).with_name("docker-compose"))]
    asked = ["docker", "compose"]
    if shutil.which("docker") is None:
        return None
    done = subprocess.run([*asked, "version"], capture_output=True, check=False)
    return asked if done.returncode == 0 else None


COMPOSE = binary()
pytestmark = pytest.mark.skipif(
    COMPOSE is None, reason="no docker compose: requirements/docker.txt has it"
)


def run(folder: Path, profile: str, *files: str, **variables: str) -> Any:
    assert COMPOSE is not None
    env = {"PATH": os.environ["PATH"], "COMPOSE_PROFILES": profile, **variables}
    words = [word for file in files for word in ("--file", str(folder / file))]
    return subprocess.run(
        [*COMPOSE, *words, "config", "--format", "json"],
        env=env, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def config(profile: str, *files: str, **variables: str) -> dict[str, Any]:
    done = run(ROOT, profile, *(files or ("docker-compose.yml",)), **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_taken_and_has_its_services(profile: str) -> None:
    parsed = config(profile)
    assert set(parsed["services"]) == PLAIN | PROFILES[profile]
    for name, service in parsed["services"].items():
        assert int(service["mem_limit"]) > 0, name
        assert service["restart"].startswith("on-failure"), name
        named = [
            mount["source"] for mount in service.get("volumes", []) if mount["type"] == "volume"
        ]
        assert set(named) <= set(parsed["volumes"]), name


@pytest.mark.parametrize("profile", PROFILES)
def test_no_two_services_want_one_port_of_the_host_and_scaled_ones_want_none(profile: str) -> None:
    services = config(profile)["services"]
    wanted: dict[str, list[str]] = {}
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
            if name.removesuffix("-gpu") in SCALED:
                assert "published" not in port, name
            elif name != "learner-gpu":  # instead of the learner, never beside it
                wanted.setdefault(port["published"], []).append(name)
    assert not {port: names for port, names in wanted.items() if len(names) > 1}


def test_each_gpu_service_reserves_the_gpu_that_was_named() -> None:
    services = config("gpu", GENERATOR_GPU="5", REWARD_GPU="6", LEARNER_GPU="7")["services"]
    reserved = {
        name: services[name]["deploy"]["resources"]["reservations"]["devices"]
        for name in PROFILES["gpu"]
    }
    assert {name: given[0]["device_ids"] for name, given in reserved.items()} == {
        "generator-gpu": ["5"], "reward-gpu": ["6"], "learner-gpu": ["7"],
    }  # fmt: skip
    assert all("deploy" not in services[name] for name in PLAIN)


@pytest.mark.parametrize("profile", ["", "gpu"])
def test_an_own_recipe_reaches_every_service_that_reads_one(profile: str, tmp_path: Path) -> None:
    files = ("docker-compose.yml", "docker-compose.recipe.yml")
    parsed = config(profile, *files, RECIPE_DIR=str(tmp_path), RECIPE="mine.yaml")
    readers = {
        name: service
        for name, service in parsed["services"].items()
        if "/recipes/mine.yaml" in (service.get("command") or [])
    }
    assert set(readers) == (PLAIN - {"runs", "redis"}) | PROFILES[profile]
    for name, service in readers.items():
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert mounts["/recipes"]["source"] == str(tmp_path), name
        assert mounts["/recipes"]["read_only"] is True, name
        if name.startswith("learner"):
            assert "/runs" in mounts, name


def test_a_password_is_read_from_the_file_that_was_named(tmp_path: Path) -> None:
    parsed = config("monitoring", REDIS_PASSWORD_FILE=str(tmp_path / "word"))
    assert parsed["secrets"]["redis-password"]["file"] == str(tmp_path / "word")
    users = {name for name, service in parsed["services"].items() if service.get("secrets")}
    assert users == (PLAIN - {"runs"}) | {"redis-exporter"}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    shm_size:", "    shared_size:"),
        ("{condition: service_healthy}", "{condition: service_wealthy}"),
        ("      - versions:/versions", "      - revisions:/versions"),
        ("    secrets: [redis-password]", "    secrets: [redis-pasword]"),
    ],
    ids=["unknown key", "unknown condition", "undeclared volume", "undeclared secret"],
)
def test_a_planted_mistake_is_refused(right: str, wrong: str, tmp_path: Path) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert right in text
    (tmp_path / "docker-compose.yml").write_text(text.replace(right, wrong, 1))
    assert run(tmp_path, "", "docker-compose.yml").returncode != 0
