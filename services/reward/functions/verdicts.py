"""Reads a judge's score out of what it wrote. Pure; used by `judge`.

What can't be read is an error. It is never taken for a low score, a middle one, or the last one.
"""

import json
import math
import re
from typing import Any

from services.reward.functions.answers import Extractor

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n\s*```", re.DOTALL)
SHOWN = 120
"""Characters of a reply that an error shows."""


class ScoreReader:
    """Takes the number by a regular expression, or from a field of a JSON object, and checks its range."""

    def __init__(
        self, *, pattern: str | None, field: str | None, minimum: float, maximum: float, scale: bool
    ) -> None:
        """`pattern`: its last match (or that match's first group) is the number. `field`: names joined by dots.

        Exactly one of the two is given. `scale`: the range becomes 0 to 1.
        """
        self._extract = Extractor(pattern, strip=True) if pattern is not None else None
        self._names = (field or "").split(".")
        self._minimum = minimum
        self._maximum = maximum
        self._scale = scale

    def __call__(self, reply: str) -> float:
        """The score. Raises `ValueError` that says what was expected and found."""
        if not reply.strip():
            raise ValueError("expected a score, found an empty reply")
        found = self._match(reply) if self._extract is not None else self._field(reply)
        score = _number(found)
        if score is None:
            raise ValueError(f"expected a number, found {str(found)[:SHOWN]!r} in {_end(reply)}")
        if not self._minimum <= score <= self._maximum:
            raise ValueError(
                f"expected a score from {self._minimum:g} to {self._maximum:g}, found {score:g} in {_end(reply)}"
            )
        width = self._maximum - self._minimum
        return (score - self._minimum) / width if self._scale else score

    def _match(self, reply: str) -> str:
        assert self._extract is not None
        found = self._extract(reply)
        if found is None:
            raise ValueError(f"expected a match of params.pattern, found none in {_end(reply)}")
        return found

    def _field(self, reply: str) -> Any:
        fenced = FENCE.fullmatch(reply.strip())
        try:
            value = json.loads(fenced.group(1) if fenced else reply)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected JSON, found {_end(reply)} ({error})") from error
        for name in self._names:
            if not isinstance(value, dict) or name not in value:
                raise ValueError(
                    f"expected the field {'.'.join(self._names)!r}, found none in {_end(reply)}"
                )
            value = value[name]
        return value


def _number(found: Any) -> float | None:
    """A finite number, also one that is written as text; None for all else, true and false included."""
    if isinstance(found, str) and NUMBER.fullmatch(found.strip()):
        found = float(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:
        return None


def _end(reply: str) -> str:
    """The end of a reply: judges give their reasons first."""
    return f"{'…' if len(reply) > SHOWN else ''}{reply[-SHOWN:]!r}"
