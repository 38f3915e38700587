"""Proves from the ledger and the checkpoints of a run that nothing was lost and nothing was trained twice.

Used by ``offbeat audit`` and by tests. Redis is not asked: it is a queue that can be rebuilt. The newest committed
checkpoint says which weights survived and which term trained which of their steps; only those steps count.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offbeat.checkpoints import Checkpoints, Meta
from offbeat.errors import CheckpointError
from offbeat.ledger import read_ledger


@dataclass
class Audit:
    """What an audit found. `problems` is empty when every promise was kept."""

    run_id: str
    steps: int = 0
    terms: int = 0
    ordinals: int = 0
    trained: int = 0
    filtered: int = 0
    dead: int = 0
    reissued: int = 0
    retrained_steps: int = 0
    """Steps that were trained once more because a crash took them with it."""
    versions: int = 0
    max_lag_seen: int = 0
    lag_counts: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"clean": self.clean}


def audit_run(run_folder: Path, *, prompts_per_step: int, max_lag: int) -> Audit:
    """Audits a run's folder. Raises `CheckpointError` when it has no committed checkpoint to count from."""
    meta = _newest_meta(run_folder)
    events = read_ledger(run_folder)
    audit = Audit(run_id=run_folder.name, steps=meta.step, terms=len(events))
    _check_versions(audit, events)
    _check_steps(audit, events, meta, prompts_per_step=prompts_per_step, max_lag=max_lag)
    counted = {name: getattr(audit, name) for name in ("trained", "filtered", "dead")}
    said = {name: meta.counts.get(name, 0) for name in counted}
    if counted != said:
        audit.problems.append(f"the checkpoint counts {said}, the ledger {counted}")
    return audit


def _newest_meta(run_folder: Path) -> Meta:
    committed = Checkpoints(run_folder, keep=1).committed()
    if not committed:
        raise CheckpointError(
            f"{run_folder}: expected a committed checkpoint in checkpoints/, found none: an audit counts from the "
            "checkpoint; run it once the first one is there"
        )
    return committed[-1].meta()


def _check_versions(audit: Audit, events: dict[int, list[dict[str, Any]]]) -> None:
    """Version numbers grow over the whole life of the run, terms in order, and none comes twice."""
    newest = 0
    for term in sorted(events):
        for event in events[term]:
            audit.reissued += event["event"] == "reissue"
            if event["event"] != "publish":
                continue
            audit.versions += 1
            if event["version"] <= newest:
                audit.problems.append(
                    f"term {term} published version {event['version']} after {newest}"
                )
            newest = max(newest, event["version"])


def _check_steps(
    audit: Audit,
    events: dict[int, list[dict[str, Any]]],
    meta: Meta,
    *,
    prompts_per_step: int,
    max_lag: int,
) -> None:
    steps = {
        (term, event["step"]): event
        for term in events
        for event in events[term]
        if event["event"] == "step"
    }
    owners = _owners(meta)
    bounds = {
        term: event.get("max_lag", max_lag)
        for term in events
        for event in events[term]
        if event["event"] == "start"
    }
    audit.retrained_steps = sum(
        step < meta.step and owners.get(step) != term for term, step in steps
    )
    lineage = set(meta.lineage)
    lags: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    for step in range(meta.step):
        event = steps.get((owners[step], step))
        if event is None:
            audit.problems.append(
                f"step {step} is in the weights, but the ledger of term {owners[step]} lacks it"
            )
            continue
        dead = [int(ordinal) for ordinal in event["dead"]]
        audit.trained += len(event["trained"])
        audit.filtered += len(event["filtered"])
        audit.dead += len(dead)
        found = [*event["trained"], *event["filtered"], *dead]
        seen.update(found)
        lags.update(event["lag"])
        bound = bounds.get(owners[step], max_lag)
        outside = sorted({lag for lag in event["lag"] if not 0 <= lag <= bound})
        if outside:
            audit.problems.append(f"step {step}: lags outside 0 .. {bound}: {outside}")
        oldest = [
            step - meta.lineage[version][0]
            for version in event["versions"]
            if version in meta.lineage
        ]
        if any(lag > bound for lag in oldest):
            audit.problems.append(
                f"step {step}: a version of lag {max(oldest)} was used, above {bound}"
            )
        expected = range(step * prompts_per_step, (step + 1) * prompts_per_step)
        if sorted(found) != list(expected):
            missing = sorted(set(expected) - set(found))[:5]
            extra = sorted((Counter(found) - Counter(expected)).elements())[:5]
            audit.problems.append(
                f"step {step}: ordinals missing {missing}, twice or of another step {extra}"
            )
        abandoned = sorted(set(event["versions"]) - lineage)
        if abandoned:
            audit.problems.append(f"step {step} trained tokens of abandoned versions {abandoned}")
    audit.ordinals = len(seen)
    twice = [ordinal for ordinal, count in seen.items() if count > 1]
    if twice:
        audit.problems.append(f"{len(twice)} ordinals count more than once, such as {twice[:5]}")
    audit.lag_counts = dict(sorted(lags.items()))
    audit.max_lag_seen = max(lags, default=0)


def _owners(meta: Meta) -> dict[int, int]:
    """Step -> the term whose training of it is in the weights."""
    owners: dict[int, int] = {}
    for term, first in meta.history:
        owners.update((step, term) for step in range(first, meta.step))
    return owners
