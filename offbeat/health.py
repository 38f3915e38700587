"""``python -m offbeat.health HOST:PORT``: asks a service how it is; for the health checks of containers.

A container starts it every few seconds, so it imports no more than the call needs: a quarter of a second of CPU time.
"""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2

CHECK = "/grpc.health.v1.Health/Check"
SERVING = "SERVING"


def check(address: str, service: str = "", *, timeout_seconds: float = 5.0) -> str:
    """The status that the server at HOST:PORT gives for `service` ("": the whole server), such as ``SERVING``.

    Where there is no answer, the gRPC status, such as ``UNAVAILABLE``.
    """
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = call(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the status to stdout; 0 when it is SERVING, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m offbeat.health", description="Asks a service of a run how it is."
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="readiness, liveness, or a service's full name; default: the whole server",
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    status = check(arguments.address, arguments.service, timeout_seconds=arguments.timeout)
    sys.stdout.write(f"{status}\n")
    return 0 if status == SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
