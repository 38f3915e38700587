"""Publishes the parts of ranks other than 0, where no rank holds the whole model; and what rank 0 tells them of it."""

import json
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.config import Recipe
from offbeat.errors import ConfigError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient
from services.learner.background import Background
from services.learner.cohorts import Lineage
from services.learner.snapshot import Snapshot, write_candidate
from services.learner.versions import Publication, Versions


@dataclass(frozen=True)
class PartOrder:
    """What rank 0 tells the others about a snapshot: under which name to publish it, and where to keep a copy."""

    term: int
    step: int
    publish_id: str
    candidate: str | None = None
    """File without its ending, for a version that is going to be evaluated."""

    def dump(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "PartOrder":
        """Of what `dump` returned."""
        return cls(**json.loads(text))


class PartPublisher:
    """Publishes a rank's part of each version, beside its training. Use as a context manager.

    What fails is raised by the next call of `publish` or `check`. Rank 0's part then waits in vain.
    """

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self._recipe = recipe
        self._rank = rank
        self._background = Background()
        self._client: CheckpointClient | None = None
        self._versions: Versions | None = None
        self._publishing: Future[int] | None = None

    def __enter__(self) -> "PartPublisher":
        self._background.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
        if self._client is not None:
            self._background.call(self._client.close())
        self._background.__exit__(*error)

    def publish(self, snapshot: Snapshot, order: PartOrder) -> None:
        """Keeps a copy if that was ordered, waits for the part before, and starts to publish this one."""
        if snapshot.part is None:
            return  # rank 0 has all of it
        if order.candidate is not None:
            write_candidate(snapshot, Path(order.candidate))
        if self._publishing is not None:
            self._publishing.result()
        manifest = checkpoint.Manifest(
            step=order.step, publish_id=order.publish_id, kind=checkpoint.WEIGHTS_KIND_FULL
        )
        publication = Publication(manifest, list(snapshot.raw()), snapshot.part)
        self._publishing = self._background.start(self._publish(publication, order.term))

    def check(self) -> None:
        """Raises what the last part failed with."""
        if self._publishing is not None and self._publishing.done():
            self._publishing.result()

    async def _publish(self, publication: Publication, term: int) -> int:
        if self._versions is None:
            address = self._recipe.checkpoint.address
            if address is None:
                raise ConfigError(
                    "checkpoint.address is not set: with learner.zero_stage 3 every rank publishes its part, so all "
                    "need it; `offbeat run` sets it, elsewhere give it in the recipe"
                )
            name = f"learner-rank{self._rank}"
            self._client = CheckpointClient(address, self._recipe.run_id, name)
            keep = self._recipe.checkpoint.deltas
            self._versions = Versions(self._client, Lineage(), keep=keep)
        self._versions.term = term
        return await self._versions.publish(publication)
