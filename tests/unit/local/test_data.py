"""What is missing of a recipe's data is said before anything is started."""

import json

import pytest

from offbeat.config.load import parse_recipe
from offbeat.errors import DataError
from offbeat.local.checks import Level
from offbeat.local.data import check_data_files, data_checks
from tests.harness.whole_run import write_recipe


@pytest.fixture
def check(tmp_path, recipe):
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    (tmp_path / "none.csv").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.parquet").touch()

    def call(*sources: dict) -> None:
        for source in sources:
            if "path" in source:
                source["path"] = str(tmp_path / source["path"])
        parts = [{"name": f"p{i}", "source": source} for i, source in enumerate(sources)]
        train = {"kind": "mixture", "parts": parts} if len(parts) > 1 else sources[0]
        tree = recipe.model_dump(mode="json") | {"data": {"train": train}, "evaluation": None}
        check_data_files(parse_recipe(tree, source="test"))

    return call


def test_what_is_there_passes(check):
    check(
        {"kind": "csv", "path": "rows.csv"},
        {"kind": "parquet", "path": "full"},
        {"kind": "parquet", "path": "rows.csv"},
        {"kind": "huggingface", "path": "full"},
        {"kind": "huggingface", "name": "owner/name"},
        {"kind": "python", "path": "rows.py:rows"},
        {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 1},
    )


@pytest.mark.parametrize(
    ("kind", "path", "said"),
    [
        ("jsonl", "x", "data.train.path: expected a file at .*/x, found nothing"),
        ("jsonl", "folder", "expected a file at .*/folder, found a folder"),
        ("csv", "none.csv", "none.csv is empty"),
        ("parquet", "folder", "the folder .*/folder is empty"),
        ("parquet", "x", "expected a file at .*/x, found nothing"),
        ("huggingface", "rows.csv", "expected a folder at .*, found a file"),
        ("huggingface", "x", "expected a folder at .*, found nothing"),
    ],
)
def test_what_is_not_is_named(check, kind, path, said):
    with pytest.raises(DataError, match=said):
        check({"kind": kind, "path": path})


def test_data_that_is_made_with_the_model_need_not_be_there_before(tmp_path, recipe):
    prepare = {"kind": "tldr"}
    tree = recipe.model_dump(mode="json") | {"prepare": prepare}
    tree["data"]["train"]["path"] = str(tmp_path / "none.jsonl")
    check_data_files(parse_recipe(tree, source="test"))
    with pytest.raises(DataError):
        check_data_files(parse_recipe(tree | {"prepare": {"kind": "sft"}}, source="test"))


def test_parts_of_a_mixture_are_named(check):
    with pytest.raises(DataError, match=r"data\.train\.parts\.1\.source\.path: expected a file"):
        check({"kind": "csv", "path": "rows.csv"}, {"kind": "jsonl", "path": "x"})


@pytest.mark.slow
def test_all_that_the_learner_would_make_of_the_data(tmp_path):
    recipe = write_recipe(tmp_path)
    lines = (tmp_path / "train.jsonl").read_text() + json.dumps({"prompt": "a" * 40}) + "\n"
    (tmp_path / "train.jsonl").write_text(lines)
    train, heldout, first = data_checks(recipe, ["data.shuffle=false"])
    assert (train.name, train.level) == ("data.train", Level.WARN)
    assert train.found == (
        "50 of 51 prompts used (100.0% of all issued); left out: 0 held out, 0 empty, "
        "1 longer than 24 tokens (longest: 40); each is used 0.64 times"
    )
    assert (heldout.name, heldout.level) == ("data.heldout", Level.OK)
    assert first.found == "'aa', 2 tokens, columns prompt"


def test_an_error_in_the_data_is_one_line(tmp_path):
    recipe = write_recipe(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n{broken\n')
    (check,) = data_checks(recipe, [])
    assert check.level is Level.FAIL
    assert f"data.train: {tmp_path}/train.jsonl:2: expected a JSON object" in check.found
