"""A Docker engine for the tests: the one that runs already, or one of the tests' own, which leaves nothing behind.

OFFBEAT_DOCKER_ROOT   folder in which an engine of the tests' own keeps its data; it stays, so that the next try finds
                      its images again. Default: a temporary folder, which is removed.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 60
STOP_SECONDS = 60


def run(
    *words: str, env: Mapping[str, str], cwd: Path | None = None, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Runs a command and returns its output; a failure's message has both streams."""
    done = subprocess.run(
        words,
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        )
    return done


@contextmanager
def docker_engine() -> Iterator[dict[str, str]]:
    """The environment in which `docker` reaches the engine."""
    env = dict(os.environ)
    if (
        subprocess.run(["docker", "info"], env=env, capture_output=True, check=False).returncode
        == 0
    ):
        yield env
        return
    kept = os.environ.get("OFFBEAT_DOCKER_ROOT")
    root = Path(kept or tempfile.mkdtemp(prefix="offbeat-docker-"))
    try:
        with _own_engine(root) as host:
            yield {**env, "DOCKER_HOST": host}
    finally:
        if kept is None:
            shutil.rmtree(root)


@contextmanager
def _own_engine(root: Path) -> Iterator[str]:
    root.mkdir(parents=True, exist_ok=True)
    host = f"unix://{root}/docker.sock"
    with (root / "dockerd.log").open("ab") as log:
        daemon = subprocess.Popen(
            [
                "dockerd",
                *("--data-root", str(root / "data"), "--exec-root", str(root / "exec")),
                *("--pidfile", str(root / "docker.pid"), "--host", host),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_until_it_answers(daemon, host, root)
        yield host
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        _unmount_below(root)


def _unmount_below(root: Path) -> None:
    """The engine leaves mounts behind, such as that of a network's name space; they would keep the folder."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((p for p in points if p.startswith(f"{root}/")), reverse=True):
        subprocess.run(["umount", point], capture_output=True, check=True)


def _wait_until_it_answers(daemon: "subprocess.Popen[bytes]", host: str, root: Path) -> None:
    end = time.monotonic() + START_SECONDS
    env = {**os.environ, "DOCKER_HOST": host}
    while subprocess.run(["docker", "info"], env=env, capture_output=True, check=False).returncode:
        if daemon.poll() is not None or time.monotonic() > end:
            last = (root / "dockerd.log").read_text(errors="replace")[-3000:]
            raise AssertionError(f"dockerd does not answer at {host}; the end of its log:\n{last}")
        time.sleep(0.2)
