"""The server bootstrap: ports, addresses, health."""

import socket

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from offbeat import rpc
from offbeat.config.service import RpcSettings
from offbeat.errors import ConfigError, ServiceUnavailable
from offbeat.v1 import reward_pb2, reward_pb2_grpc

NAME = "offbeat.v1.RewardService"
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


def server(**settings) -> rpc.RpcServer:
    def register(grpc_server):
        reward_pb2_grpc.add_RewardServiceServicer_to_server(
            reward_pb2_grpc.RewardServiceServicer(), grpc_server
        )

    return rpc.RpcServer(RpcSettings(**settings), NAME, register)


async def test_a_taken_port_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=rf"can't listen on {address} \(Address already in use\)"
        ):
            await server(bind=address).start()


async def test_health_follows_readiness_and_liveness_does_not():
    serving = server()
    await serving.start()
    async with rpc.connect(serving.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(name: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status

        assert [await check(name) for name in ("", "readiness", NAME)] == [NOT_SERVING] * 3
        assert await check("liveness") == SERVING
        await serving.health.set_ready(True)
        assert [await check(name) for name in ("", "readiness", NAME)] == [SERVING] * 3
        await serving.health.set_alive(False)
        assert await check("liveness") == NOT_SERVING
    await serving.stop(0)


async def test_the_advertised_address_is_not_the_bound_one():
    serving = server(bind="0.0.0.0:0")
    await serving.start()
    host, _, port = serving.address.rpartition(":")
    assert (host, port) == (socket.getfqdn(), str(serving.port))
    await serving.stop(0)
    assert server(advertise="reward.svc:50051").address == "reward.svc:50051"


async def test_a_call_that_nobody_answers_names_the_service_and_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with rpc.connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        request = reward_pb2.RewardServiceGetStatusRequest()
        with pytest.raises(
            ServiceUnavailable, match=rf"status at {address} did not answer within 0\.3 s"
        ):
            await rpc.call(
                "status",
                address,
                lambda t: stub.GetStatus(request, timeout=t),
                deadline_seconds=0.3,
            )
