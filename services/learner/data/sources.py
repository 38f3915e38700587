"""Rows of a data set, from each kind of source that a recipe can name. Used when the learner starts."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from offbeat.config.data import DataSettings, JsonlSource, PythonSource, ReasoningGymSource, Source
from offbeat.errors import DataError
from offbeat.imports import load_object
from services.learner.data.prompts import PromptMaker, Row

log = logging.getLogger(__name__)


def load_heldout(settings: DataSettings) -> list[Row]:
    """Rows for evaluation; none when the recipe has no held-out data."""
    return [] if settings.heldout is None else load_rows(settings.heldout, what="data.heldout")


def load_train(settings: DataSettings, maker: PromptMaker, heldout_texts: set[str]) -> list[Row]:
    """Rows for training, without those whose prompt is held out. Raises `DataError` when nothing is left."""
    rows = load_rows(settings.train, what="data.train")
    if heldout_texts:
        kept = [row for row in rows if maker.make(row).text not in heldout_texts]
        if len(kept) < len(rows):
            log.info(
                "data.train: %d of %d rows left out: their prompt is held out",
                len(rows) - len(kept),
                len(rows),
            )
        rows = kept
    if not rows:
        raise DataError(
            "data.train: no row is left once the held-out prompts are taken out; use another seed or more rows"
        )
    return rows


def load_rows(source: Source, *, what: str) -> list[Row]:
    """Rows of a source, in its order. `what` names the place in the recipe for errors."""
    match source:
        case ReasoningGymSource():
            return _reasoning_gym(source, what)
        case JsonlSource():
            return _jsonl(Path(source.path), what)
        case PythonSource():
            return _checked(load_object(source.path, key=f"{what}.path")(**source.params), what)


def _reasoning_gym(source: ReasoningGymSource, what: str) -> list[Row]:
    # Item i is drawn with seed + i, so the items of neighbouring seeds overlap: `load_train` takes that into account.
    import reasoning_gym

    try:
        items = reasoning_gym.create_dataset(
            source.dataset, seed=source.seed, size=source.size, **source.params
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"{what}: reasoning_gym can't make {source.dataset!r} with {source.params}: {error}"
        ) from error
    return [
        {"question": item["question"], "answer": item["answer"], "entry": item} for item in items
    ]


def _jsonl(path: Path, what: str) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{what}: {path} can't be read as UTF-8 text: {error}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{what}: {path}:{number}: expected a JSON object, found {line[:60]!r}: {error}"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{what}: {path}:{number}: expected a JSON object, found {type(row).__name__}"
            )
        rows.append(row)
    return rows


def _checked(rows: object, what: str) -> list[Row]:
    if not isinstance(rows, Sequence) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{what}: the callable must return a list of dicts (one a row), found {type(rows).__name__}"
        )
    return [dict(row) for row in rows]
