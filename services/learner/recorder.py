"""Everything that the learner writes for people: metrics, samples, and what it was doing. Used by `loop`, on rank 0.

None of it is needed to go on with a run; the ledger and the checkpoints are.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offbeat.config import Recipe
from offbeat.telemetry.activity import Activity
from offbeat.v1 import samples_pb2 as samples
from services.learner.cohorts import Cohorts
from services.learner.evaluation import Evaluation
from services.learner.metrics_file import MetricsWriter
from services.learner.samples_file import SamplesFile, chosen, rows_of

STATES = {
    "reference": "reference",
    "old": "reference",
}
"""Part of a step -> state of the activity; all other parts are "update"."""


class Recorder:
    """Files in the run's folder. `activity` is entered by the loop."""

    def __init__(self, recipe: Recipe, run_folder: Path, learner_id: str) -> None:
        self._recipe = recipe
        self._settings = recipe.telemetry.samples
        self._metrics = MetricsWriter(run_folder, tensorboard=recipe.telemetry.tensorboard)
        self._samples = SamplesFile(run_folder, self._settings)
        self._term = 0
        self._fence: Callable[[], None] = lambda: None
        self._publish_metrics: dict[str, float] = {}
        self.activity = Activity.open(run_folder, "learner", learner_id)

    def start(self, term: int, step: int, *, fence: Callable[[], None]) -> None:
        """This learner goes on after `step` steps. `fence` raises `Fenced` once another one does: asked before each
        write to a file that the two would share."""
        self._term, self._fence = term, fence
        self._metrics.start(term, step)
        self.activity.note("term", term=term, step=step)

    def on_part(self, part: str) -> None:
        """A part of a step begins."""
        self.activity.enter(STATES.get(part, "update"))

    def write_step(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """The step is done; `version` is the newest one then. Adds what the last publish took."""
        self._fence()
        self._metrics.write_step(step, version, {**metrics, **self._publish_metrics})

    def write_samples(
        self, cohorts: Cohorts, step: int, trained: Sequence[samples.ScoredRollout]
    ) -> None:
        """Keeps some of the groups that made step number `step`, counted from 1."""
        self._fence()
        count = self._settings.groups_per_step
        for scored in chosen(trained, count, seed=self._recipe.run.seed, step=step):
            completions = scored.rollout.completions
            lags = [cohorts.lag(step - 1, [completion]) for completion in completions]
            self._samples.add(
                rows_of(
                    scored,
                    max_characters=self._settings.max_characters,
                    lags=lags,
                    kind="train",
                    mode="",
                    step=step,
                    term=self._term,
                )
            )

    def write_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """The results of an evaluation, and what was kept of its completions."""
        self._fence()
        step, version, mode = evaluation.step, evaluation.version, evaluation.mode
        self._metrics.write_evaluation(step, version, mode, metrics)
        for scored in evaluation.kept:
            self._samples.add(
                rows_of(
                    scored,
                    max_characters=self._settings.max_characters,
                    kind="evaluation",
                    mode=mode,
                    step=step,
                    term=self._term,
                )
            )

    def published(self, version: int, step: int, size: int, seconds: float) -> None:
        """A version was taken in by the checkpoint service. Called on the background's thread."""
        self._publish_metrics = {"publish/seconds": seconds, "publish/bytes": float(size)}
        self.activity.note(
            "publish", version=version, step=step, bytes=size, seconds=round(seconds, 4)
        )

    def close(self) -> None:
        """Writes what is left, and closes the files."""
        self.activity.close()
        self._samples.close()
        self._metrics.close()
