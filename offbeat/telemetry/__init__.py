"""Logs and metrics of the services."""

from offbeat.telemetry.logs import setup_logs

__all__ = ["setup_logs"]
