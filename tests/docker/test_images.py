"""What is in the images, and what is not."""

import json

import pytest

from tests.docker.compose import SERVICES
from tests.docker.conftest import TAG
from tests.docker.engine import run
from tests.docker.figures import keep

COMPILERS = ("cc", "gcc", "g++", "clang", "make")


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_says_what_it_is_and_runs_as_no_root(images, service):
    shown = run("docker", "image", "inspect", f"offbeat/{service}:{TAG}", env=images).stdout
    keep("image", service, json.loads(shown)[0]["Size"] / 1e9, "GB")
    config = json.loads(shown)[0]["Config"]
    assert config["User"] == "1000:1000"
    assert config["Labels"]["org.opencontainers.image.title"].startswith("Offbeat ")
    assert config["Labels"]["org.opencontainers.image.version"]
    assert config["Healthcheck"]["Test"][:4] == ["CMD", "python", "-m", "offbeat.health"]
    assert "50051/tcp" in config["ExposedPorts"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_its_own_code_and_no_compiler(images, service):
    others = [name for name in SERVICES if name != service]
    script = "; ".join(
        [
            *(f"! command -v {name} || echo found {name}" for name in COMPILERS),
            "! ls /opt/offbeat/bin/pip* 2>/dev/null || echo found an installer",
            f"python -c 'import services.{service}'",
            *(
                f"! python -c 'import services.{name}' 2>/dev/null || echo found {name}"
                for name in others
            ),
            "! touch /recipes/x 2>/dev/null || echo writable",
            "offbeat --version",
        ]
    )
    words = ["docker", "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp"]
    said = run(*words, f"offbeat/{service}:{TAG}", "sh", "-c", script, env=images)
    assert "found" not in said.stdout
    assert "writable" not in said.stdout
    assert said.stdout.splitlines()[-1].startswith("offbeat ")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_without_a_run_says_what_is_missing(images, service):
    words = ["docker", "run", "--rm", "--network=none", f"offbeat/{service}:{TAG}"]
    said = run(*words, env=images, check=False)
    assert said.returncode == 2
    assert "run.id is not set" in said.stderr
    assert "Traceback" not in said.stderr
