"""Looks at a recipe's data before anything is started.

`offbeat run` makes sure that the files are there, which costs nothing; what stands in them is checked by the learner,
before it loads its model. `offbeat doctor RECIPE` lets the learner's own code read all of it, and shows what it found.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from offbeat.local.checks import Check, Level
from offbeat.local.model import model_is_there

READ_SECONDS = 3600
"""A large data set may be downloaded first."""


def check_data_files(recipe: Recipe) -> None:
    """Raises `DataError` for the first file or folder that is missing, of the wrong kind, empty or not readable.

    Nothing is missing where it is still to be made together with the model.
    """
    if recipe.prepare is not None and recipe.prepare.makes_data and not model_is_there(recipe):
        return
    for what, source in _sources(recipe):
        match source:
            case JsonlSource() | CsvSource():
                _check_file(Path(source.path), what)
            case ParquetSource():
                path = Path(source.path)
                (_check_folder if path.is_dir() else _check_file)(path, what)
            case HuggingFaceSource() if source.path is not None:
                _check_folder(Path(source.path), what)


def data_checks(recipe_file: Path, overrides: Sequence[str]) -> list[Check]:
    """What the learner would make of the data: a line for each source, and the first prompt. Takes seconds or more."""
    sets = [part for override in overrides for part in ("--set", override)]
    words = [sys.executable, "-m", "services.learner.data", "--recipe", str(recipe_file), *sets]
    try:
        result = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, timeout=READ_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        found = f"not read within {READ_SECONDS} s"
        return [Check("data", Level.FAIL, found, "use a local copy, or fewer rows")]
    try:
        found = json.loads(result.stdout)
    except ValueError:
        text = f"reading it ended with code {result.returncode}; see above"
        return [Check("data", Level.FAIL, text, "install what is missing: requirements/cpu.txt")]
    if "error" in found:
        return [Check("data", Level.FAIL, found["error"], "correct the data or the recipe")]
    first = found["first"]
    text = (
        f"{first['text'][:300]!r}, {first['tokens']} tokens, columns {', '.join(first['columns'])}"
    )
    lines = [_check_part(part, found["limit"]) for part in found["parts"]]
    return [*lines, Check("first prompt", Level.OK, text)]


def _check_part(part: dict[str, Any], limit: int) -> Check:
    """One source's line: a warning where rows are dropped, because they may be missed."""
    text = (
        f"{part['used']} of {part['rows']} prompts used ({part['share']:.1%} of all issued); left out: "
        f"{part['held_out']} held out, {part['empty']} empty, {part['too_long']} longer than {limit} tokens "
        f"(longest: {part['longest']})"
    )
    if part["passes"]:
        text += f"; each is used {part['passes']:.2f} times"
    if part["empty"] + part["too_long"] == 0:
        return Check(part["what"], Level.OK, text)
    fix = "see data.max_prompt_tokens and model.max_context, or leave these rows out of the data"
    return Check(part["what"], Level.WARN, text, fix)


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
