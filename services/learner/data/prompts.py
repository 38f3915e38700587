"""From rows of a data set to prompts. Used by `dataset` and, for texts alone, by `prepare`."""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from offbeat.config.data import DataSettings
from offbeat.errors import ConfigError, DataError
from offbeat.streams.columns import PART, RESERVED, encode_column
from offbeat.v1 import samples_pb2 as samples
from services.learner.data.rows import Row
from services.learner.data.sources import Part

BATCH = 1000
"""Texts that are tokenised together: enough for speed, few enough for memory."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be issued."""

    text: str
    token_ids: list[int]
    columns: dict[str, samples.ColumnValue]


class PromptMaker:
    """Turns rows into prompts: format string or messages, chat template, tokenizer."""

    def __init__(self, settings: DataSettings, tokenizer: Any, part: Part | None = None) -> None:
        """`tokenizer` is transformers'; None is enough for `plain_text`. `part`: whose rows, None: of the one source.

        Raises `ConfigError` when it has no chat template and one is needed, or the format string is none.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self._prompt = settings.prompt if part is None else part.prompt
        self._messages = settings.messages if part is None else part.messages
        self._name = None if part is None else part.name
        messages = self._messages
        self._named = _column_names(self._prompt) if messages is None else {messages}
        self._template = settings.chat_template
        own = getattr(tokenizer, "chat_template", None)
        if settings.chat and tokenizer is not None and not (self._template or own):
            raise ConfigError(
                "data.chat is true, but the tokenizer of model.path has no chat template; "
                "use a model that was trained on conversations, give data.chat_template, or data.chat: false"
            )

    def plain_text(self, row: Row) -> str | None:
        """The filled-in format string; None when a column that it needs is null.

        Raises `DataError` when a column is missing or its value does not fit.
        """
        if self._null(row):
            return None
        try:
            made = self._prompt.format(**row)
            return made.strip() if self._settings.strip else made
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"the prompt {self._prompt!r} does not fit the row: {type(error).__name__}: {error}"
            ) from error

    def text(self, row: Row) -> str | None:
        """The whole prompt; None when there is none in the row (null or empty). Raises `DataError`."""
        if self._messages is not None:
            turns = None if self._null(row) else self._split(row)[0]
        else:
            plain = self.plain_text(row)
            if not self._settings.chat:
                return plain
            turns = [{"role": "user", "content": plain}] if plain else None
        return self._through_template(turns) if turns else None

    def columns(self, row: Row) -> dict[str, samples.ColumnValue]:
        """The columns that travel along. Raises `DataError`."""
        wanted = self._settings.columns
        carried = row if wanted is None else {name: row[name] for name in wanted if name in row}
        reply = self._settings.reply_column
        if reply is not None and self._messages is not None:
            if reply in row:
                raise DataError(
                    f"the column name {reply!r} of data.reply_column is taken by a column of the data; choose another"
                )
            carried = {**carried, reply: self._split(row)[1]}
        reserved = sorted(set(carried) & {*RESERVED, *([PART] if self._name else [])})
        if reserved:
            raise DataError(
                f"the column name {reserved[0]!r} is taken: reward functions get something else under it; "
                "rename the column, or leave it out by data.columns"
            )
        encoded = {name: encode_column(name, value) for name, value in carried.items()}
        if self._name is not None:
            encoded[PART] = encode_column(PART, self._name)
        return encoded

    def tokenize(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Token ids of texts that `text` made."""
        for start in range(0, len(texts), BATCH):
            batch = list(texts[start : start + BATCH])
            # A chat template writes the special tokens itself.
            yield from self._tokenizer(
                batch,
                add_special_tokens=not self._settings.chat,
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]

    def _split(self, row: Row) -> tuple[list[dict[str, Any]], str | None]:
        """The conversation without the reply that `reply_column` takes, and that reply. Raises `DataError`."""
        turns = row[str(self._messages)]
        if self._settings.reply_column is None or not isinstance(turns, list) or not turns:
            return conversation(turns), None
        last = turns[-1]
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise DataError(
                "expected the assistant's reply as the last turn of the messages, which data.reply_column takes, "
                f"found {str(last)[:80]!r}; leave the row out, or remove data.reply_column"
            )
        if not isinstance(last.get("content"), str):
            raise DataError(
                f"expected text as the content of the last turn, found {str(last)[:80]!r}"
            )
        return conversation(turns[:-1]), last["content"]

    def _null(self, row: Row) -> bool:
        """Whether a column that the prompt needs is null. Raises `DataError` when one is missing."""
        missing = sorted(self._named - set(row))
        if missing:
            raise DataError(
                f"the prompt needs the column {missing[0]!r}; the row has: {', '.join(sorted(row)) or 'none'}"
            )
        return any(row[name] is None for name in self._named)

    def _through_template(self, turns: list[dict[str, Any]]) -> str:
        system = self._settings.system
        if system is not None and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system}, *turns]
        params = dict(self._settings.chat_params)
        if self._template is not None:
            params["chat_template"] = self._template
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True, **params
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error


def conversation(turns: Any) -> list[dict[str, Any]]:
    """The turns of a column with messages, checked. Raises `DataError` naming the turn that is none."""
    if not isinstance(turns, list):
        raise DataError(
            f"expected a list of turns with role and content in the column of messages, found {type(turns).__name__}"
        )
    for index, turn in enumerate(turns):
        texts = [turn.get(key) for key in ("role", "content")] if isinstance(turn, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"expected role and content as text in turn {index} of the messages, found {str(turn)[:80]!r}"
            )
    if turns and turns[-1]["role"] == "assistant":
        raise DataError(
            "the last turn of the messages is the assistant's, which is what the policy shall write; "
            "end the conversation with the turn before"
        )
    return turns


def _column_names(template: str) -> set[str]:
    """Columns that a format string names. Raises `ConfigError` when it is none."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"prompt {template!r} is no format string: {error}") from error
    names = {name.partition(".")[0].partition("[")[0] for name in fields}
    unnamed = sorted(name for name in names if not name or name.isdigit())
    if unnamed:
        raise ConfigError(
            f"prompt {template!r}: expected names of columns in braces, found {{{unnamed[0]}}}; name the column"
        )
    return names
