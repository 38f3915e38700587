"""The health check of containers, against a real server."""

import socket
import subprocess
import sys

import pytest

from offbeat import health, rpc
from offbeat.config.service import RpcSettings
from offbeat.v1 import reward_pb2_grpc

NAME = "offbeat.v1.RewardService"


@pytest.fixture
async def server():
    def register(grpc_server):
        reward_pb2_grpc.add_RewardServiceServicer_to_server(
            reward_pb2_grpc.RewardServiceServicer(), grpc_server
        )

    serving = rpc.RpcServer(RpcSettings(), NAME, register)
    await serving.start()
    yield serving
    await serving.stop(0)


async def ask(server, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command, in a process of its own, while the server's loop goes on."""
    import asyncio

    words = [sys.executable, "-m", "offbeat.health", server.address, *arguments]
    return await asyncio.to_thread(
        subprocess.run, words, capture_output=True, text=True, check=False
    )


async def test_the_command_follows_readiness(server):
    said = await ask(server)
    assert (said.returncode, said.stdout) == (1, "NOT_SERVING\n")
    assert (await ask(server, "--service", "liveness")).stdout == "SERVING\n"
    await server.health.set_ready(True)
    said = await ask(server, "--service", NAME)
    assert (said.returncode, said.stdout) == (0, "SERVING\n")
    said = await ask(server, "--service", "judge")
    assert (said.returncode, said.stdout) == (1, "NOT_FOUND\n")


def test_no_server_is_not_serving(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    assert health.main([address, "--timeout", "2"]) == 1
    assert capsys.readouterr().out == "UNAVAILABLE\n"


def test_it_imports_no_more_than_the_call_needs():
    heavy = "pydantic", "typer", "rich", "yaml", "redis"
    script = f"import sys, offbeat.health; sys.exit(','.join(set({heavy}) & set(sys.modules)) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
