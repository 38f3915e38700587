"""What is counted after a run among faults, from what the run left behind and independently of how it got there."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.config import Recipe, load_recipe
from offbeat.report.records import read_lines
from offbeat.v1 import checkpoint_pb2 as checkpoint
from services.generator.engines.base import GenerationRequest
from services.generator.engines.deterministic import DeterministicHashEngine
from services.learner.tasks import seeds_of


def manifests(run_folder: Path) -> dict[int, checkpoint.Manifest]:
    """The manifests that the checkpoint service has stored, by version; very old ones are gone."""
    found = [
        checkpoint.Manifest.FromString(file.read_bytes())
        for file in run_folder.glob("**/manifest.pb")
    ]
    return {manifest.version: manifest for manifest in sorted(found, key=lambda m: m.version)}


def stale_writes(run_folder: Path) -> int:
    """Versions that a learner published after a newer learner had."""
    newest, stale = 0, 0
    for manifest in manifests(run_folder).values():
        stale += manifest.term < newest
        newest = max(newest, manifest.term)
    return stale


def torn_completions(run_folder: Path) -> tuple[int, int]:
    """(completions looked at, those whose text is not what the bytes of their version give).

    The deterministic engine's tokens are a function of every byte that it loaded, so a generator that had loaded torn
    weights would show here. Completions over an update, and of versions whose manifest is gone, are not looked at.
    """
    recipe = load_recipe(run_folder / "recipe.yaml")
    digests = {version: m.weights_digest.hex() for version, m in manifests(run_folder).items()}
    engine = _Replay(recipe)
    looked_at = torn = 0
    for row in _rows(run_folder):
        if row["version"] != row["newest_version"] or row["version"] not in digests:
            continue
        looked_at += 1
        torn += engine.text(digests[row["version"]], row) != row["completion"]
    return looked_at, torn


def _rows(run_folder: Path) -> Iterator[dict[str, Any]]:
    return (row for row in read_lines(run_folder / "samples.jsonl") if row["kind"] == "train")


class _Replay(DeterministicHashEngine):
    """Says what a generator must have made, without the weights."""

    def __init__(self, recipe: Recipe) -> None:
        engine = recipe.generator.engine
        assert engine.name == "deterministic", "only its tokens can be made again"
        super().__init__(engine, recipe.model)
        self._recipe = recipe
        asyncio.run(self.start())

    def text(self, digest: str, row: dict[str, Any]) -> str:
        """The completion of a row of samples.jsonl."""
        sampling = self._recipe.sampling
        seed = seeds_of(self._recipe.run.seed, row["ordinal"], sampling.k)[row["index"]]
        request = GenerationRequest("", [1], sampling.max_tokens, seed=seed, ordinal=row["ordinal"])
        self._digest = digest
        length, ends = self._plan(request, sampling.max_tokens)
        places = range(length - 1 if ends else length)
        tokens = [self._token(request, place) for place in places]
        return self._text([*tokens, self._eos] if ends else tokens)
