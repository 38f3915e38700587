"""Rows of local JSON-lines, CSV and Parquet files. What is wrong in a file is named with its line or row.

Files are UTF-8, with or without a byte-order mark. Used by `sources`.
"""

import bisect
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offbeat.errors import DataError
from services.learner.data.rows import Row, Rows

BYTE_ORDER_MARK = "\ufeff"
LONGEST_VALUE = 2**24
"""Characters of one CSV value. An unclosed quotation mark takes in the rest of the file: better an error."""


def read_jsonl(path: Path, what: str) -> Rows:
    """A row per line that is not blank. Raises `DataError`."""
    rows: list[Row] = []
    lines: list[int] = []
    for number, line in _lines(path, what):
        if not line.strip():
            continue
        rows.append(_object(line, f"{what}: {path}:{number}"))
        lines.append(number)
    return Rows(what, rows, lambda index: f"{path}:{lines[index]}")


def read_csv(path: Path, delimiter: str, what: str) -> Rows:
    """A row per record below the header; values are text. Raises `DataError`."""
    csv.field_size_limit(LONGEST_VALUE)
    rows: list[Row] = []
    lines: list[int] = []
    header: list[str] | None = None
    for number, record in _records(path, delimiter, what):
        where = f"{what}: {path}:{number}"
        if not record:
            continue  # a blank line
        if header is None:
            header = record
            _check_names(header, where)
            continue
        if len(record) != len(header):
            raise DataError(
                f"{where}: expected {len(header)} values, one for each of {', '.join(header)}, found {len(record)}; "
                "put values with a delimiter or a line break in them into quotation marks"
            )
        rows.append(dict(zip(header, record, strict=True)))
        lines.append(number)
    return Rows(what, rows, lambda index: f"{path}:{lines[index]}")


def read_parquet(path: Path, what: str) -> Rows:
    """The rows of a file, or of all ``*.parquet`` files of a folder, in the order of their names."""
    import pyarrow
    import pyarrow.parquet

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{what}: {path}: expected *.parquet files in the folder, found none")
    rows: list[Row] = []
    ends: list[int] = []
    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                _check_names(opened.schema_arrow.names, f"{what}: {file}")
                table = opened.read()
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{what}: {file}: can't be read as Parquet: {error}") from error
        rows += _python_values(table, f"{what}: {file}")
        ends.append(len(rows))
    return Rows(what, rows, _place_in(files, ends))


def row_place(what: Any) -> Callable[[int], str]:
    """Names rows by their number."""
    return lambda index: f"{what}, row {index} (from 0)"


def _python_values(table: Any, where: str) -> list[Row]:
    try:
        return list(table.to_pylist())
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: has a value that Python has no form for: {error}") from error


def _place_in(files: list[Path], ends: list[int]) -> Callable[[int], str]:
    def place(index: int) -> str:
        which = bisect.bisect_right(ends, index)
        return row_place(files[which])(index - (ends[which - 1] if which else 0))

    return place


def _lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line, without its end."""
    # Read as bytes: text files are also split at characters that may stand inside a JSON string.
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, _decode(line, f"{what}: {path}:{number}", first=number == 1)
    except OSError as error:
        raise DataError(f"{what}: {path} can't be read: {error.strerror}") from error


def _decode(line: bytes, where: str, *, first: bool) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: expected UTF-8 text, found the byte 0x{line[error.start]:02x} at column {error.start + 1}; "
            "convert the file, for example with `iconv -f LATIN1 -t UTF-8`"
        ) from error
    return text.removeprefix(BYTE_ORDER_MARK) if first else text


def _object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: expected a JSON object, found {line[:60]!r}: {error}; "
            "each line must be a whole object"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _records(path: Path, delimiter: str, what: str) -> Iterator[tuple[int, list[str]]]:
    """Number of the first line of each record, and its values."""
    reader = csv.reader((line for _, line in _lines(path, what)), delimiter=delimiter, strict=True)
    while True:
        begins = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{what}: {path}:{begins}: no CSV record begins here: {error}; "
                "is a quotation mark not closed, or the file something else?"
            ) from error
        if record is None:
            return
        yield begins, record


def _check_names(names: list[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"{where}: expected columns with different names, found {twice[0]!r} twice; rename one"
        )
    if not all(name.strip() for name in names):
        raise DataError(
            f"{where}: expected a name for each column, found {names}; is the header missing?"
        )
