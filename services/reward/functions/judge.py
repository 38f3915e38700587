"""`judge`: a language model behind an OpenAI-compatible endpoint reads a completion and gives it a score.

A completion that can't be judged is an error, which costs its group a second try and then a place in its step; it never
becomes a number.
"""

import asyncio
import hashlib
import os
import string
from collections import OrderedDict
from pathlib import Path
from typing import Any, Self

import httpx2
from pydantic import Field, field_validator, model_validator

from offbeat.config.base import Settings
from offbeat.errors import ConfigError, RewardError
from services.reward.functions.answers import Pattern
from services.reward.functions.chat_client import ChatClient, request_body
from services.reward.functions.verdicts import ScoreReader

KNOWN_SCORES = 16384
"""Scores that are remembered: a batch that failed is scored again group by group, and asks only for what is missing."""
FIXED_FIELDS = {"model", "messages", "n", "stream"}


class JudgeParams(Settings):
    """Params of `judge`."""

    base_url: str = Field(description="Of the endpoint, such as https://HOST/v1.")
    model: str = Field(description="Name of the judge's model there.")
    template: str = Field(
        description="Format string of the question: {prompt}, {completion} and columns, also as {columns[name]}."
    )
    system: str | None = Field(None, description="System turn in front of it.")
    pattern: Pattern | None = Field(
        None,
        description="Regular expression; its last match (or that match's first group) is the score.",
    )
    field: str | None = Field(
        None, description="Field of the JSON object that the judge writes; dots reach into it."
    )
    minimum: float = Field(allow_inf_nan=False, description="Lowest score that the judge may give.")
    maximum: float = Field(allow_inf_nan=False, description="Highest one.")
    scale: bool = Field(True, description="Make minimum to maximum 0 to 1.")
    api_key_env: str | None = Field(
        None, description="Environment variable with the bearer token; null: none is sent."
    )
    api_key_file: str | None = Field(
        None, description="File with the token, read before each request; relative to the recipe."
    )
    temperature: float | None = Field(0.0, ge=0, description="null: the endpoint's own.")
    max_tokens: int | None = Field(1024, gt=0, description="Of a reply; null: the endpoint's own.")
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of the request, such as response_format."
    )
    max_concurrency: int = Field(16, gt=0, description="Requests (and connections) at once.")
    timeout_seconds: float = Field(60.0, gt=0, description="Longest time of one request.")
    deadline_seconds: float = Field(
        240.0, gt=0, description="Longest time for all of a batch, retries included."
    )

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            url = httpx2.URL(value)
        except (httpx2.InvalidURL, ValueError) as error:
            raise ValueError(f"expected http(s)://HOST[:PORT]/PATH ({error})") from error
        if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
            raise ValueError("expected http(s)://HOST[:PORT]/PATH")
        return value

    @field_validator("template")
    @classmethod
    def _names_the_completion(cls, value: str) -> str:
        names = _names(value)
        if "completion" not in names:
            raise ValueError("expected {completion} in it")
        if any(not name or name.isdigit() for name in names):
            raise ValueError("expected a name in each pair of braces; {{ and }} stand for braces")
        return value

    @field_validator("extra")
    @classmethod
    def _sets_nothing_twice(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(FIXED_FIELDS & set(value))
        if taken:
            raise ValueError(f"{taken[0]} is set by the judge itself; remove it")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.pattern is None) == (self.field is None):
            raise ValueError("expected either pattern or field, which say how the score is read")
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("expected api_key_env or api_key_file, found both; remove one")
        if self.minimum >= self.maximum:
            raise ValueError(
                f"expected minimum below maximum, found {self.minimum:g}, {self.maximum:g}"
            )
        return self


def _names(template: str) -> set[str]:
    """The fields of a format string, without what is taken of them. Raises `ValueError` when it is none."""
    fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return {name.partition(".")[0].partition("[")[0] for name in fields}


class Judge:
    """Asks for each completion, several at once, and reads the scores."""

    def __init__(self, **params: Any) -> None:
        self._params = JudgeParams(**params)
        if httpx2.URL(self._params.base_url).userinfo:
            # The error shows the address to nobody, for the same reason.
            raise ConfigError(
                "params.base_url has a user or password in it, which would stand in logs; "
                "use api_key_env or api_key_file"
            )
        self._names = _names(self._params.template) - {"columns"}
        self._read = ScoreReader(
            pattern=self._params.pattern,
            field=self._params.field,
            minimum=self._params.minimum,
            maximum=self._params.maximum,
            scale=self._params.scale,
        )
        self._key()  # a key that is missing shows at the start
        self._client = ChatClient(
            self._params.base_url,
            key=self._key,
            max_concurrency=self._params.max_concurrency,
            timeout_seconds=self._params.timeout_seconds,
        )
        self._known: OrderedDict[bytes, float] = OrderedDict()

    async def __call__(
        self, prompts: list[str], completions: list[str], **columns: list[Any]
    ) -> list[float]:
        """A score per completion. Raises `RewardError` when one can't be had, after all were asked for."""
        deadline = asyncio.get_running_loop().time() + self._params.deadline_seconds
        texts = [
            self._text(index, prompt, completion, columns)
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        # Equal completions of a group are asked for once.
        wanted = list(dict.fromkeys(texts))
        answers = await asyncio.gather(
            *(self._score(text, deadline) for text in wanted), return_exceptions=True
        )
        found = dict(zip(wanted, answers, strict=True))
        scores: list[float] = []
        errors: list[tuple[int, BaseException]] = []
        for index, text in enumerate(texts):
            answer = found[text]
            if isinstance(answer, BaseException):
                errors.append((index, answer))
            else:
                scores.append(answer)
        if errors:
            index, error = errors[0]
            raise RewardError(
                f"{len(errors)} of {len(texts)} completions could not be judged; at index {index}: {error}"
            ) from error
        return scores

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def _score(self, text: str, deadline: float) -> float:
        place = hashlib.blake2b(text.encode("utf-8", errors="surrogatepass")).digest()
        if place in self._known:
            self._known.move_to_end(place)
            return self._known[place]
        params = self._params
        settings = {"temperature": params.temperature, "max_tokens": params.max_tokens}
        body = request_body(params.model, params.system, text, settings | params.extra)
        reply = await self._client.ask(body, deadline)
        try:
            score = self._read(reply)
        except ValueError as error:
            raise RewardError(f"the judge's reply can't be read: {error}") from error
        self._known[place] = score
        if len(self._known) > KNOWN_SCORES:
            self._known.popitem(last=False)
        return score

    def _text(self, index: int, prompt: str, completion: str, columns: dict[str, list[Any]]) -> str:
        row = {name: values[index] for name, values in columns.items()}
        fields = {**row, "columns": row, "prompt": prompt, "completion": completion}
        null = sorted(name for name in self._names if name in fields and fields[name] is None)
        if null:
            raise ValueError(f"expected a value in column {null[0]!r}, found null at index {index}")
        try:
            return self._params.template.format_map(fields)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"params.template does not fit the row at index {index}: {type(error).__name__} {error}; "
                f"there are: prompt, completion, {', '.join(sorted(row)) or 'no column'}"
            ) from error

    def _key(self) -> str | None:
        """The bearer token. Raises `ConfigError`, which does not show it."""
        variable, file = self._params.api_key_env, self._params.api_key_file
        if variable is not None:
            key, where = os.environ.get(variable, ""), f"the environment variable {variable}"
        elif file is not None:
            where = f"the file {file}"
            try:
                key = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"params.api_key_file: {where} can't be read: {error}") from None
        else:
            return None
        key = key.strip()
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            found = "nothing" if not key else "something else"
            raise ConfigError(f"expected a token, one word, in {where}, found {found}")
        return key
