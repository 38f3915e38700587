"""What the checkpoint service counts: one place, read by `GetStatus` and by Prometheus."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.checkpoint.deltas import Deltas
from services.checkpoint.store import VersionStore


@dataclass(eq=False)
class Counters(Collector):
    """Counts since the start of the process, and what the store holds now."""

    store: VersionStore
    deltas: Deltas | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    published: int = 0
    watchers: int = 0
    fetches: Counter[str] = field(default_factory=Counter)
    """Fetches that were sent to their end, by encoding: full, delta, mapped."""
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
        yield _labelled("refusals", "Calls refused, by status.", "status", self.refusals)
        yield _labelled("sent", "Versions sent, by encoding.", "encoding", self.fetches)
        if self.deltas is not None:
            text = "Deltas that a receiver asked for and did not get, by reason."
            yield _labelled("delta_refusals", text, "reason", self.deltas.refusals)


def _labelled(name: str, text: str, label: str, counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(f"offbeat_checkpoint_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
