"""Rows of data sets that the `datasets` package loads: from the Hugging Face hub, or from a local folder.

Used by `sources`.
"""

import json
import os
from pathlib import Path
from typing import Any

from offbeat.config.data import HuggingFaceSource
from offbeat.errors import DataError
from services.learner.data.files import row_place
from services.learner.data.rows import Rows

SPLIT = "train"
SAVED_TABLE = "state.json"
SAVED_TABLES = "dataset_dict.json"
"""Files that `save_to_disk` leaves in the folder of one table, and of several splits."""


def read_huggingface(source: HuggingFaceSource, what: str) -> Rows:
    """The rows of one split. Raises `DataError`."""
    if source.path is None:
        table = _load(str(source.name), source, what)
    else:
        folder = Path(source.path)
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise DataError(
                f"{what}: expected a data-set folder at {folder}, found {found}; correct the path, "
                "or use kind jsonl, csv or parquet for a file"
            )
        saved = any((folder / name).is_file() for name in (SAVED_TABLE, SAVED_TABLES))
        table = (_load_saved if saved else _load)(str(folder), source, what)
    return Rows(what, list(table.with_format(None).to_list()), row_place(_shown(source)))


def _load(place: str, source: HuggingFaceSource, what: str) -> Any:
    """A repository: on the hub, or a folder in the form of one."""
    import datasets

    if source.path is None and Path(place).exists():
        raise DataError(
            f"{what}.name: {place} is also a local folder here; give it as path, or start elsewhere"
        )
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            place, source.config, split=source.split or SPLIT, revision=source.revision
        )
    except ConnectionError as error:
        raise DataError(f"{what}: {error}; {_unreachable()}") from error
    except datasets.exceptions.DatasetGenerationError as error:
        # The cause names what is wrong in the files.
        raise DataError(
            f"{what}: {_shown(source)} can't be read: {error.__cause__ or error}"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        text = str(error).strip().replace("\n", " ")
        raise DataError(f"{what}: {_shown(source)} can't be loaded: {text}") from error


def _unreachable() -> str:
    """What to do when the hub can't be reached. An environment variable may be the reason."""
    offline = [name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name)]
    if offline:
        return (
            f"{offline[0]}={os.environ[offline[0]]} forbids downloads, and the cache of `datasets` does not have it: "
            "unset the variable, download it once where that is allowed, or give a local folder as path"
        )
    return (
        "is there a connection to the hub? Behind a mirror set HF_ENDPOINT, without a connection give a local folder "
        "as path (HF_HUB_OFFLINE=1 uses what is cached without asking)"
    )


def _load_saved(place: str, source: HuggingFaceSource, what: str) -> Any:
    """A folder that `save_to_disk` wrote: one table, or several splits."""
    import datasets

    if source.config is not None:
        raise DataError(
            f"{what}.config: not used, because {place} was written by save_to_disk; remove it"
        )
    try:
        found = datasets.load_from_disk(place)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise DataError(f"{what}: {place} can't be loaded: {error}") from error
    if not isinstance(found, datasets.DatasetDict):
        if source.split is not None:
            raise DataError(f"{what}.split: {place} is a data set without splits; remove it")
        return found
    split = source.split or SPLIT
    if split not in found:
        raise DataError(
            f"{what}.split: expected one of {', '.join(sorted(map(str, found)))}, found {split!r}"
        )
    return found[split]


def _shown(source: HuggingFaceSource) -> str:
    parts = [source.name or source.path or "", source.config, source.split]
    return " ".join(part for part in parts if part)
