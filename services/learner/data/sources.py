"""Loads what a recipe's `data.train` and `data.heldout` name. Used when the learner starts, and by `prepare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.config.data import (
    CsvSource,
    DataSettings,
    HuggingFaceSource,
    JsonlSource,
    MixtureSource,
    ParquetSource,
    PlainSource,
    PythonSource,
    ReasoningGymSource,
    Source,
)
from offbeat.errors import DataError
from offbeat.imports import load_callable
from services.learner.data.files import read_csv, read_jsonl, read_parquet, row_place
from services.learner.data.hub import read_huggingface
from services.learner.data.rows import Rows


@dataclass(frozen=True)
class Part:
    """One source of the data; a recipe without a mixture has a single one."""

    rows: Rows
    prompt: str
    """Format string of the prompts, unless `messages` is set."""
    messages: str | None = None
    """Column with conversations."""
    name: str | None = None
    """Value of the column `part`; None without a mixture."""
    weight: float | None = None
    """In relation to the weights of the other parts; None: by the sizes of the parts."""

    def error(self, index: int, what: object) -> DataError:
        """An error that names row `index` and its place."""
        return DataError(f"{self.rows.what}: {self.rows.place(index)}: {what}")


@dataclass(frozen=True)
class RawData:
    """All rows that a recipe names."""

    train: list[Part]
    heldout: list[Part]


def load_data(settings: DataSettings) -> RawData:
    """Reads all sources. Imports no model library. Raises `DataError`, and `ConfigError` for a bad import path."""
    heldout = settings.heldout
    return RawData(
        train=load_parts(settings.train, settings, what="data.train"),
        heldout=[] if heldout is None else load_parts(heldout, settings, what="data.heldout"),
    )


def load_parts(source: Source, settings: DataSettings, *, what: str) -> list[Part]:
    """The rows of a source, or of each part of a mixture. `what` names the place in the recipe for errors."""
    if not isinstance(source, MixtureSource):
        rows = load_rows(source, what=what)
        return [Part(rows, settings.prompt, settings.messages)]
    parts = []
    for index, part in enumerate(source.parts):
        rows = load_rows(part.source, what=f"{what}.parts.{index} ({part.name})")
        own = part.prompt is not None or part.messages is not None
        prompt = part.prompt if part.prompt is not None else settings.prompt
        messages = part.messages if own else settings.messages
        parts.append(Part(rows, prompt, messages, part.name, part.weight))
    return parts


def load_rows(source: PlainSource, *, what: str) -> Rows:
    """Rows of a source, in its order. Raises `DataError` when there is none."""
    rows = _read(source, what)
    if not rows.rows:
        raise DataError(f"{what}: expected rows, found none in {_shown(source)}; is it empty?")
    return rows


def _read(source: PlainSource, what: str) -> Rows:
    match source:
        case ReasoningGymSource():
            return _reasoning_gym(source, what)
        case JsonlSource():
            return read_jsonl(Path(source.path), what)
        case CsvSource():
            return read_csv(Path(source.path), source.delimiter, what)
        case ParquetSource():
            return read_parquet(Path(source.path), what)
        case HuggingFaceSource():
            return read_huggingface(source, what)
        case PythonSource():
            return _python(source, what)


def _shown(source: PlainSource) -> str:
    match source:
        case ReasoningGymSource():
            return source.dataset
        case HuggingFaceSource():
            return source.path or source.name or ""
    return source.path


def _reasoning_gym(source: ReasoningGymSource, what: str) -> Rows:
    # Item i is drawn with seed + i, so the items of neighbouring seeds overlap; held-out prompts are left out later.
    import reasoning_gym

    try:
        items = reasoning_gym.create_dataset(
            source.dataset, seed=source.seed, size=source.size, **source.params
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"{what}: reasoning_gym can't make {source.dataset!r} with {source.params}: {error}"
        ) from error
    rows = [
        {"question": item["question"], "answer": item["answer"], "entry": item} for item in items
    ]
    return Rows(what, rows, row_place(f"reasoning_gym {source.dataset}"))


def _python(source: PythonSource, what: str) -> Rows:
    function = load_callable(source.path, key=f"{what}.path")
    try:
        found = function(**source.params)
    except Exception as error:
        # Somebody else's code may raise anything; for the user all of it means: this source gives no rows.
        raise DataError(
            f"{what}: {source.path} with {source.params} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Sequence):
        raise DataError(
            f"{what}: {source.path} must return a list of dicts (one a row), found {type(found).__name__}"
        )
    for index, row in enumerate(found):
        if not isinstance(row, dict) or not all(isinstance(name, str) for name in row):
            raise DataError(
                f"{what}: {source.path} must return a list of dicts with text as keys, "
                f"found {str(row)[:80]!r} at index {index}"
            )
    return Rows(what, [dict(row) for row in found], row_place(source.path))
