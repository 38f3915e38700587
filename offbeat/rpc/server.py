"""The gRPC server of a service: bind, health, reflection, graceful stop."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from offbeat.config.service import RpcSettings
from offbeat.errors import ConfigError
from offbeat.rpc import options

LIVENESS = "liveness"
READINESS = "readiness"


class _HealthServicer(health.aio.HealthServicer):
    """The package's servicer, which leaves List to others."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, health_pb2.HealthCheckResponse] = {}

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses=self.told)

    async def set(
        self, service: str, status: "health_pb2.HealthCheckResponse.ServingStatus.ValueType"
    ) -> None:
        self.told[service] = health_pb2.HealthCheckResponse(status=status)
        await super().set(service, status)


class Health:
    """What `grpc.health.v1` answers.

    The names "" (the whole server), "readiness", and the service's full name follow readiness; "liveness" stays
    SERVING through loading and draining, and goes down only when the process can't recover by itself.
    """

    def __init__(self, service_name: str) -> None:
        self.servicer = _HealthServicer()
        self._follow_readiness = ("", READINESS, service_name)
        self.ready = False
        self.alive = True

    async def set_ready(self, ready: bool) -> None:
        """Sets readiness."""
        self.ready = ready
        for name in self._follow_readiness:
            await self.servicer.set(name, _status(ready))

    async def set_alive(self, alive: bool) -> None:
        """Sets liveness."""
        self.alive = alive
        await self.servicer.set(LIVENESS, _status(alive))


def _status(good: bool) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType":
    serving = health_pb2.HealthCheckResponse
    return serving.SERVING if good else serving.NOT_SERVING


class RpcServer:
    """A gRPC server with one Offbeat service, health, and (by setting) reflection.

    `register` is the generated ``add_XServicer_to_server`` with its servicer bound, `service_name` the full name
    such as ``offbeat.v1.RewardService``. Health is NOT_SERVING until `health.set_ready(True)`.
    """

    def __init__(
        self, settings: RpcSettings, service_name: str, register: Callable[[grpc.aio.Server], None]
    ) -> None:
        self._settings = settings
        self._service_name = service_name
        self.health = Health(service_name)
        self.server = grpc.aio.server(options=options.SERVER)
        register(self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self.server)
        if settings.reflection:
            names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.server)
        self.port = 0

    @property
    def address(self) -> str:
        """HOST:PORT that others dial: the setting, or what the bound address means to others."""
        if self._settings.advertise is not None:
            return self._settings.advertise
        host = self._settings.bind.rpartition(":")[0].strip("[]")
        if host in {"0.0.0.0", "::", ""}:
            host = socket.getfqdn()
        return f"{host}:{self.port}"

    async def start(self) -> None:
        """Binds and serves. Raises `ConfigError` when the port is taken or the address is not ours."""
        await self.health.set_ready(False)
        await self.health.set_alive(True)
        try:
            self.port = self.server.add_insecure_port(self._settings.bind)
        except RuntimeError as error:
            raise ConfigError(
                f"{self._service_name}: can't listen on {self._settings.bind} ({_why(self._settings.bind)}); "
                "free the port, or set another one (rpc.bind; port 0 lets the system choose)"
            ) from error
        await self.server.start()

    async def stop(self, grace_seconds: float) -> None:
        """NOT_SERVING at once, then ends: calls under way have `grace_seconds` to finish."""
        await self.health.set_ready(False)
        await self.server.stop(grace_seconds)


def _why(bind: str) -> str:
    """The operating system's reason, which gRPC keeps to its log."""
    host, _, port = bind.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port))):
            return "reason unknown"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    except ValueError as error:
        return str(error)


def terminated() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. asyncio delivers neither to `serve()`, hence the handlers.

    Must be called on the running loop's main thread.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
