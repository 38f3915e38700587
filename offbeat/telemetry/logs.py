"""Logging of every process: to stderr, as text for people or as one JSON object per line."""

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

from offbeat.config.service import TelemetrySettings


def setup_logs(settings: TelemetrySettings, service: str) -> None:
    """Configures the root logger. Called once, by a process's entry point, before anything logs."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
        handler.setFormatter(JsonFormatter(fields, static_fields={"service": service}))
    else:
        text = f"%(asctime)s %(levelname).1s {service} %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(text, datefmt="%H:%M:%S"))
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
