"""What the checkpoint service counts: one place, read by `GetStatus` and by Prometheus."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.checkpoint.store import VersionStore


@dataclass(eq=False)
class Counters(Collector):
    """Counts since the start of the process, and what the store holds now."""

    store: VersionStore
    sent_bytes: int = 0
    received_bytes: int = 0
    published: int = 0
    watchers: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """Calls that were refused, by status."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the versions that are there."""
        return sum(e.manifest.total_bytes for e in self.store.versions() if e.available)

    @property
    def latest_version(self) -> int:
        """The newest version whose bytes are there; 0 when there is none."""
        latest = self.store.latest()
        return 0 if latest is None else latest.version

    def collect(self) -> Iterator[Metric]:
        """The metrics of a Prometheus scrape."""
        versions = self.store.versions()
        gauges = {
            "term": ("Newest term.", self.store.term),
            "latest_version": ("Newest version; 0 when there is none.", self.latest_version),
            "available_versions": (
                "Versions whose bytes are there.",
                sum(entry.available for entry in versions),
            ),
            "stored_bytes": ("Bytes of these versions.", self.stored_bytes),
            "fetches": ("Fetches under way.", sum(entry.leases for entry in versions)),
            "watchers": ("Receivers that wait for news.", self.watchers),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"offbeat_checkpoint_{name}", text, value)
        totals = {
            "sent_bytes": ("Bytes of weights sent.", self.sent_bytes),
            "received_bytes": ("Bytes of weights received.", self.received_bytes),
            "published": ("Versions committed.", self.published),
            "damaged": ("Versions found damaged on the disk.", self.store.damaged),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"offbeat_checkpoint_{name}", text, value)
        refusals = CounterMetricFamily(
            "offbeat_checkpoint_refusals", "Calls refused, by status.", labels=["status"]
        )
        for status, count in sorted(self.refusals.items()):
            refusals.add_metric([status], count)
        yield refusals
