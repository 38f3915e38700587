"""Takes staged weights into service: load, parity check, confirmation. Used by the worker.

Nothing that was sampled leaves the generator between the load and the end of the check (`trusted`), so a load that went
wrong can't be trained on.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from offbeat.config.workers import GeneratorSettings
from offbeat.errors import IntegrityError, OffbeatError
from offbeat.telemetry.activity import Activity
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient
from offbeat.weights.staged import StagedWeights
from services.generator.counters import Counters
from services.generator.engines import Engine, LoadReport
from services.generator.staging import Stager

log = logging.getLogger(__name__)


MEAN_SHARE = 0.1
"""Of the tolerance, for the mean: rounding is worst where a token is improbable; another version moves all tokens."""


@dataclass(frozen=True)
class Difference:
    """How far the engine's log-probs are from the learner's, in nats."""

    largest: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, ours: Iterable[Sequence[float]], theirs: Iterable[Sequence[float]]) -> "Difference":
        """Of log-probs, sequence by sequence; infinite when one is not a number."""
        apart = [
            abs(a - b)
            for row, other in zip(ours, theirs, strict=True)
            for a, b in zip(row, other, strict=True)
        ]
        if any(map(math.isnan, apart)):
            return cls(math.inf, math.inf)
        return cls(max(apart, default=0.0), sum(apart) / max(1, len(apart)))

    def within(self, tolerance: float) -> bool:
        """Whether this can be rounding."""
        return self.largest <= tolerance and self.mean <= MEAN_SHARE * tolerance


class Updater:
    """Loads versions into the engine, one at a time."""

    def __init__(
        self,
        engine: Engine,
        stager: Stager,
        client: CheckpointClient,
        settings: GeneratorSettings,
        counters: Counters,
        *,
        tolerance: float,
        activity: Activity | None = None,
    ) -> None:
        self._tolerance = tolerance
        self._engine = engine
        self._stager = stager
        self._client = client
        self._settings = settings
        self._counters = counters
        self._activity = activity or Activity.none()
        self._digest = b""
        self._confirmations: set[asyncio.Task[None]] = set()
        self.trusted = asyncio.Event()
        """Set while the engine holds a version whose parity check passed."""

    @property
    def version(self) -> int:
        """The version that is served with, 0 before the first."""
        return self._counters.version

    async def apply(self, weights: StagedWeights) -> bool:
        """Loads and checks a version. Returns False when what ran meanwhile must be sampled again.

        That is the case when the first load did not pass the parity check and a second one, fetched again, did. Raises
        `IntegrityError` when that one fails as well, `WeightsError` when the version can't be loaded.
        """
        self.trusted.clear()
        version = weights.version
        manifest = weights.manifest
        report, difference = await self._load(weights)
        passed = difference.within(self._tolerance)
        if not passed:
            self._counters.parity_failures += 1
            log.error(
                "version %d failed its parity check (%s); loading it again in full",
                version,
                self._compared(difference),
            )
            report, difference = await self._load(await self._stager.fetch(version))
            if not difference.within(self._tolerance):
                self._counters.parity_failures += 1
                raise IntegrityError(
                    f"version {version} failed its parity check twice ({self._compared(difference)}): "
                    "engine and learner do not agree about the weights, so this generator leaves service. Do both "
                    "use the same model folder and dtype? If it can only be rounding, raise generator.parity_tolerance"
                )
        self._accept(manifest, report, difference)
        return passed

    async def _load(self, weights: StagedWeights) -> tuple[LoadReport, Difference]:
        report = await self._engine.load_weights(
            weights,
            weights.version,
            mode=self._settings.weight_update,
            kv=self._settings.kv_on_update or "keep",
        )
        difference = await self._parity_difference(weights.manifest)
        weights.discard()
        return report, difference

    async def _parity_difference(self, manifest: checkpoint.Manifest) -> Difference:
        if not self._engine.computes_policy:
            return Difference()
        sequences = [list(sequence.token_ids) for sequence in manifest.parity.sequences]
        if not sequences:
            log.warning(
                "version %d has no parity sequences: nothing checks its load", manifest.version
            )
            return Difference()
        found = await self._engine.score_tokens(sequences)
        return Difference.of(found, [s.logprobs for s in manifest.parity.sequences])

    def _compared(self, found: Difference) -> str:
        return (
            f"largest difference {found.largest:.3g}, allowed {self._tolerance:g}; mean {found.mean:.3g}, "
            f"allowed {MEAN_SHARE * self._tolerance:g}"
        )

    def _accept(
        self, manifest: checkpoint.Manifest, report: LoadReport, difference: Difference
    ) -> None:
        if manifest.weights_digest == self._digest:
            log.warning("version %d has the same weights as the one before", manifest.version)
        self._digest = manifest.weights_digest
        counters = self._counters
        counters.version = manifest.version
        counters.parity_difference = difference.largest
        counters.updates_applied += 1
        counters.update_pause_seconds += report.pause_seconds
        counters.update_drain_seconds += report.drain_seconds
        self.trusted.set()
        self._note(manifest, report, difference.largest)
        log.info(
            "version %d: paused %.0f ms, parity difference %.2g (mean %.2g)",
            manifest.version,
            1000 * report.pause_seconds,
            difference.largest,
            difference.mean,
        )
        # Serving does not wait for the checkpoint service to hear of it.
        task = asyncio.create_task(self._confirm(manifest, report, difference.largest))
        self._confirmations.add(task)
        task.add_done_callback(self._confirmations.discard)

    def _note(self, manifest: checkpoint.Manifest, report: LoadReport, difference: float) -> None:
        """What this update cost, for the report of the run."""
        self._activity.note(
            "weights",
            version=manifest.version,
            step=manifest.step,
            bytes=manifest.total_bytes,
            parity_difference=difference,
            **asdict(self._stager.times),
            **asdict(report),
        )

    async def _confirm(
        self, manifest: checkpoint.Manifest, report: LoadReport, difference: float
    ) -> None:
        try:
            await self._client.applied(manifest, difference, report.pause_seconds)
        except OffbeatError as error:
            log.warning("version %d could not be confirmed: %s", manifest.version, error)
