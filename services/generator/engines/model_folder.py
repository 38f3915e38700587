"""What every engine checks of the model folder before it imports anything heavy."""

import json
from pathlib import Path
from typing import Any

from offbeat.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json. Weights may be absent; they come from the checkpoint service.

    Raises `ModelError` when folder, configuration or tokenizer is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(
            f"model.path {folder}: expected a Hugging Face model folder, found "
            f"{'a file' if folder.exists() else 'nothing'}: correct the path, or run `offbeat prepare`"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path {folder}: config.json can't be read ({error})") from error
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.path {folder}: expected a tokenizer ({', '.join(TOKENIZER_FILES)}), found none: "
            "save the tokenizer into the folder"
        )
    return config


def check_context(config: dict[str, Any], max_context: int) -> None:
    """Raises `ModelError` when the model was not made for `max_context` tokens."""
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and max_context > limit:
        raise ModelError(
            f"model.max_context is {max_context}, but the model has max_position_embeddings = {limit}: lower it"
        )


def check_eos(eos_token_id: int | None, folder: str | Path) -> int:
    """Raises `ModelError` when the tokenizer has no end-of-sequence token."""
    if eos_token_id is None:
        raise ModelError(
            f"model.path {folder}: the tokenizer has no eos_token, so no completion would ever end by itself: "
            "set eos_token in tokenizer_config.json"
        )
    return eos_token_id
