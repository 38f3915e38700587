"""Columns arrive at the reward functions as they left the data set, or in the form that the docs promise."""

import datetime
import decimal
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import DataError
from offbeat.streams.columns import decode_columns, encode_column
from offbeat.v1 import samples_pb2 as samples

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT
)
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


def _arrives(value: object) -> object:
    task = samples.PromptTask(columns={"x": encode_column("x", value)})
    return decode_columns(samples.PromptTask.FromString(task.SerializeToString()).columns)["x"]


@settings(deadline=None, max_examples=80)
@given(NESTED)
def test_what_json_can_hold_arrives_as_it_was(value):
    arrived = _arrives(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_columns_keep_their_types():
    values = {"a": "x", "b": 3, "c": 0.5, "d": True, "e": {"k": [1]}, "f": None, "g": 2**70}
    encoded = {name: encode_column(name, v).WhichOneof("value") for name, v in values.items()}
    assert encoded == {
        "a": "text", "b": "integer", "c": "number", "d": "boolean", "e": "json", "f": None, "g": "json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.date(2026, 2, 3), "2026-02-03"),
        (datetime.datetime(2026, 2, 3, 4, 5, tzinfo=datetime.UTC), "2026-02-03T04:05:00+00:00"),
        (datetime.time(4, 5), "04:05:00"),
        (datetime.timedelta(minutes=1.5), 90.0),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ((1, "a"), [1, "a"]),
        ({"when": [datetime.date(2026, 2, 3)]}, {"when": ["2026-02-03"]}),
        (np.int64(3), 3),
        (np.uint64(2**63), 2**63),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2]]), [[1, 2]]),
        ({"scores": np.array([0.5])}, {"scores": [0.5]}),
        (np.datetime64("2026-02-03T04:05:00", "ns"), "2026-02-03T04:05:00.000000000"),
        (np.array(["2026-02-03"], dtype="datetime64[D]"), ["2026-02-03"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_take_the_form_that_is_promised(value, expected):
    arrived = _arrives(value)
    assert arrived == expected
    assert type(arrived) is type(expected)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"\x89PNG", "a value of type bytes can't be carried"),
        ({"image": [b"x"]}, "a value of type bytes"),
        ({1, 2}, "a value of type set"),
        ([float("nan")], "no form in JSON"),
        ({(1, 2): 3}, "no form in JSON"),
        ("\ud800", "half of a surrogate pair"),
        (["\ud800"], "half of a surrogate pair"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_cannot_be_carried_is_named(value, said):
    with pytest.raises(DataError, match=f"column 'photo': .*{said}"):
        encode_column("photo", value)
