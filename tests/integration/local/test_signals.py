"""What signals do to a coroutine that the command line runs."""

import signal
import subprocess
import sys

import pytest

from tests.harness.processes import WAIT_SECONDS

PROGRAM = """
import asyncio, signal, sys
from offbeat.local.signals import Interrupted, run_until_signalled
async def work():
    print("ready", flush=True)
    try:
        await asyncio.sleep(1000)
    finally:
        if sys.argv[1] == "stubborn":
            print("ending", flush=True)
            await asyncio.sleep(1000)
        await asyncio.sleep(0.01)
        print("clean", flush=True)
try:
    run_until_signalled(work(), lambda number: print(signal.Signals(number).name, flush=True))
except Interrupted as interrupted:
    sys.exit(interrupted.exit_code)
"""


def started(how: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name
)
def test_the_first_signal_ends_it_cleanly(number: signal.Signals) -> None:
    with started("willing") as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=WAIT_SECONDS)
    assert (out, process.returncode) == (f"{number.name}\nclean\n", 128 + number)


def test_the_second_signal_ends_it_at_once() -> None:
    with started("stubborn") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "SIGINT\n"
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_result_is_returned() -> None:
    from offbeat.local.signals import run_until_signalled

    async def answer() -> int:
        return 42

    assert run_until_signalled(answer(), lambda _: None) == 42
