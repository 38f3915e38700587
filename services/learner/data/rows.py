"""Rows of a data set and where each came from, so that an error can name the place."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """What a source gave, in its order."""

    what: str
    """The place in the recipe, such as data.train."""
    rows: list[Row]
    place: Callable[[int], str]
    """Where row i stands, such as FILE:LINE."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that any row has, sorted."""
        return sorted({name for row in self.rows for name in row})
