"""`offbeat run` from its start to its end, with an embedded Redis and stand-ins for the services."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import fake_service
from tests.harness.processes import wait_gone, wait_until

RECIPE = Path(__file__).parents[2] / "data" / "one_of_each.yaml"
COMMAND = [sys.executable, "-c", "from offbeat.cli import main; main()"]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `offbeat run` in `tmp_path`, where it finds the stand-ins; `learner` is what that one does."""
    fake_service.install(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "recipe.yaml").write_text(RECIPE.read_text())
    started: list[subprocess.Popen[str]] = []

    def call(learner: str, *arguments: str) -> "subprocess.Popen[str]":
        words = arguments or ("recipe.yaml", "--set", "run.id=mine")
        process = subprocess.Popen(
            [*COMMAND, "run", *words],
            cwd=tmp_path,
            env={**os.environ, "FAKE_LEARNER": learner},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, out, err


def children(process: "subprocess.Popen[str]", tmp_path: Path) -> list[psutil.Process]:
    """Everything below a run once its learner is there."""
    addresses = tmp_path / "runs" / "mine" / "addresses"
    wait_until(lambda: bool(list(addresses.glob("learner.*"))), "the learner's address")
    return psutil.Process(process.pid).children(recursive=True)


def test_a_run_prepares_its_model_and_ends_with_0_and_a_summary(
    start: Start, tmp_path: Path
) -> None:
    sets = [f"--set={value}" for value in ("run.id=mine", "model.path=new", "prepare.kind=sft")]
    code, out, err = finish(start("crashes first", "recipe.yaml", *sets))
    assert code == 0, err
    assert f"{tmp_path}/new does not exist yet: preparing the model first" in out
    assert "learner.0 ended with exit code 1; starting again in 0.5 s" in out
    assert "step 3/3" in out
    assert "+50.0 points" in out
    run = tmp_path / "runs" / "mine"
    assert str(run / "export") in out
    logs = {path.name for path in (run / "logs").iterdir()}
    assert logs == {
        *("prepare.0.1.log", "redis.0.1.log", "checkpoint.0.1.log", "generator.0.1.log"),
        *("reward.0.1.log", "learner.0.1.log", "learner.0.2.log"),
    }
    assert (run / "logs" / "prepare.0.1.log").read_text() == "prepared\n"
    told = (run / "logs" / "generator.0.1.log").read_text()
    assert f"redis.url={(run / 'addresses' / 'redis.embedded').read_text()}" in told
    assert "checkpoint.address=127.0.0.1:9" in told


def test_a_refused_setting_ends_the_run_with_2(start: Start, tmp_path: Path) -> None:
    code, _, err = finish(start("refuses"))
    assert code == 2
    expected = (
        "learner.0 refuses its settings: learner.reference: expected a model folder, found none"
    )
    assert err == f"{expected}\n"


def test_killed_services_come_back_and_ctrl_c_stops_everything(
    start: Start, tmp_path: Path
) -> None:
    process = start("waits")
    below = children(process, tmp_path)
    lines = {child.pid: " ".join(child.cmdline()) for child in below}
    for name in ("services.checkpoint", "valkey-server"):
        [victim] = [child for child in below if name in lines[child.pid]]
        victim.kill()
    logs = tmp_path / "runs" / "mine" / "logs"
    wait_until((logs / "redis.0.2.log").exists, "Redis to be started again")
    again = logs / "checkpoint.0.2.log"
    wait_until(lambda: again.exists() and "is told" in again.read_text(), "the checkpoint service")
    # The others know the port that it had.
    assert "'checkpoint.rpc.bind=127.0.0.1:9'" in again.read_text()

    below += psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err) == (128 + signal.SIGINT, "")
    assert "stopping" in out
    wait_gone(below)


def test_a_killed_run_leaves_nothing_and_can_be_resumed(start: Start, tmp_path: Path) -> None:
    process = start("waits")
    below = children(process, tmp_path)
    process.kill()
    wait_gone(below)
    code, out, err = finish(start("finishes", "--resume"))
    assert code == 0, err
    assert "step 3/3" in out
    assert (tmp_path / "runs" / "mine" / "logs" / "generator.0.2.log").exists()
