"""gRPC under faults: what health and reflection tell, calls that move to another backend, too large messages."""

import asyncio
import contextlib

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from offbeat import rpc
from offbeat.config.service import RpcSettings
from offbeat.rpc import options
from offbeat.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    learner_pb2,
    learner_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
)
from tests.harness.proxy import Proxy

SERVICES = {
    "CheckpointService": (checkpoint_pb2, checkpoint_pb2_grpc),
    "GeneratorService": (generator_pb2, generator_pb2_grpc),
    "LearnerService": (learner_pb2, learner_pb2_grpc),
    "RewardService": (reward_pb2, reward_pb2_grpc),
}
REWARD = "offbeat.v1.RewardService"
STATUS = health_pb2.HealthCheckResponse


class Scorer(reward_pb2_grpc.RewardServiceServicer):
    """Answers with its name, as often as it is asked; a call may be held."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.hold_seconds = 0.0

    async def GetStatus(self, request, context):
        self.calls += 1
        await asyncio.sleep(self.hold_seconds)
        return reward_pb2.RewardServiceGetStatusResponse(reward_worker_id=self.name)


@contextlib.asynccontextmanager
async def serving(scorer: Scorer, **settings):
    server = rpc.RpcServer(
        RpcSettings(**settings),
        REWARD,
        lambda grpc_server: reward_pb2_grpc.add_RewardServiceServicer_to_server(
            scorer, grpc_server
        ),
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def test_health_of_names_over_a_life():
    """H1: unknown names are told apart from what is not ready, and a watcher sees every transition."""
    async with serving(Scorer("a")) as server, rpc.connect(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=30)
        assert (await unknown.read()).status == STATUS.SERVICE_UNKNOWN
        unknown.cancel()
        ready = stub.Watch(health_pb2.HealthCheckRequest(service=REWARD), timeout=30)
        alive = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"), timeout=30)
        assert (await ready.read()).status == STATUS.NOT_SERVING
        assert (await alive.read()).status == STATUS.SERVING
        await server.health.set_ready(True)
        assert (await ready.read()).status == STATUS.SERVING
        await server.health.set_ready(False)  # the first thing that a drain does
        assert (await ready.read()).status == STATUS.NOT_SERVING
        request = health_pb2.HealthCheckRequest(service="liveness")
        assert (await stub.Check(request, timeout=5)).status == STATUS.SERVING
        listed = (await stub.List(health_pb2.HealthListRequest(), timeout=5)).statuses
        assert set(listed) >= {"", "readiness", "liveness", REWARD}
        ready.cancel()
        alive.cancel()


@pytest.mark.parametrize("name", SERVICES)
async def test_reflection_describes_every_method_and_message(name):
    """H2: what a grpcurl-like client can find out, over v1alpha."""
    messages, stubs = SERVICES[name]
    full = f"offbeat.v1.{name}"
    register = getattr(stubs, f"add_{name}Servicer_to_server")
    servicer = getattr(stubs, f"{name}Servicer")()
    server = rpc.RpcServer(RpcSettings(), full, lambda s: register(servicer, s))
    await server.start()

    def described() -> set[str]:
        with grpc.insecure_channel(server.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert {full, "grpc.health.v1.Health"} <= set(database.get_services())
            service = DescriptorPool(database).FindServiceByName(full)
            return {
                found.full_name
                for method in service.methods
                for found in (method.input_type, method.output_type)
            }

    try:
        known = messages.DESCRIPTOR.services_by_name[name].methods
        expected = {
            t.full_name for method in known for t in (method.input_type, method.output_type)
        }
        assert await asyncio.to_thread(described) == expected
    finally:
        await server.stop(0)


async def test_reflection_can_be_switched_off():
    async with serving(Scorer("a"), reflection=False) as server:

        def listed() -> None:
            with grpc.insecure_channel(server.address) as channel:
                ProtoReflectionDescriptorDatabase(channel).get_services()

        with pytest.raises(grpc.RpcError) as error:
            await asyncio.to_thread(listed)
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_calls_move_on_when_a_backend_dies_and_come_back_with_it():
    """L1: round robin over three, one is killed and comes back at its place: no call fails."""
    scorers = [Scorer(name) for name in "abc"]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(scorer)) for scorer in scorers]
        address = "ipv4:" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
        channel = await stack.enter_async_context(rpc.connect(address))
        stub = reward_pb2_grpc.RewardServiceStub(channel)

        async def ask() -> str:
            request = reward_pb2.RewardServiceGetStatusRequest()
            reply = await rpc.call(
                "status",
                address,
                lambda t: stub.GetStatus(request, timeout=t),
                deadline_seconds=60,
            )
            return reply.reward_worker_id

        while not all(scorer.calls for scorer in scorers):
            await ask()
        before = [scorer.calls for scorer in scorers]
        for _ in range(60):
            await ask()
        assert [s.calls - b for s, b in zip(scorers, before, strict=True)] == [20, 20, 20]
        await servers[1].stop(0)
        answered = [await ask() for _ in range(60)]
        assert set(answered[-40:]) == {"a", "c"}
        again = Scorer("b again")
        bind = f"127.0.0.1:{servers[1].port}"
        await stack.enter_async_context(serving(again, bind=bind))
        async with asyncio.timeout(60):
            while not again.calls:
                await ask()


async def test_a_message_that_is_too_large_is_refused_and_the_server_lives():
    """A2: the bound of a message holds on both sides."""
    # A client without our bound, so that it is the server's that refuses.
    unbounded = [("grpc.max_send_message_length", -1)]
    async with (
        serving(Scorer("a")) as server,
        grpc.aio.insecure_channel(server.address, options=unbounded) as channel,
    ):
        call = channel.unary_unary(f"/{REWARD}/GetStatus")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"\x00" * (options.MAX_MESSAGE_BYTES + 1), timeout=30)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(b"", timeout=30)


@pytest.mark.slow
async def test_a_peer_that_is_silently_gone_is_noticed_long_before_the_deadline():
    """L2: no byte gets through and nobody says so; keepalive ends the call."""
    scorer = Scorer("a")
    async with (
        serving(scorer) as server,
        Proxy(server.address) as proxy,
        rpc.connect(proxy.address) as channel,
    ):
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        request = reward_pb2.RewardServiceGetStatusRequest()
        await stub.GetStatus(request, timeout=30)
        scorer.hold_seconds = 600.0
        call = stub.GetStatus(request, timeout=300)
        while scorer.calls < 2:
            await asyncio.sleep(0.01)
        proxy.stall()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        proxy.resume()


@pytest.mark.slow
async def test_a_long_call_without_data_is_kept_by_pings():
    """L2: more pings than a server takes by default; `Too many pings` would end the call."""
    scorer = Scorer("a")
    scorer.hold_seconds = 60.0
    async with serving(scorer) as server, rpc.connect(server.address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        request = reward_pb2.RewardServiceGetStatusRequest()
        assert (await stub.GetStatus(request, timeout=300)).reward_worker_id == "a"
