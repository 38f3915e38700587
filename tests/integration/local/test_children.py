"""A child and everything below it dies with its parent, however that ends."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from offbeat.local.children import Child
from tests.harness.processes import family, read_pids, wait_gone, wait_until

PARENT = """
import asyncio, json, sys
from offbeat.local.children import Child
async def main():
    await Child.start(json.loads(sys.argv[1]))
    await asyncio.sleep(1000)
asyncio.run(main())
"""

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_everything_dies_with_the_parent(tmp_path: Path, number: signal.Signals) -> None:
    command = json.dumps(family(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, command])
    try:
        processes = read_pids(tmp_path)
    finally:
        parent.send_signal(number)
        parent.wait()
    wait_gone(processes)


async def test_everything_dies_with_a_killed_keeper(tmp_path: Path) -> None:
    child = await Child.start(family(tmp_path))
    main, near, far = read_pids(tmp_path)
    psutil.Process(child.keeper_pid).kill()
    assert await child.wait() == 128 + signal.SIGKILL
    wait_gone([main, near])
    far.kill()  # the one thing that only a keeper could have found


async def test_what_a_child_leaves_behind_is_killed(tmp_path: Path) -> None:
    child = await Child.start(family(tmp_path, then="sys.exit(3)"))
    processes = read_pids(tmp_path)
    assert await child.wait() == 3
    wait_gone(processes)


async def test_stop_kills_after_the_grace_time(tmp_path: Path) -> None:
    child = await Child.start(family(tmp_path, then=STUBBORN))
    processes = read_pids(tmp_path)
    assert await child.stop(grace_seconds=0.2) == 128 + signal.SIGKILL
    wait_gone(processes)
    assert not child.running


async def test_sigterm_reaches_the_child_alone(tmp_path: Path) -> None:
    told = "import signal\n"
    told += "def drain(*_):\n    sys.exit(7 if near.poll() is None and far.poll() is None else 8)\n"
    told += "signal.signal(signal.SIGTERM, drain); (folder / 'ready').touch(); time.sleep(1000)"
    child = await Child.start(family(tmp_path, then=told))
    wait_until((tmp_path / "ready").exists, "the child's handler")
    processes = read_pids(tmp_path)
    # Its children were alive while it drained: an engine process must not go before its service.
    assert await child.stop(grace_seconds=30) == 7
    wait_gone(processes)


async def test_output_goes_to_the_log_and_never_over_an_old_one(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    script = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr)"
    child = await Child.start([sys.executable, "-c", script], log=log, env={"MARK": "1"})
    assert await child.wait() == 0
    assert log.read_text() == "out\nerr\n"
    with pytest.raises(FileExistsError):
        await Child.start(["true"], log=log)


async def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    child = await Child.start(["/nowhere/at-all"], log=tmp_path / "log")
    assert await child.wait() == 127
    assert (
        tmp_path / "log"
    ).read_text() == "can't start /nowhere/at-all: No such file or directory\n"
