"""Engine and images, made once for all tests of this folder. `make test-docker` runs them."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docker.bases import ensure_bases
from tests.docker.compose import ROOT, SERVICES
from tests.docker.engine import docker_engine, run
from tests.docker.figures import write_page

TAG = "test"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs an engine, and builds images first."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.timeout(7200))


def pytest_sessionfinish(exitstatus: int) -> None:
    """A try that passed leaves its figures in the page that is named for them."""
    if exitstatus == pytest.ExitCode.OK:
        write_page()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which `docker`, `docker compose` and `grpcurl` work."""
    with docker_engine() as env:
        folder = tmp_path_factory.mktemp("docker")
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        if run("docker", "compose", "version", env=env, check=False).returncode != 0:
            _add_compose(folder / "config", env)
        yield env


@pytest.fixture(scope="session")
def images(
    engine: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Builds every image as `make images` does. The environment in which compose uses them."""
    ensure_bases(tmp_path_factory.mktemp("bases"), engine)
    env = dict(engine, OFFBEAT_TAG=TAG)
    with _wheels(env):
        # What listens on this machine alone is out of a build's reach in a network of its own.
        arguments = "--network=host" if "//127.0.0.1:" in env.get("PIP_FIND_LINKS", "") else ""
        words = ["make", "images", f"OFFBEAT_TAG={TAG}", f"DOCKER_BUILD_ARGS={arguments}"]
        run(*words, env=env, cwd=ROOT)
    yield env
    if "OFFBEAT_DOCKER_ROOT" not in os.environ:
        names = [f"offbeat/{service}:{TAG}" for service in SERVICES]
        run("docker", "image", "rm", *names, env=env, check=False)


def _add_compose(config: Path, env: dict[str, str]) -> None:
    """Makes the compose binary of requirements/docker.txt known to `docker`."""
    spec = find_spec("compose")
    assert spec is not None, "`docker compose` does not work: run this by `make test-docker`"
    assert spec.origin is not None
    plugin = config / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True)
    shutil.copy(Path(spec.origin).with_name("docker-compose"), plugin)
    plugin.chmod(0o755)
    env["DOCKER_CONFIG"] = str(config)


@contextmanager
def _wheels(env: dict[str, str]) -> Iterator[None]:
    """Serves pip's local folder of wheels, where it is set up with one, to builds, which can't see this disk."""
    words = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    asked = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    folder = Path(os.environ.get("PIP_FIND_LINKS") or asked or "-")
    if not folder.is_dir():
        yield
        return
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env["PIP_FIND_LINKS"] = f"http://127.0.0.1:{server.server_port}"
        yield
        server.shutdown()
