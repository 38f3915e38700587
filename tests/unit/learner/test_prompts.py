"""Prompts: deterministic order, columns, and clear errors."""

import json
from collections import Counter

import pytest

from offbeat.config.data import DataSettings, JsonlSource, PythonSource
from offbeat.errors import DataError
from services.learner.data.prompts import PromptMaker, PromptOrder, encode_column, usable
from services.learner.data.sources import load_rows, load_train
from services.learner.tasks import TaskMaker, seeds_of


class Words:
    """A tokenizer that makes a token of each word; enough for what prompts need of one."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": list(range(len(text.split())))}


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_is_a_permutation(shuffle):
    order = PromptOrder(7, seed=3, shuffle=shuffle)
    epochs = [[order.row(epoch * 7 + place) for place in range(7)] for epoch in range(3)]
    assert all(Counter(epoch) == Counter(range(7)) for epoch in epochs)
    assert (epochs[0] != epochs[1]) == shuffle


def test_order_depends_on_the_ordinal_alone():
    forward, backward = PromptOrder(5, seed=1, shuffle=True), PromptOrder(5, seed=1, shuffle=True)
    rows = [forward.row(ordinal) for ordinal in range(20)]
    assert [backward.row(ordinal) for ordinal in reversed(range(20))] == rows[::-1]


def test_seeds_do_not_depend_on_the_attempt(recipe):
    maker = TaskMaker(
        recipe, usable([{"question": "a"}], PromptMaker(recipe.data, Words()), limit=5, what="x")
    )
    first = maker.make(7, attempt=0, term=1, min_version=1)
    again = maker.make(7, attempt=3, term=2, min_version=4)
    assert list(first.seeds) == list(again.seeds) == seeds_of(0, 7, 4)
    assert len({seed for ordinal in range(100) for seed in seeds_of(0, ordinal, 4)}) == 400


def test_exact_mode_names_the_only_version(recipe):
    prompts = usable([{"question": "a"}], PromptMaker(recipe.data, Words()), limit=5, what="x")
    exact = recipe.model_copy(
        update={"schedule": recipe.schedule.model_copy(update={"lag_mode": "exact"})}
    )
    assert TaskMaker(exact, prompts).make(0, attempt=0, term=1, min_version=4).max_version == 4
    assert TaskMaker(recipe, prompts).make(0, attempt=0, term=1, min_version=4).max_version == 0


def test_a_missing_column_is_named(recipe):
    with pytest.raises(DataError, match=r"needs the column 'question'; the row has: answer"):
        PromptMaker(recipe.data, Words()).make({"answer": "1"})


def test_long_prompts_are_dropped_and_counted(recipe, caplog):
    rows = [{"question": "a b c d"}, {"question": "a"}]
    kept = usable(rows, PromptMaker(recipe.data, Words()), limit=3, what="data.train")
    assert [prompt.text for prompt in kept] == ["a"]
    assert "1 of 2 prompts dropped" in caplog.text
    with pytest.raises(DataError, match="none of 1 prompts"):
        usable(rows[:1], PromptMaker(recipe.data, Words()), limit=3, what="data.train")


def test_columns_keep_their_types():
    values = {"a": "x", "b": 3, "c": 0.5, "d": True, "e": {"k": [1]}, "f": None, "g": 2**70}
    encoded = {name: encode_column(value).WhichOneof("value") for name, value in values.items()}
    assert encoded == {
        "a": "text", "b": "integer", "c": "number", "d": "boolean", "e": "json", "f": None, "g": "json",
    }  # fmt: skip


def test_jsonl_errors_name_file_and_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n\n[1]\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:3: expected a JSON object, found list"):
        load_rows(JsonlSource(kind="jsonl", path=str(file)), what="data.train")
    file.write_text(json.dumps({"prompt": "a"}) + "\n{broken\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        load_rows(JsonlSource(kind="jsonl", path=str(file)), what="data.train")


def test_rows_from_a_callable(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(
        "def rows(n):\n    return [{'prompt': str(i)} for i in range(n)]\n\ndef wrong():\n    return 3\n"
    )
    assert (
        len(load_rows(PythonSource(kind="python", path=f"{code}:rows", params={"n": 3}), what="x"))
        == 3
    )
    with pytest.raises(DataError, match="must return a list of dicts"):
        load_rows(PythonSource(kind="python", path=f"{code}:wrong"), what="x")


def test_training_rows_leave_out_held_out_prompts(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(5)))
    data = DataSettings.model_validate({"train": {"kind": "jsonl", "path": str(file)}})
    rows = load_train(data, PromptMaker(data, Words()), {"1", "3"})
    assert [row["prompt"] for row in rows] == ["0", "2", "4"]
