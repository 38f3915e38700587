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


def answers_of(
    column: str, columns: Mapping[str, list[Any]], extract: str | None = None
) -> list[Any]:
    """The values of `column`, or what `extract` takes out of each (its last match, or that match's first group).

    Raises `ValueError` when the column is not there, has no value somewhere, or one in which `extract` does not match.
    """
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
    return answers if extract is None else _extracted(column, answers, extract)


def _extracted(column: str, answers: list[Any], extract: str) -> list[str]:
    take = Extractor(extract, strip=True)
    found = [take(str(answer)) for answer in answers]
    if None in found:
        index = found.index(None)
        raise ValueError(
            f"expected a match of params.column_extract in column {column!r}, found {str(answers[index])[-60:]!r} at "
            f"index {index}"
        )
    return [str(answer) for answer in found]
