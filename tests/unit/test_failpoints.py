"""Failpoints: what the variable arms, and when it goes off."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from offbeat import failpoints


def test_an_item_has_a_count_an_action_and_a_file(tmp_path):
    armed = failpoints.parse(f"a,b:3,c=eio,d:2=full@{tmp_path / 'now'}")
    assert {name: (item.action, item.left) for name, item in armed.items()} == {
        "a": ("kill", 1), "b": ("kill", 3), "c": ("eio", 1), "d": ("full", 2),
    }  # fmt: skip


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="expected one of the actions kill, stop, eio, full"):
        failpoints.parse("a=explode")


def test_the_disk_fails_once_at_the_given_time(monkeypatch):
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("a:2=full"))
    failpoints.failpoint("a")
    failpoints.failpoint("other")
    with pytest.raises(OSError, match="failpoint a") as raised:
        failpoints.failpoint("a")
    assert raised.value.errno == errno.ENOSPC
    failpoints.failpoint("a")


def test_a_file_arms_it_from_outside_and_is_used_up(monkeypatch, tmp_path):
    file = tmp_path / "now"
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse(f"a=eio@{file}"))
    for _ in range(2):
        failpoints.failpoint("a")
        file.touch()
        with pytest.raises(OSError, match="failpoint a"):
            failpoints.failpoint("a")
        assert not file.exists()


def test_without_an_action_the_process_dies():
    code = (
        "from offbeat.failpoints import failpoint; failpoint('a'); failpoint('a'); print('alive')"
    )
    environment = {**os.environ, failpoints.VARIABLE: "a:2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
