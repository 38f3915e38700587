"""The Prometheus port that every service opens when ``rpc.metrics_port`` is set."""

from prometheus_client import CollectorRegistry, start_http_server

from offbeat.config.service import RpcSettings
from offbeat.errors import ConfigError


def start_metrics(settings: RpcSettings, registry: CollectorRegistry) -> int | None:
    """Serves ``/metrics`` of `registry` on the host of ``rpc.bind``; returns the port, or None when it is off.

    The server is a daemon thread: it ends with the process. Raises `ConfigError` when the port is taken.
    """
    if settings.metrics_port is None:
        return None
    host = settings.bind.rpartition(":")[0].strip("[]") or "0.0.0.0"
    try:
        server, _thread = start_http_server(settings.metrics_port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"rpc.metrics_port: can't listen on {host}:{settings.metrics_port} ({error.strerror}); "
            "free the port, or set another one (0 lets the system choose, null serves no metrics)"
        ) from error
    return int(server.server_port)
