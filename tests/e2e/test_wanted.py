"""A second generator comes into a run and goes again: the numbers of workers wanted stay, the learner's wait does not.

OFFBEAT_SCALING_SERIES   file that what was read in between is written to; tests/data/scaling.json is one such
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from offbeat.v1 import generator_pb2 as generator
from offbeat.v1 import generator_pb2_grpc as generator_grpc
from offbeat.v1 import learner_pb2 as learner
from offbeat.v1 import learner_pb2_grpc as learner_grpc
from tests.harness.whole_run import WholeRun, start, write_recipe

PHASE_STEPS = 40
"""Steps with one generator, then with two, then with one."""


@pytest.mark.slow
def test_a_generator_comes_and_goes(tmp_path):
    """The engine sleeps, so a generator's rate is its own, and one can't keep this learner busy."""
    recipe = write_recipe(
        tmp_path,
        schedule={"steps": 4 * PHASE_STEPS, "prompts_per_step": 16, "max_lag": 1},
        sampling={"k": 2, "max_tokens": 16},
        generator={
            "engine": {
                "name": "deterministic",
                "min_tokens": 16,
                "token_seconds": 0.008,
                "max_num_seqs": 8,
            }
        },
    )
    with start(recipe) as run:
        run.wait_for_step(1)
        readings = list(_read(run, until=PHASE_STEPS))
        with _another_generator(run):
            run.wait_for(lambda: len(_generators(run)) == 2, "the second generator's address")
            readings += _read(run, until=2 * PHASE_STEPS)
        readings += _read(run, until=3 * PHASE_STEPS)
        steps = [line for line in run.metrics() if "wanted/generators" in line]
        run.close()
    _keep(readings, [line["time/work_seconds"] for line in steps])
    phases = [
        [line for line in steps if low <= line["step"] < low + PHASE_STEPS // 2]
        for low in (PHASE_STEPS // 2, 3 * PHASE_STEPS // 2, 5 * PHASE_STEPS // 2)
    ]
    wanted = [{int(line["wanted/generators"]) for line in phase} for phase in phases]
    least, most = min(map(min, wanted)), max(map(max, wanted))
    assert least >= 1
    # It is a matter of the two rates, which a busy machine moves somewhat. If how many there are had a part in it, the
    # second one would halve or double it.
    assert most - least <= max(1, least // 2), wanted
    assert all(int(line["wanted/reward_workers"]) == 1 for phase in phases for line in phase)
    for phase, present in zip(phases, (1, 2, 1), strict=True):
        assert all(line["held/generators"] <= present for line in phase)


def _generators(run: WholeRun) -> list[str]:
    """HOST:PORT of the generators that are there."""
    return [
        path.read_text().strip() for path in sorted(run.folder.glob("addresses/generator.[!.]*"))
    ]


@contextmanager
def _another_generator(run: WholeRun) -> Iterator[None]:
    """A generator that nobody told the run about; it leaves as one does on SIGTERM."""
    there = {path.name for path in run.folder.glob("addresses/generator.*")}
    command = [sys.executable, "-m", "services.generator"]
    command += ["--recipe", str(run.folder / "recipe.yaml")]
    redis = (run.folder / "addresses" / "redis.embedded").read_text().strip()
    for setting in (f"redis.url={redis}", f"checkpoint.address={run.address('checkpoint')}"):
        command += ["--set", setting]
    with (run.folder / "logs" / "another.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
        for path in run.folder.glob("addresses/generator.*"):
            if path.name not in there:
                path.unlink(missing_ok=True)


def _read(run: WholeRun, *, until: int) -> Iterator[dict[str, Any]]:
    """What learner and generators did since their starts, about twice a second, up to a step."""
    while run.step() < until:
        now = time.monotonic()
        status = _learner_status(run)
        workers = {}
        for address in _generators(run):
            with grpc.insecure_channel(address) as channel:
                stub = generator_grpc.GeneratorServiceStub(channel)
                try:
                    found = stub.GetStatus(generator.GeneratorServiceGetStatusRequest(), timeout=10)
                except grpc.RpcError:
                    continue  # it comes, or goes
            busy = found.uptime_seconds - found.waiting_seconds
            workers[found.generator_id] = [round(busy, 3), found.groups_finished]
        progress = status.progress
        busy = status.uptime_seconds - status.waiting_seconds
        yield {
            "time": round(now, 3),
            "learner": [round(busy, 3), progress.trained + progress.filtered],
            "workers": workers,
            "outstanding": progress.outstanding,
            "wanted": progress.metrics.get("wanted/generators", 0.0),
            "held": progress.metrics.get("held/generators", 0.0),
        }
        time.sleep(0.5)


def _learner_status(run: WholeRun) -> learner.LearnerServiceGetStatusResponse:
    with grpc.insecure_channel(run.address("learner")) as channel:
        stub = learner_grpc.LearnerServiceStub(channel)
        return stub.GetStatus(learner.LearnerServiceGetStatusRequest(), timeout=30)


def _keep(readings: list[dict[str, Any]], work: list[float]) -> None:
    path = os.environ.get("OFFBEAT_SCALING_SERIES")
    if path:
        lines = ",\n  ".join(json.dumps(reading) for reading in readings)
        rounded = json.dumps([round(seconds, 4) for seconds in work])
        text = f'{{"work_seconds": {rounded},\n "readings": [\n  {lines}\n]}}\n'
        Path(path).write_text(text)
