"""What the learner tells Prometheus: progress, and how many workers it could use. KEDA scales by the latter.

Fed by the loop's thread (steps) and the coordinator's event loop (members), read by the exporter's thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from offbeat.streams.base import Member
from offbeat.v1 import learner_pb2 as learner
from services.learner.progress import Board
from services.learner.wanted import Balance, Held, Reading, Work

ROLES = {"generator": "generators", "reward": "reward_workers"}
"""Role of a member -> what its workers are called."""


class Scaling(Collector):
    """The numbers wanted and held of each role, and the progress on `board`."""

    def __init__(self, board: Board, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._lock = threading.Lock()
        self._balances = {role: Balance() for role in ROLES}
        self._held = {role: Held() for role in ROLES}
        self._members: dict[str, list[Member]] = {role: [] for role in ROLES}

    def observe(self, members: Iterable[Member]) -> None:
        """Who is there now."""
        found = list(members)
        with self._lock:
            for role in ROLES:
                self._members[role] = [member for member in found if member.role == role]
                self._held[role].add(
                    self._clock(), (member.pending for member in self._members[role])
                )

    def step(self, *, busy_seconds: float, groups: float) -> None:
        """A step is done: seconds in which the learner did not wait and groups used up, since its start."""
        with self._lock:
            for role, balance in self._balances.items():
                workers = {
                    member.member_id: work
                    for member in self._members[role]
                    if (work := work_of(member.info)) is not None
                }
                balance.add(Reading(self._clock(), Work(busy_seconds, groups), workers))

    def metrics(self) -> dict[str, float]:
        """wanted/<workers> and held/<workers>, for the step's metrics."""
        with self._lock:
            progress = self._board.read()
            over = {learner.LEARNER_STATE_FINISHED, learner.LEARNER_STATE_FAILED}
            unfinished = progress.state not in over
            found: dict[str, float] = {}
            for role, name in ROLES.items():
                present = len(self._members[role])
                wanted = self._balances[role].wanted(present=present, unfinished=unfinished)
                found[f"wanted/{name}"] = float(wanted)
                found[f"held/{name}"] = float(self._held[role].workers)
            return found

    def collect(self) -> Iterator[Metric]:
        """The metrics of a Prometheus scrape."""
        texts = {
            "wanted": "Number of {} that keeps the learner busy.",
            "held": "Number of {} that pending entries fill: no fewer until they are done.",
        }
        for key, value in self.metrics().items():
            kind, _, name = key.partition("/")
            text = texts[kind].format(name.replace("_", " "))
            yield GaugeMetricFamily(f"offbeat_learner_{name}_{kind}", text, value)
        progress = self._board.read()
        gauges = {
            "step": ("Steps done.", progress.step),
            "total_steps": ("Steps of the run.", progress.total_steps),
            "version": ("Newest version of the weights.", progress.version),
            "outstanding": ("Groups issued that have no outcome yet.", progress.outstanding),
            "checkpoint_step": ("Steps in the newest checkpoint.", self._board.checkpoint_step),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"offbeat_learner_{name}", text, value)
        totals = {
            "waiting_seconds": ("Seconds spent waiting for groups.", self._board.waiting_seconds),
            "uptime_seconds": ("Seconds since the start.", time.monotonic() - self._board.started),
        }
        for name, (text, seconds) in totals.items():
            yield CounterMetricFamily(f"offbeat_learner_{name}", text, seconds)
        groups = CounterMetricFamily(
            "offbeat_learner_groups", "Groups by what became of them.", labels=["outcome"]
        )
        for outcome in ("trained", "filtered", "dead"):
            groups.add_metric([outcome], getattr(progress, outcome))
        yield groups
        newest = GaugeMetricFamily(
            "offbeat_learner_step_metric",
            "The newest step's metrics, as in metrics.jsonl.",
            labels=["name"],
        )
        for name, number in sorted(progress.metrics.items()):
            newest.add_metric([name], number)
        yield newest


def work_of(info: Mapping[str, str]) -> Work | None:
    """What a worker announced of its work; None when it does not tell."""
    try:
        busy = float(info["uptime_seconds"]) - float(info["waiting_seconds"])
        return Work(busy, float(info["groups_finished"]))
    except KeyError:
        return None
