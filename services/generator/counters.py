"""What a generator counts: one place, read by `GetStatus` and by Prometheus."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass(eq=False)
class Counters(Collector):
    """Counts since the start of the process."""

    version: int = 0
    """Version that is served with: loaded, and its parity check passed."""
    announced_version: int = 0
    groups_in_flight: int = 0
    groups_finished: int = 0
    groups_dead: int = 0
    tokens_generated: int = 0
    updates_applied: int = 0
    update_pause_seconds: float = 0.0
    update_drain_seconds: float = 0.0
    update_hold_seconds: float = 0.0
    """Time for which groups of an older version kept staged weights waiting."""
    parity_difference: float = 0.0
    parity_failures: int = 0
    draining: bool = False
    _started: float = field(default_factory=time.monotonic)
    _waited: float = 0.0
    _waiting_since: float | None = None

    def set_waiting(self, waiting: bool) -> None:
        """Tells whether there is nothing to do."""
        now = time.monotonic()
        if waiting and self._waiting_since is None:
            self._waiting_since = now
        elif not waiting and self._waiting_since is not None:
            self._waited += now - self._waiting_since
            self._waiting_since = None

    @property
    def waiting_seconds(self) -> float:
        """Seconds with nothing to do, the wait under way included."""
        since = self._waiting_since
        return self._waited + (time.monotonic() - since if since is not None else 0.0)

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def collect(self) -> Iterator[Metric]:
        """The metrics of a Prometheus scrape."""
        gauges = {
            "version": ("Version served with.", self.version),
            "announced_version": ("Newest version announced.", self.announced_version),
            "groups_in_flight": ("Groups under way.", self.groups_in_flight),
            "parity_difference": (
                "Largest log-prob difference of the last parity check, nats.",
                self.parity_difference,
            ),
        }
        totals = {
            "groups_finished": ("Groups generated.", self.groups_finished),
            "groups_dead": ("Groups given up.", self.groups_dead),
            "tokens_generated": ("Tokens of finished groups.", self.tokens_generated),
            "updates_applied": ("Weight updates.", self.updates_applied),
            "update_pause_seconds": (
                "Seconds for which the engine stood still for updates.",
                self.update_pause_seconds,
            ),
            "update_drain_seconds": (
                "Seconds of waiting for running completions before updates.",
                self.update_drain_seconds,
            ),
            "update_hold_seconds": (
                "Seconds for which groups of an older version held updates up.",
                self.update_hold_seconds,
            ),
            "parity_failures": ("Parity checks that failed.", self.parity_failures),
            "waiting_seconds": ("Seconds with nothing to do.", self.waiting_seconds),
            "uptime_seconds": ("Seconds since the start.", self.uptime_seconds),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"offbeat_generator_{name}", text, value)
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"offbeat_generator_{name}", text, value)
