"""Looks at the files of a recipe's data before anything is started: a missing file is known at once.

What stands in them is checked by the learner, before it loads its model. Used by `offbeat run`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from offbeat.config import Recipe
from offbeat.config.data import (
    CsvSource,
    HuggingFaceSource,
    JsonlSource,
    MixtureSource,
    ParquetSource,
    PlainSource,
    Source,
)
from offbeat.errors import DataError


def check_data_files(recipe: Recipe) -> None:
    """Raises `DataError` for the first file or folder that is missing, of the wrong kind, empty or not readable."""
    for what, source in _sources(recipe):
        match source:
            case JsonlSource() | CsvSource():
                _check_file(Path(source.path), what)
            case ParquetSource():
                path = Path(source.path)
                (_check_folder if path.is_dir() else _check_file)(path, what)
            case HuggingFaceSource() if source.path is not None:
                _check_folder(Path(source.path), what)


def _sources(recipe: Recipe) -> Iterator[tuple[str, PlainSource]]:
    """Every source that is no mixture, and its key in the recipe."""
    wanted: dict[str, Source | None] = {
        "data.train": recipe.data.train,
        "data.heldout": recipe.data.heldout,
    }
    for key, source in wanted.items():
        if isinstance(source, MixtureSource):
            for index, part in enumerate(source.parts):
                yield f"{key}.parts.{index}.source.path", part.source
        elif source is not None:
            yield f"{key}.path", source


def _check_file(path: Path, what: str) -> None:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise DataError(f"{what}: expected a file at {path}, found {found}; correct the path")
    if not os.access(path, os.R_OK):
        raise DataError(f"{what}: {path} can't be read by this user; change its permissions")
    if path.stat().st_size == 0:
        raise DataError(f"{what}: {path} is empty; expected rows in it")


def _check_folder(path: Path, what: str) -> None:
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise DataError(f"{what}: expected a folder at {path}, found {found}; correct the path")
    if not any(path.iterdir()):
        raise DataError(f"{what}: the folder {path} is empty; expected data files in it")
