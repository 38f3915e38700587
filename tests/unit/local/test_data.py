"""What is missing of a recipe's data is said before anything is started."""

import pytest

from offbeat.config.load import parse_recipe
from offbeat.errors import DataError
from offbeat.local.data import check_data_files


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


def test_parts_of_a_mixture_are_named(check):
    with pytest.raises(DataError, match=r"data\.train\.parts\.1\.source\.path: expected a file"):
        check({"kind": "csv", "path": "rows.csv"}, {"kind": "jsonl", "path": "x"})
