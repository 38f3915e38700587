"""The server that a run on one machine brings along."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from offbeat.errors import ConfigError, ServiceUnavailable
from offbeat.local import redis_server
from offbeat.local.redis_server import MIB, RedisServer


@pytest.fixture(params=["embedded", "redis-server"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    binary = None if request.param == "embedded" else shutil.which("redis-server")
    if request.param != "embedded" and binary is None:
        pytest.skip("redis-server is not installed")
    made = RedisServer(tmp_path / "data", binary=binary, max_memory_bytes=64 * MIB)
    yield made
    made.stop()


def test_it_keeps_everything_and_evicts_nothing(server: RedisServer, tmp_path: Path) -> None:
    with redis.Redis.from_url(server.start()) as client:
        config = client.config_get("*")
        assert config["maxmemory"] == str(64 * MIB)
        assert config["maxmemory-policy"] == "noeviction"
        assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
        assert config["dir"] == str((tmp_path / "data").resolve())
        assert config["bind"] == "127.0.0.1"


@pytest.mark.parametrize("crash", [False, True], ids=["stop", "kill"])
def test_it_comes_back_at_its_place_with_its_data(server: RedisServer, crash: bool) -> None:
    url = server.start()
    with redis.Redis.from_url(url) as client:
        client.set("key", "value")
        (server.kill if crash else server.stop)()
        assert server.process is None
        assert server.start() == url
        assert client.get("key") == b"value"


def test_it_is_a_context_manager(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        process = server.process
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None


def test_a_port_that_is_taken_meanwhile_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_port = redis_server.free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        offered = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(redis_server, "free_port", lambda: next(offered))
        with RedisServer(tmp_path) as server:
            assert not server.url.endswith(f":{taken.getsockname()[1]}/0")


def test_a_taken_port_that_was_asked_for_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceUnavailable, match=rf"port {port}.*in use"):
            RedisServer(tmp_path, port=port).start()


def test_a_program_that_is_no_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="did not start"):
        RedisServer(tmp_path, binary=shutil.which("false")).start()


def test_no_program_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"found none.*offbeat\[local\].*redis.url"):
        redis_server.find_server()


PARENT = """
import sys, time
from pathlib import Path
from offbeat.local.redis_server import RedisServer
server = RedisServer(Path(sys.argv[1]))
server.start()
sys.stdout.write(f"{server.process.pid}\\n")
sys.stdout.flush()
time.sleep(600)
"""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the server outlived its parent by 20 s"
        time.sleep(0.01)
