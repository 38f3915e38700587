"""The steps of a run, on rank 0: gather a cohort, train it, publish the weights, save when due. Read it top to bottom.

Publishing and the commit of a checkpoint run in the background; a step waits for those of an earlier step only where
it needs them.
"""

import logging
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.checkpoints import Checkpoints, Meta
from offbeat.config import Recipe
from offbeat.failpoints import failpoint
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import learner_pb2 as learner
from services.learner.background import Background
from services.learner.batching import Group
from services.learner.best import BestVersion
from services.learner.cohorts import Place
from services.learner.coordinator import Coordinator
from services.learner.evaluation import GREEDY, SAMPLED, Evaluation
from services.learner.export import write_card
from services.learner.groups import (
    component_metrics,
    lag_metrics,
    left_out,
    moved_sequences,
    permuted,
    reward_metrics,
    to_group,
    versions_of,
)
from services.learner.health import Health
from services.learner.part_publisher import PartOrder
from services.learner.progress import Board, Controls
from services.learner.ranks import Ranks
from services.learner.recorder import Recorder
from services.learner.scaling import Scaling
from services.learner.versions import Publication
from services.learner.waiting import waiting_fraction, waiting_times

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""How often a waiting loop looks at the controls and keeps the other ranks awake."""
PARITY_SEQUENCES = 8


@dataclass
class Clock:
    """Where the time of the run went, in seconds."""

    started: float = field(default_factory=time.monotonic)
    waiting: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds since the first step that were not spent waiting for groups."""
        return time.monotonic() - self.started - self.waiting

    def waiting_fraction(self) -> float:
        """Share of the time since the first step that was spent waiting for groups."""
        return self.waiting / max(1e-9, time.monotonic() - self.started)


class Loop:
    """Trains from the step that the coordinator's cohorts start with to the end."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        run_folder: Path,
        ranks: Ranks,
        background: Background,
        coordinator: Coordinator,
        board: Board,
        controls: Controls,
        recorder: Recorder,
        scaling: Scaling,
        checkpoints: Checkpoints,
        meta: Meta,
        identity: checkpoint.Manifest,
        first_sequences: Sequence[Sequence[int]],
    ) -> None:
        self._recipe = recipe
        self._run_folder = run_folder
        self._ranks = ranks
        self._background = background
        self.coordinator = coordinator
        coordinator.on_evaluation = self.on_evaluation
        coordinator.versions.on_publish = self._on_publish
        ranks.tell_parts(recorder.on_part)
        assert coordinator.ledger is not None, "the coordinator must have taken over the run"
        self._ledger = coordinator.ledger
        self._board = board
        self._controls = controls
        controls.on_stop = lambda: background.start(coordinator.hurry())
        self._recorder = recorder
        self._scaling = scaling
        coordinator.on_members = scaling.observe
        self._groups_used = 0
        self._activity = recorder.activity
        self._checkpoints = checkpoints
        self._meta = meta
        self._identity = identity
        self._parity = [list(sequence) for sequence in first_sequences][:PARITY_SEQUENCES]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._publishing: Future[int] | None = None
        self._committing: Future[None] | None = None
        self._saved_step = meta.step if meta.lineage else -1
        self._saved_at = time.monotonic()
        self._clock = Clock()
        evaluation = recipe.evaluation
        self._pass_threshold = evaluation.pass_threshold if evaluation is not None else 1.0
        self._health = Health(recipe.learner.alarms)
        self._best = BestVersion(run_folder, Path(recipe.model.path))
        self._evaluated_at = time.monotonic()
        self._reported_at = time.monotonic()
        self._generator_before: dict[str, tuple[float, float]] = {}

    # --- the run

    def run(self) -> bool:
        """Trains to the end; False when it was stopped before."""
        self._board.update(step=self._meta.step, update=self._meta.update, counts=self._meta.counts)
        self._publish()
        self._clock = Clock()
        total = self._recipe.schedule.steps
        try:
            while self._meta.step < total:
                gathered = self._gather()
                if gathered is None:
                    self._stop_early()
                    return False
                self._step(gathered)
            self._finish()
            return True
        finally:
            self._pool.shutdown()

    def _step(self, gathered: list[tuple[int, Place]]) -> None:
        started = time.monotonic()
        self._board.update(state=learner.LEARNER_STATE_TRAINING)
        step = self._meta.step
        scored = [place.group for _, place in gathered if place.group is not None]
        groups = [to_group(self.coordinator.cohorts, step, group) for group in scored]
        filtered = left_out(
            groups,
            equal=self._recipe.learner.filter_equal_groups,
            at_most=self._recipe.schedule.prompts_per_step,
        )
        kept = [group for group in groups if group.ordinal not in filtered]
        metrics = self._ranks.train_step(self._control(kept, step))
        self._activity.enter("account")
        metrics |= lag_metrics(self.coordinator.cohorts, step, self._meta.update, scored)
        metrics |= reward_metrics(groups, threshold=self._pass_threshold)
        metrics |= component_metrics(scored)
        metrics |= {
            "dead_fraction": 1 - len(groups) / len(gathered),
            "filtered_fraction": len(filtered) / len(gathered),
        }
        self._account(step, gathered, filtered)
        trained = [group for group in scored if group.rollout.task.ordinal not in filtered]
        self._recorder.write_samples(self.coordinator.cohorts, self._meta.step, trained)
        self._parity = moved_sequences(kept, limit=PARITY_SEQUENCES) or self._parity
        self._publish()
        tokens = sum(len(sample.token_ids) for group in groups for sample in group.completions)
        seconds = time.monotonic() - started
        self._report(metrics, tokens=tokens, seconds=seconds)
        self._save_if_due()

    def _gather(self) -> list[tuple[int, Place]] | None:
        """The next cohort; None when the run is to stop."""
        started = time.monotonic()
        self._board.update(state=learner.LEARNER_STATE_GATHERING)
        self._activity.enter("wait")
        while True:
            if self._controls.stop.is_set():
                return None
            self._raise_if_failed()
            full = self.coordinator.backlog_full and self._saved_step != self._meta.step
            if self._controls.save.is_set() or full:
                self._save()
            if self._controls.paused:
                if self._board.read().state != learner.LEARNER_STATE_PAUSED:
                    self._board.update(state=learner.LEARNER_STATE_PAUSED)
                    self._activity.enter("pause")
                time.sleep(0.1)
                continue
            self._activity.enter("wait")
            gathered = self._background.call(self.coordinator.cohort(POLL_SECONDS))
            waited = time.monotonic() - started
            self._clock.waiting += waited
            self._board.waiting_seconds = self._clock.waiting
            started += waited
            if gathered is not None:
                return gathered
            self._ranks.stay_awake()

    def _raise_if_failed(self) -> None:
        """A publish or commit that failed in the background ends the run here."""
        for future in (self._publishing, self._committing):
            if future is not None and future.done():
                future.result()

    # --- parts of a step

    def _control(self, groups: list[Group], step: int) -> list[Group]:
        if not self._recipe.learner.permute_rewards:
            return groups
        return permuted(groups, random.Random(f"{self._recipe.run.seed}:{step}"))

    def _account(self, step: int, gathered: list[tuple[int, Place]], filtered: set[int]) -> None:
        """The step is done: counts it, and writes what became of each ordinal."""
        dead = {ordinal: place.dead for ordinal, place in gathered if place.dead is not None}
        arrived = [(ordinal, place.group) for ordinal, place in gathered if place.group is not None]
        trained = [(ordinal, group) for ordinal, group in arrived if ordinal not in filtered]
        cohorts = self.coordinator.cohorts
        self._ledger.write(
            "step",
            step=step,
            trained=[ordinal for ordinal, _ in trained],
            filtered=sorted(filtered),
            dead=dead,
            lag=[cohorts.lag(step, group.rollout.completions) for _, group in trained],
            versions=versions_of(group for _, group in trained),
        )
        counts = self._meta.counts
        counts["trained"] = counts.get("trained", 0) + len(trained)
        counts["filtered"] = counts.get("filtered", 0) + len(filtered)
        counts["dead"] = counts.get("dead", 0) + len(dead)
        self._groups_used += len(gathered)
        self._meta.step += 1
        self._meta.update += self._recipe.learner.updates_per_step

    def _publish(self) -> None:
        """Takes a snapshot and publishes it in the background."""
        self._activity.enter("publish")
        if self._publishing is not None:
            self._publishing.result()
        step, total = self._meta.step, self._recipe.schedule.steps
        whole, evaluate = step in {0, total}, self._evaluates(step)
        order = PartOrder(
            self._meta.term,
            step,
            publish_id=f"{self._meta.term}-{step}",
            candidate=str(self._best.candidate(step)) if evaluate else None,
        )
        snapshot = self._ranks.snapshot(self._parity, order)
        manifest = checkpoint.Manifest()
        manifest.CopyFrom(self._identity)
        manifest.step, manifest.update = step, self._meta.update
        manifest.publish_id = order.publish_id
        manifest.adapter_config = snapshot.adapter_config or ""
        manifest.parity.tolerance = self._recipe.parity_tolerance
        for token_ids, logprobs in snapshot.parity:
            manifest.parity.sequences.add(token_ids=token_ids, logprobs=logprobs)
        if evaluate:
            self._best.add_candidate(step, snapshot)
        publication = Publication(manifest, list(snapshot.raw()), snapshot.part)
        self._publishing = self._background.start(
            self.coordinator.publish(publication, evaluate=evaluate, whole=whole)
        )

    def _on_publish(self, version: int, publication: Publication, seconds: float) -> None:
        manifest = publication.manifest
        self._recorder.published(version, manifest.step, manifest.total_bytes, seconds)

    def _evaluates(self, step: int) -> bool:
        settings = self._recipe.evaluation
        if settings is None:
            return False
        if step == 0:
            return settings.at_start
        if step == self._recipe.schedule.steps:
            return settings.at_end
        minutes = (time.monotonic() - self._evaluated_at) / 60
        due = settings.every_minutes is not None and minutes >= settings.every_minutes
        due = due or (settings.every_steps is not None and step % settings.every_steps == 0)
        if due and not self.coordinator.evaluating:  # slow evaluations must not pile up
            self._evaluated_at = time.monotonic()
            return True
        return False

    # --- reporting

    def _report(self, metrics: dict[str, float], *, tokens: int, seconds: float) -> None:
        now = time.monotonic()
        wall = now - self._reported_at
        self._reported_at = now
        self._activity.enter("account")
        metrics |= {
            "time/step_seconds": wall,
            "time/work_seconds": seconds,
            "tokens_per_second": tokens / max(1e-9, wall),
            "wait/learner": self._clock.waiting_fraction(),
            "outstanding": float(self.coordinator.cohorts.outstanding),
        }
        version = max(self.coordinator.cohorts.lineage.versions, default=0)
        members = self.coordinator.members
        if not self._generator_before:
            # The first step is the start of the count: loading an engine is no waiting.
            self._generator_before = waiting_times(members, "generator")
        metrics |= self._health.check(self._meta.step, metrics)
        waiting = waiting_fraction(members, "generator", self._generator_before)
        if waiting is not None:
            metrics["wait/generator"] = waiting
        used = self._groups_used + self.coordinator.evaluated_groups
        self._scaling.step(busy_seconds=self._clock.busy, groups=used)
        metrics |= self._scaling.metrics()
        self._recorder.write_step(self._meta.step, version, metrics)
        self._board.update(
            step=self._meta.step,
            update=self._meta.update,
            version=version,
            outstanding=int(metrics["outstanding"]),
            metrics=metrics,
            counts=self._meta.counts,
        )

    def on_evaluation(self, evaluation: Evaluation, metrics: dict[str, float]) -> None:
        """The results of an evaluation have arrived (called on the background's thread)."""
        settings = self._recipe.evaluation
        judged = "reward" if settings is not None and settings.pass_threshold is None else "pass@1"
        name = f"eval/{evaluation.mode}/{judged}"
        log.info(
            "evaluation %s at step %d: %s %.3f",
            evaluation.mode, evaluation.step, judged, metrics[name],
        )  # fmt: skip
        self._recorder.write_evaluation(evaluation, metrics)
        if settings is not None and evaluation.mode == (GREEDY if settings.greedy else SAMPLED):
            if evaluation.other_version:
                log.warning("%d prompts were answered by other versions", evaluation.other_version)
            else:
                self._best.judge(evaluation.step, evaluation.version, name, metrics[name])
        ends = {0: "start", self._recipe.schedule.steps: "end"}
        named = (
            {f"{name}_{ends[evaluation.step]}": value for name, value in metrics.items()}
            if evaluation.step in ends
            else {}
        )
        self._board.update(metrics=metrics | named)

    # --- checkpoints and the end

    def _save_if_due(self) -> None:
        settings = self._recipe.learner.checkpoints
        if (
            self._meta.step - self._saved_step >= settings.every_steps
            or time.monotonic() - self._saved_at >= settings.every_minutes * 60
            or self.coordinator.unsettled_bytes >= settings.max_unsettled_bytes
            or self.coordinator.backlog_full
            or self._controls.save.is_set()
        ):
            self._save()

    def _save(self) -> None:
        """Writes the state now, and commits it in the background."""
        with self._activity.during("checkpoint"):
            self._save_now()

    def _save_now(self) -> None:
        if self._committing is not None:
            self._committing.result()
        if self._saved_step == self._meta.step:
            # Writing it again would take the good one away first.
            self._controls.save.clear()
            self._board.update()
            return
        self._ledger.check()
        partial = self._checkpoints.begin(self._meta.term, self._meta.step)
        self._ranks.save(partial)
        assert self._publishing is not None
        self._publishing.result()
        failpoint("learner.published")
        self._meta.lineage = dict(self.coordinator.cohorts.lineage.versions)
        meta = Meta.parse(self._meta.dump())
        self._saved_step, self._saved_at = self._meta.step, time.monotonic()
        self._committing = self._pool.submit(self._commit, partial, meta)
        self._controls.save.clear()

    def _commit(self, partial: Path, meta: Meta) -> None:
        self._ledger.sync()
        committed = self._checkpoints.commit(partial, meta, fence=self._ledger.check)
        self._ledger.write("checkpoint", step=meta.step, name=committed.path.name)
        self._background.call(self.coordinator.settle(meta.step))
        self._board.checkpoint_step, self._board.checkpoint_path = meta.step, str(committed.path)
        self._board.update()

    def _stop_early(self) -> None:
        log.info("stopping at step %d, as asked", self._meta.step)
        if self._controls.save_on_stop and self._saved_step != self._meta.step:
            self._save()
        self._drain()

    def _finish(self) -> None:
        """The last evaluation, the last checkpoint, the exported model."""
        assert self._publishing is not None
        version = self._publishing.result()
        self._board.update(state=learner.LEARNER_STATE_EVALUATING, version=version)
        self._activity.enter("evaluate")
        if self._recipe.evaluation is not None:
            self._await_evaluation(self._recipe.evaluation.timeout_seconds)
        if self._saved_step != self._meta.step:
            self._save()
        self._drain()
        self._activity.enter("export")
        self._ledger.check()
        self._ranks.export(self._run_folder / "export")
        write_card(self._recipe, self._run_folder / "export", step=self._meta.step)
        if self._recipe.learner.lora is not None:
            adapter = self._run_folder / "adapter"
            write_card(self._recipe, adapter, step=self._meta.step, adapter=True)
        self._ledger.write("finish", step=self._meta.step)

    def _await_evaluation(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._controls.stop.is_set():
            if self._background.call(
                self.coordinator.evaluated(min(POLL_SECONDS, max(0.1, end - time.monotonic())))
            ):
                return
            self._ranks.stay_awake()
        log.error("the last evaluation had no complete result after %g s; it is left out", seconds)

    def _drain(self) -> None:
        if self._committing is not None:
            self._committing.result()
