"""The supervisor with real processes: attempts and their logs, giving up, stopping in order."""

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from offbeat.errors import ConfigError, ProcessFailed
from offbeat.local.restarts import RestartPolicy
from offbeat.local.supervisor import ProcessSpec, Supervisor, with_overrides
from tests.harness.processes import family, read_pids, wait_gone, wait_until

COUNT = """
import sys
from pathlib import Path
path = Path(sys.argv[1])
attempt = len(path.read_text()) + 1 if path.exists() else 1
path.write_text("x" * attempt)
print("attempt", attempt, *sys.argv[2:])
"""

DRAIN = """
import signal, sys, time
from pathlib import Path
ended = Path(sys.argv[1])
def drain(*_):
    with ended.open("a") as file:
        file.write(sys.argv[2] + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
Path(sys.argv[1] + sys.argv[2]).touch()
time.sleep(1000)
"""


def quick() -> RestartPolicy:
    return RestartPolicy(max_quick=3, first_delay=0.01, clean_delay=0.01)


def script(
    service: str, text: str, *arguments: object, finishes: bool = False, order: int = 0
) -> ProcessSpec:
    command = (sys.executable, "-S", "-c", text, *map(str, arguments))
    return ProcessSpec(service, command, finishes=finishes, stop_order=order)


async def supervise(spec: ProcessSpec, logs: Path) -> None:
    """Runs one process until the outcome is known."""
    async with Supervisor(logs, policy=quick) as supervisor:
        supervisor.start(spec)
        await supervisor.finished()


async def test_each_attempt_has_a_log_and_the_run_ends_when_it_finishes(tmp_path: Path) -> None:
    events: list[str] = []
    text = COUNT + "sys.exit(1 if attempt < 3 else 0)"
    async with Supervisor(tmp_path / "logs", report=events.append, policy=quick) as supervisor:
        supervisor.start(script("learner", text, tmp_path / "count", finishes=True))
        await supervisor.finished()
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"learner.0.{n}.log": f"attempt {n}\n" for n in (1, 2, 3)}
    assert len(events) == 2
    assert events[0].startswith("learner.0 ended with exit code 1; starting again in 0.01 s; log: ")


async def test_attempts_are_counted_on_across_runs(tmp_path: Path) -> None:
    for _ in range(2):
        await supervise(script("learner", "print('done')", finishes=True), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "learner.0.1.log",
        "learner.0.2.log",
    ]


async def test_too_many_quick_crashes_stop_the_run_with_the_end_of_the_log(tmp_path: Path) -> None:
    text = "print('loading'); print('out of luck'); raise SystemExit(9)"
    with pytest.raises(ProcessFailed) as caught:
        await supervise(script("generator", text), tmp_path)
    message = str(caught.value)
    assert message.startswith("generator.0 crashed 3 times in a row, each within 60 s of its start")
    assert message.endswith(f"The end of {tmp_path}/generator.0.3.log:\nloading\nout of luck")


async def test_a_configuration_error_is_not_tried_again(tmp_path: Path) -> None:
    text = "import sys; print('starting', flush=True)"
    text += "; print('reward.functions: expected a, found b', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ConfigError, match=r"^reward\.0 refuses its settings: reward\.f"):
        await supervise(script("reward", text), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_process_ended_by_hand_comes_back_with_its_new_command(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    async with Supervisor(
        tmp_path / "logs", report=lambda _: restarted.set(), policy=quick
    ) as supervisor:
        spec = script("checkpoint", COUNT + "sys.exit(0)", tmp_path / "count")
        supervisor.start(spec)
        supervisor.amend(with_overrides(spec, "checkpoint.rpc.bind=127.0.0.1:7"))
        await asyncio.wait_for(restarted.wait(), 30)
        wait_until((tmp_path / "logs" / "checkpoint.0.2.log").exists, "the second attempt")
    text = (tmp_path / "logs" / "checkpoint.0.2.log").read_text()
    assert text in {"", "attempt 2 --set checkpoint.rpc.bind=127.0.0.1:7\n"}


async def test_the_environment_of_all_and_that_of_one(tmp_path: Path) -> None:
    text = "import os; print(os.environ['OF_ALL'], os.environ['OF_ONE'])"
    async with Supervisor(tmp_path, env={"OF_ALL": "a", "OF_ONE": "a"}) as supervisor:
        spec = script("learner", text)
        supervisor.start(dataclasses.replace(spec, env={"OF_ONE": "b"}, finishes=True))
        await supervisor.finished()
    assert (tmp_path / "learner.0.1.log").read_text() == "a b\n"


async def test_processes_are_stopped_in_order_and_nothing_is_left(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    async with Supervisor(tmp_path / "logs", policy=quick) as supervisor:
        for order, name in enumerate(["learner", "generator", "checkpoint"]):
            supervisor.start(script(name, DRAIN, ended, name, order=order))
        supervisor.start(ProcessSpec("reward", tuple(family(tmp_path)), stop_order=1))
        processes = await asyncio.to_thread(read_pids, tmp_path)
        for name in ("learner", "generator", "checkpoint"):
            await asyncio.to_thread(wait_until, Path(f"{ended}{name}").exists, f"{name} to start")
    assert ended.read_text() == "learner generator checkpoint "
    wait_gone(processes)


async def test_stopping_waits_for_a_start_under_way_and_starts_nothing_more(tmp_path: Path) -> None:
    async with Supervisor(tmp_path, policy=quick) as supervisor:
        supervisor.start(script("generator", "import time; time.sleep(1000)"))
    assert len(list(tmp_path.iterdir())) <= 1


async def test_a_log_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="logs"):
        await supervise(script("generator", "pass"), tmp_path / "logs")
