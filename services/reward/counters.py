"""What a reward worker counts: one place, read by `GetStatus` and by Prometheus."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass
class FunctionCounters:
    """Calls of one reward function."""

    calls: int = 0
    seconds: float = 0.0
    failures: int = 0


@dataclass(eq=False)
class Counters(Collector):
    """Counts since the start of the process."""

    groups_in_flight: int = 0
    groups_finished: int = 0
    completions_scored: int = 0
    groups_dead: int = 0
    draining: bool = False
    functions: dict[str, FunctionCounters] = field(
        default_factory=lambda: defaultdict(FunctionCounters)
    )
    _started: float = field(default_factory=time.monotonic)
    _waited: float = 0.0
    _waiting_since: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for work."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - self._waiting_since
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

    def announced(self) -> dict[str, str]:
        """How much it did and waited, as the streams announce it; the learner's scaling goes by it."""
        return {
            "waiting_seconds": f"{self.waiting_seconds:.3f}",
            "uptime_seconds": f"{self.uptime_seconds:.3f}",
            "groups_finished": str(self.groups_finished),
        }

    def collect(self) -> Iterator[Metric]:
        """The metrics of a Prometheus scrape."""
        yield GaugeMetricFamily(
            "offbeat_reward_groups_in_flight", "Groups under way.", self.groups_in_flight
        )
        totals = {
            "groups_finished": ("Groups scored.", self.groups_finished),
            "completions_scored": ("Completions scored.", self.completions_scored),
            "groups_dead": ("Groups given up.", self.groups_dead),
            "waiting_seconds": ("Seconds with nothing to do.", self.waiting_seconds),
            "uptime_seconds": ("Seconds since the start.", self.uptime_seconds),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"offbeat_reward_{name}", text, value)
        seconds = SummaryMetricFamily(
            "offbeat_reward_function_seconds",
            "Time of calls of reward functions.",
            labels=["function"],
        )
        failures = CounterMetricFamily(
            "offbeat_reward_function_failures",
            "Calls of reward functions that failed.",
            labels=["function"],
        )
        for name, function in list(self.functions.items()):
            seconds.add_metric([name], count_value=function.calls, sum_value=function.seconds)
            failures.add_metric([name], function.failures)
        yield seconds
        yield failures
