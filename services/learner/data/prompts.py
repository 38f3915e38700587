"""From rows of a data set to prompts in a deterministic order. Used by `coordinator` and `evaluation`."""

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.config.data import DataSettings
from offbeat.errors import DataError
from offbeat.v1 import samples_pb2 as samples

log = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be issued."""

    text: str
    token_ids: list[int]
    columns: dict[str, samples.ColumnValue]


class PromptMaker:
    """Turns a row into a prompt: format string, chat template, tokenizer. `tokenizer` is transformers'."""

    def __init__(self, settings: DataSettings, tokenizer: Any) -> None:
        self._settings = settings
        self._tokenizer = tokenizer

    def text(self, row: Row) -> str:
        """The prompt's text, before the chat template. Raises `DataError` when a column is missing."""
        try:
            return self._settings.prompt.format(**row)
        except (KeyError, IndexError) as error:
            raise DataError(
                f"data.prompt {self._settings.prompt!r} needs the column {error}; the row has: {', '.join(sorted(row))}"
            ) from error

    def make(self, row: Row) -> Prompt:
        """The whole prompt."""
        text = self.text(row)
        if self._settings.chat:
            turns = [{"role": "user", "content": text}]
            if self._settings.system is not None:
                turns.insert(0, {"role": "system", "content": self._settings.system})
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        ids = self._tokenizer(text, add_special_tokens=not self._settings.chat)["input_ids"]
        return Prompt(text, list(ids), {name: encode_column(value) for name, value in row.items()})


def encode_column(value: Any) -> samples.ColumnValue:
    """A column's value as it travels to the rewards."""
    if value is None:
        return samples.ColumnValue()
    if isinstance(value, bool):
        return samples.ColumnValue(boolean=value)
    if isinstance(value, int) and abs(value) < 2**63:
        return samples.ColumnValue(integer=value)
    if isinstance(value, float):
        return samples.ColumnValue(number=value)
    if isinstance(value, str):
        return samples.ColumnValue(text=value)
    return samples.ColumnValue(json=json.dumps(value, default=str))


class PromptOrder:
    """Which row an ordinal gets: each epoch is a permutation that depends on the seed and the epoch alone."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        if rows < 1:
            raise DataError(
                "the training data has no usable prompts; see the counts of dropped ones in the log"
            )
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def row(self, ordinal: int) -> int:
        """Index of the row of an ordinal."""
        epoch, place = divmod(ordinal, self._rows)
        if epoch != self._epoch:
            self._order = list(range(self._rows))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]


def usable(rows: Sequence[Row], maker: PromptMaker, *, limit: int, what: str) -> list[Prompt]:
    """Prompts of the rows, without those longer than `limit` tokens and without empty ones; drops are logged."""
    made = [maker.make(row) for row in rows]
    kept = [prompt for prompt in made if 0 < len(prompt.token_ids) <= limit]
    if len(kept) < len(made):
        longest = max(len(prompt.token_ids) for prompt in made)
        log.warning(
            "%s: %d of %d prompts dropped: empty or longer than %d tokens (longest: %d)",
            what, len(made) - len(kept), len(made), limit, longest,
        )  # fmt: skip
    if not kept:
        raise DataError(
            f"{what}: none of {len(made)} prompts has between 1 and {limit} tokens; see data.max_prompt_tokens"
        )
    return kept
