"""gRPC bootstrap that every service shares: server, health, channels, deadlines."""

from offbeat.rpc.client import call, connect
from offbeat.rpc.server import Health, RpcServer, terminated

__all__ = ["Health", "RpcServer", "call", "connect", "terminated"]
