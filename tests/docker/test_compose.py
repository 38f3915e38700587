"""`docker compose up` from the compose file alone: a short run to its end, looked at from outside, and nothing left."""

import json
import os
import re
from pathlib import Path

import pytest

from offbeat.audit import audit_run
from tests.docker.compose import SERVICES, Project

RUN_ID = "short"
STEPS = 6
USER = "1234:1234" if os.geteuid() == 0 else f"{os.geteuid()}:{os.getegid()}"
SHORT = {
    "schedule.steps": STEPS,
    "evaluation.prompts": 40,
    "evaluation.every_steps": 3,
    "evaluation.prompts_during": 20,
    "learner.checkpoints.every_steps": 2,
}
LEARNER = "offbeat.v1.LearnerService"


@pytest.fixture
def project(images, tmp_path):
    settings = " ".join(f"--set {key}={value}" for key, value in SHORT.items())
    made = Project(
        tmp_path, images, RUN_ID=RUN_ID, RUN_AS=USER, SETTINGS=settings,
        CHECKPOINT_PORT="0", LEARNER_PORT="0",
    )  # fmt: skip
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "20", check=False)
        assert made.left() == {"containers": [], "networks": [], "volumes": []}


def test_a_run_from_up_to_down(project):
    project.compose("up", "--detach", "--no-build")
    _all_serve_once_they_are_ready(project)
    _containers_are_closed(project)
    run = project.runs / RUN_ID
    project.grpcurl("learner", f"{LEARNER}/Resume")
    project.compose("wait", "learner")  # fails with the learner's exit code when that is not 0

    _results_are_whole(run)
    audit = project.compose("run", "--rm", "--no-deps", "-T", "learner", "offbeat", "audit", RUN_ID)
    assert "clean: every ordinal counts exactly once" in audit.stdout
    _another_up_trains_nothing(project, run)
    project.compose("down", "--volumes")
    assert project.left() == {"containers": [], "networks": [], "volumes": []}


def _all_serve_once_they_are_ready(project):
    """The learner is held at its first steps, so that there is time to look at all services."""
    project.wait_until(lambda: project.health("learner") == "SERVING", "the learner")
    project.grpcurl("learner", f"{LEARNER}/Pause")
    for service in SERVICES:
        project.wait_until(lambda s=service: project.health(s) == "SERVING", service)
        full_name = f"offbeat.v1.{service.capitalize()}Service"
        for name in ("readiness", "liveness", full_name):
            assert project.health(service, name) == "SERVING"
        status = project.grpcurl(service, f"{full_name}/GetStatus")
        if service == "generator":
            assert int(status["version"]) >= 1, "ready without a version"
    for service in (*SERVICES, "redis"):
        project.wait_until(
            lambda s=service: project.inspect(s)["State"]["Health"]["Status"] == "healthy", service
        )


def _containers_are_closed(project):
    """No root, a read-only root file system, and no mount but results, volumes and a password that is empty."""
    uid = USER.partition(":")[0]
    allowed = {"/runs", "/versions", "/data", "/run/secrets/redis-password"}
    for service in SERVICES:
        assert project.inside(service, "id -u") == uid
        assert project.inside(service, "touch /x 2>/dev/null || echo read-only") == "read-only"
    assert project.inside("redis", "id -u") != "0"
    for service in (*SERVICES, "redis"):
        mounts = project.inspect(service)["Mounts"]
        assert {mount["Destination"] for mount in mounts} <= allowed
        sources = {mount["Source"] for mount in mounts if mount["Type"] == "bind"}
        assert sources <= {str(project.runs), "/dev/null"}


def _results_are_whole(run: Path):
    assert (run / "export" / "model.safetensors").is_file()
    assert json.loads((run / "export" / "config.json").read_text())["model_type"]
    found = audit_run(run, prompts_per_step=32, max_lag=1)
    assert found.clean, found.problems
    assert (found.steps, found.terms) == (STEPS, 1)
    evaluated = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in evaluated if "eval/greedy/pass@1" in line} >= {0, STEPS}
    owners = {f"{path.stat().st_uid}:{path.stat().st_gid}" for path in run.rglob("*")}
    assert owners == {USER}


def _another_up_trains_nothing(project, run: Path):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    done = project.compose("up", "--no-build", "--exit-code-from", "learner", "--timeout", "20")
    assert f"run {RUN_ID} is finished already, after {STEPS} steps" in done.stderr  # its log
    assert _first_to_end(done.stdout) == "learner"
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed <= {"recipe.yaml", "lock"}


def _first_to_end(output: str) -> str:
    """Service whose container ended first; with --exit-code-from, that ends all."""
    names = "|".join((*SERVICES, "redis", "runs"))
    return re.findall(rf"({names})-1 exited with code", output)[0]


def test_a_folder_of_somebody_else_is_said_and_left_alone(project):
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder for somebody else")
    os.chown(project.runs, 4321, 4321)
    assert project.compose("up", "--detach", "--no-build", check=False).returncode != 0
    said = project.compose("logs", "runs").stdout
    assert "runs/ belongs to user 4321" in said
    assert "Set RUN_AS=4321:4321" in said
    assert project.runs.stat().st_uid == 4321
