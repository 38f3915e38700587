"""Servers for the tests of the sample streams."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from offbeat.local.redis_server import MIB, RedisServer
from offbeat.streams.memory import MemoryServer
from tests.harness.streams import StreamsRun

REAL = ("valkey", "redis")


def _server(kind: str, folder: Path) -> RedisServer:
    binary = None if kind == "valkey" else shutil.which("redis-server")
    if kind == "redis" and binary is None:
        pytest.skip("redis-server is not installed")
    return RedisServer(folder, binary=binary, max_memory_bytes=256 * MIB)


@pytest.fixture(scope="module")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RedisServer]]:
    """Servers that the tests of a module share; each test has a run of its own."""
    started: dict[str, RedisServer] = {}
    yield started
    for server in started.values():
        server.stop()


@pytest.fixture(params=REAL)
def url(
    request: pytest.FixtureRequest,
    shared_servers: dict[str, RedisServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """URL of a real server."""
    return _shared(request.param, shared_servers, tmp_path_factory)


def _shared(kind: str, servers: dict[str, RedisServer], folders: pytest.TempPathFactory) -> str:
    if kind not in servers:
        server = _server(kind, folders.mktemp(kind))
        server.start()
        servers[kind] = server
    return servers[kind].url


@pytest.fixture(params=["memory", *REAL])
async def run(
    request: pytest.FixtureRequest,
    shared_servers: dict[str, RedisServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[StreamsRun]:
    """A fresh run on each adapter."""
    kind = request.param
    memory = kind == "memory"
    server = MemoryServer() if memory else _shared(kind, shared_servers, tmp_path_factory)
    streams = StreamsRun(server)
    yield streams
    await streams.close()


@pytest.fixture
async def redis_run(url: str) -> AsyncIterator[StreamsRun]:
    """A fresh run on the real servers only."""
    streams = StreamsRun(url)
    yield streams
    await streams.close()


@pytest.fixture(params=REAL)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which it may kill or configure."""
    server = _server(request.param, tmp_path / "server")
    server.start()
    yield server
    server.stop()
