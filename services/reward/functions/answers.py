"""What verifiers share: taking the answer out of a completion, and the expected one out of a column."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression ({error})") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression, as text."""


class Extractor:
    """Takes the answer out of a completion: the last match of a pattern (or that match's first group), or all of it."""

    def __init__(self, pattern: str | None, *, strip: bool) -> None:
        self._pattern = re.compile(pattern) if pattern else None
        self._strip = strip

    def __call__(self, completion: str) -> str | None:
        """The answer; None when the pattern does not match."""
        if self._pattern is not None:
            matches = list(self._pattern.finditer(completion))
            if not matches:
                return None
            completion = matches[-1].group(1 if self._pattern.groups else 0) or ""
        return completion.strip() if self._strip else completion


def answers_of(column: str, columns: Mapping[str, list[Any]]) -> list[Any]:
    """The values of `column`. Raises `ValueError` when it is not there or has no value somewhere."""
    if column not in columns:
        raise ValueError(
            f"expected the column {column!r}, found {', '.join(columns) or 'no column'}; "
            "set params.column, or add it to the data"
        )
    answers = columns[column]
    if None in answers:
        raise ValueError(
            f"expected a value in column {column!r}, found null at index {answers.index(None)}"
        )
    return answers
