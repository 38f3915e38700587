"""Two generators and two reward workers, each container killed once, Redis with a password, Prometheus beside them."""

import json
import os
import signal
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from offbeat.audit import audit_run
from tests.docker.compose import Project
from tests.docker.figures import keep
from tests.docker.test_compose import LEARNER, USER

RUN_ID = "scaled"
STEPS = 150
"""So many that a quick machine is not done before the last kill."""
PROMPTS = 32
"""Of each step, as in the recipe."""
SHARED_STEPS = 8
"""Steps after which each worker must have had its share."""
SETTINGS = {
    "schedule.steps": STEPS,
    "evaluation.prompts": 40,
    "evaluation.every_steps": 100,
    "learner.checkpoints.every_steps": 2,
    "generator.replicas": 2,
    "reward.replicas": 2,
}
SCALE = ("--scale", "generator=2", "--scale", "reward=2")
KILLED = (
    ("generator", 1), ("generator", 2), ("reward", 1), ("reward", 2), ("checkpoint", 1),
    ("redis", 1), ("runs", 1), ("learner", 1),
)  # fmt: skip
"""Every container of the run, one after the other."""


@pytest.fixture
def project(images, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can kill a container's process from the host")
    password = tmp_path / "redis-password"
    password.write_text("correct horse\n".replace(" ", "-"))
    password.chmod(0o444)  # its folder is closed to everybody else
    settings = " ".join(f"--set {key}={value}" for key, value in SETTINGS.items())
    made = Project(
        tmp_path, images, RUN_ID=RUN_ID, RUN_AS=USER, SETTINGS=settings,
        CHECKPOINT_PORT="0", LEARNER_PORT="0", PROMETHEUS_PORT="0",
        REDIS_PASSWORD_FILE=str(password),
    )  # fmt: skip
    try:
        yield made
    finally:
        made.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "20", check=False)
        assert made.left() == {"containers": [], "networks": [], "volumes": []}


def test_a_scaled_run_shares_its_work_and_outlives_kills(project):
    started = time.monotonic()
    project.compose("up", "--detach", "--no-build", *SCALE)
    _starts(project, started)
    _shares(project)
    _prometheus_sees_them(project)
    for service, index in KILLED:
        _comes_back(project, service, index)
    project.grpcurl("learner", f"{LEARNER}/Resume")
    project.compose("wait", "learner")  # fails with the learner's exit code when that is not 0
    _results_are_whole(project.runs / RUN_ID)
    project.compose("--profile", "monitoring", "down", "--volumes")
    assert project.left() == {"containers": [], "networks": [], "volumes": []}


def _step(project) -> int:
    status = project.grpcurl("learner", f"{LEARNER}/GetStatus")
    return int(status.get("progress", {}).get("step", -1))


def _run_until(project, step: int) -> None:
    """Lets the learner run until it has done so many steps, and holds it there."""
    project.grpcurl("learner", f"{LEARNER}/Resume")
    project.wait_until(lambda: _step(project) >= step, f"step {step}", may_fail=True)
    project.grpcurl("learner", f"{LEARNER}/Pause")


def _starts(project, started: float) -> None:
    """All get healthy; how long each took is kept. The learner is held meanwhile, or it might be done before."""
    waiting = {("redis", 1), ("checkpoint", 1), ("learner", 1)}
    waiting |= {(service, index) for service in ("generator", "reward") for index in (1, 2)}

    def settled() -> bool:
        project.grpcurl("learner", f"{LEARNER}/Pause")
        for service, index in sorted(waiting):
            if project.inspect(service, index)["State"]["Health"]["Status"] == "healthy":
                waiting.discard((service, index))
                keep("cold start", f"{service} {index}", time.monotonic() - started, "s")
        return not waiting

    project.wait_until(settled, "all services")
    protected = project.inside("redis", "redis-cli ping || true")
    assert "NOAUTH" in protected


def _shares(project) -> None:
    _run_until(project, SHARED_STEPS)
    for service in ("generator", "reward"):
        method = f"offbeat.v1.{service.capitalize()}Service/GetStatus"
        done = [
            int(project.grpcurl(service, method, index=index)["groups_finished"])
            for index in (1, 2)
        ]
        for index, count in enumerate(done, 1):
            keep("share", f"{service} {index}", count / sum(done), "")
        assert sum(done) >= SHARED_STEPS * PROMPTS
        assert min(done) >= 0.2 * sum(done), f"{service}: groups finished by each: {done}"


def _prometheus_sees_them(project) -> None:
    project.compose("--profile", "monitoring", "up", "--detach", "--no-deps", "prometheus")
    expected = {
        "max(offbeat_learner_step)": SHARED_STEPS,
        "count(offbeat_generator_version)": 2,
        "count(offbeat_reward_groups_in_flight)": 2,
        "count(offbeat_checkpoint_term)": 1,
    }

    def answers() -> bool:
        return all(_ask(project, query) >= value for query, value in expected.items())

    project.wait_until(answers, "Prometheus to have scraped every service")
    assert _ask(project, "max(offbeat_learner_generators_wanted)") >= 1


def _ask(project, query: str) -> float:
    """What Prometheus answers to a query; -1 while it has no answer."""
    address = project.address("prometheus", port="9090")
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return -1.0
    return float(found[0]["value"][1]) if found else -1.0


def _comes_back(project, service: str, index: int) -> None:
    """Killed by its process id in the middle of the work, it is healthy again, and the run goes on."""
    before = _step(project)
    container = project.inspect(service, index)
    assert container["State"]["Pid"] > 0, f"{service} {index} has ended before it was killed"
    project.grpcurl("learner", f"{LEARNER}/Resume")
    killed = time.monotonic()
    assert container["State"]["Pid"] > 0, f"{service} {index} does not run: {container['State']}"
    os.kill(container["State"]["Pid"], signal.SIGKILL)

    def back() -> bool:
        if (
            _step(project) > before
        ):  # the run went on; what follows is a matter of the container alone
            project.grpcurl("learner", f"{LEARNER}/Pause")
        now = project.inspect(service, index)
        state = now["State"]
        return bool(
            now["RestartCount"] == container["RestartCount"] + 1
            and state["Running"]
            and state["Health"]["Status"] == "healthy"
        )

    project.wait_until(back, f"{service} {index} to come back", may_fail=True)
    keep("back after a kill", f"{service} {index}", time.monotonic() - killed, "s")
    project.wait_until(
        lambda: project.health("learner") == "SERVING" or _over(project),
        "the learner to answer",
        may_fail=True,
    )
    if not _over(project):
        _run_until(project, min(before + 2, STEPS - 1))


def _over(project) -> bool:
    return bool(project.inspect("learner")["State"]["Status"] == "exited")


def _results_are_whole(run: Path) -> None:
    assert (run / "export" / "model.safetensors").is_file()
    found = audit_run(run, prompts_per_step=PROMPTS, max_lag=1)
    assert found.clean, found.problems
    assert found.steps == STEPS
    assert found.terms == 2, "the learner was killed once, and took over once"
