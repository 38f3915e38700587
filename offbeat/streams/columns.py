"""Columns of a data set <-> protobuf: what the learner sends along with a prompt, and reward functions get.

Text, whole numbers, numbers, true / false and null arrive as they were. Lists and mappings travel as JSON: tuples
arrive as lists, keys as text. Dates and times arrive as ISO 8601 text, decimals and UUIDs as text, durations as
seconds; NumPy's scalars and arrays as the Python values that they hold. Nothing else can be carried.
"""

import datetime
import decimal
import json
import uuid
from collections.abc import Mapping
from typing import Any

from offbeat.errors import DataError
from offbeat.v1 import samples_pb2 as samples

RESERVED = ("prompts", "completions", "completion_token_ids", "finish_reasons")
"""Names of arguments of reward functions, which no column may have."""
PART = "part"
"""Column that a mixture adds: the name of the row's part."""


def encode_column(name: str, value: Any) -> samples.ColumnValue:
    """A column's value as it travels. Raises `DataError` when it can't."""
    if not isinstance(value, _NATIVE):
        value = _plain(name, value)
    try:
        match value:
            case None:
                return samples.ColumnValue()
            case bool():
                return samples.ColumnValue(boolean=value)
            case int() if -(2**63) <= value < 2**63:
                return samples.ColumnValue(integer=value)
            case float():
                return samples.ColumnValue(number=value)
            case str():
                return samples.ColumnValue(text=value)
        return samples.ColumnValue(json=_json(name, value))
    except UnicodeEncodeError as error:
        raise DataError(
            f"column {name!r}: expected text, found {error.object[error.start]!r} in it, half of a surrogate pair; "
            "correct the text"
        ) from error


def decode_columns(columns: Mapping[str, samples.ColumnValue]) -> dict[str, Any]:
    """Columns as Python values: JSON is parsed, a value that is not set is None. Raises `DataError`."""
    return {name: _decode(name, value) for name, value in columns.items()}


_NATIVE = (str, int, float, dict, list, type(None))


def _plain(name: str, value: Any) -> Any:
    """A value that JSON has no form for, as one that it has. Raises `DataError`."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        # Of NumPy: a scalar gives a Python number, an array a list; dates of theirs would give nanoseconds.
        dates = getattr(value.dtype, "kind", "") in ("M", "m")
        return (value.astype(str) if dates else value).tolist()
    raise DataError(
        f"column {name!r}: a value of type {type(value).__name__} can't be carried to reward functions; "
        "leave the column out by data.columns, or make it text, a number, a list or a mapping"
    )


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(
            value, default=lambda inner: _plain(name, inner), allow_nan=False, ensure_ascii=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"column {name!r}: a nested value has no form in JSON ({error}); "
            "leave the column out by data.columns, or change the value"
        ) from error


def _decode(name: str, value: samples.ColumnValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind != "json":
        return getattr(value, kind)
    try:
        return json.loads(value.json)
    except ValueError as error:
        raise DataError(
            f"column {name!r}: expected JSON, found {value.json[:80]!r} ({error})"
        ) from error
