"""A cell of the suite: something measured in one sitting, and the file that keeps it.

A cell has rows, a row the values of all its rounds. What is told is the median and the spread; the median meets a
target or not. A cell that has a file is not measured again, so that a sitting can be cut short.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

AT_LEAST, AT_MOST = ">=", "<="


@dataclass(frozen=True)
class Row:
    """One quantity. `unit` "x" is a ratio of two things measured side by side."""

    name: str
    values: list[float]
    unit: str
    target: tuple[str, float] | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """The middle one of the rounds."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; None without one."""
        if self.target is None:
            return None
        sign, bound = self.target
        return self.median >= bound if sign == AT_LEAST else self.median <= bound


@dataclass(frozen=True)
class CellSpec:
    """What can be measured: `name` is unique within its letter; `measure` returns the rows."""

    letter: str
    name: str
    measure: Callable[[], list[Row]]

    @property
    def key(self) -> str:
        """LETTER/NAME."""
        return f"{self.letter}/{self.name}"


@dataclass
class Cell:
    """What was measured, and under which circumstances (see `machine`)."""

    letter: str
    name: str
    rows: list[Row]
    seconds: float
    circumstances: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """LETTER/NAME."""
        return f"{self.letter}/{self.name}"

    def as_json(self) -> dict[str, Any]:
        """For a file; `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Cell":
        """The inverse of `as_json`."""
        rows = [
            Row(**(row | {"target": tuple(row["target"]) if row["target"] else None}))
            for row in tree["rows"]
        ]
        return cls(**(tree | {"rows": rows}))


class CellFolder:
    """The files of the cells, one each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def file(self, key: str) -> Path:
        """Where a cell is kept."""
        return self._path / (key.replace("/", "-").replace(" ", "_") + ".json")

    def write(self, cell: Cell) -> None:
        """Keeps a cell, all of it or nothing."""
        self._path.mkdir(parents=True, exist_ok=True)
        partial = self.file(cell.key).with_suffix(".partial")
        partial.write_text(json.dumps(cell.as_json(), indent=1), encoding="utf-8")
        partial.replace(self.file(cell.key))

    def read(self, key: str) -> Cell | None:
        """A cell that was kept."""
        file = self.file(key)
        return Cell.from_json(json.loads(file.read_text("utf-8"))) if file.exists() else None


def write_results(file: Path, cells: Iterable[Cell], command: str) -> None:
    """All cells in one file, for the next run to compare with."""
    tree = {"command": command, "cells": [cell.as_json() for cell in cells]}
    file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def read_results(file: Path) -> dict[str, Cell]:
    """Cells by key of a file that `write_results` wrote; none when there is no such file."""
    if not file.exists():
        return {}
    tree = json.loads(file.read_text("utf-8"))
    return {cell.key: cell for cell in map(Cell.from_json, tree["cells"])}
