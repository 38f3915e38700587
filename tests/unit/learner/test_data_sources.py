"""Rows from every kind of source, and what is said about files that are not what they should be."""

import datetime
import decimal
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.config.data import DataSettings
from offbeat.errors import ConfigError, DataError
from services.learner.data.sources import load_data, load_parts

ROWS = [{"prompt": "a", "level": 1}, {"prompt": "b", "level": None}]


def _parts(source):
    settings = DataSettings.model_validate({"train": source})
    return load_parts(settings.train, settings, what="data.train")


def _rows(kind: str, path: Path, **fields):
    (part,) = _parts({"kind": kind, "path": str(path), **fields})
    return part.rows


def _refused(said: str, kind: str, path: Path, **fields) -> None:
    with pytest.raises(DataError, match=said):
        _rows(kind, path, **fields)


# --- JSON lines ------------------------------------------------------------------------------------------------------


def test_jsonl_rows_and_their_places(tmp_path):
    file = tmp_path / "rows.jsonl"
    # A separator of lines for Unicode, but not for JSON; a byte-order mark; lines that end as on Windows.
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}\r\n'.encode())
    rows = _rows("jsonl", file)
    assert rows.rows == [{"prompt": "a\u2028b"}, {"prompt": "c"}]
    assert [rows.place(i) for i in range(2)] == [f"{file}:1", f"{file}:3"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n\n[1]\n', r"rows\.x:3: expected a JSON object, found list"),
        (b'{"prompt": "a"}\n{broken\n', r"rows\.x:2: expected a JSON object, found '\{broken"),
        (
            b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n',
            r"rows\.x:2: expected UTF-8 text, found the byte 0xe9 at column 16; convert",
        ),
        (
            '{"prompt": "a"}'.encode("utf-16"),
            r"rows\.x:1: expected UTF-8 text, found the byte 0xff",
        ),
        (b"[" * 100_000, r"rows\.x:1: expected a JSON object"),
        (b"", r"expected rows, found none in .*rows\.x; is it empty\?"),
        (b"\n \n", r"expected rows, found none"),
    ],
    ids=["list", "broken", "latin-1", "utf-16", "deep", "empty", "blank"],
)
def test_jsonl_errors_name_file_and_line(tmp_path, content, said):
    (tmp_path / "rows.x").write_bytes(content)
    _refused(f"data.train: .*{said}", "jsonl", tmp_path / "rows.x")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_missing_file(tmp_path, kind):
    _refused(r"none\.x.*No such file", kind, tmp_path / "none.x")


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_csv_values_are_text_and_may_span_lines(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('\ufeffprompt;answer\n"a\nb";1\n\n"say ""hi""";\n')
    rows = _rows("csv", file, delimiter=";")
    assert rows.rows == [
        {"prompt": "a\nb", "answer": "1"},
        {"prompt": 'say "hi"', "answer": ""},
    ]
    assert [rows.place(i) for i in range(2)] == [f"{file}:2", f"{file}:5"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b,a\n1,2,3\n", r":1: expected columns with different names, found 'a' twice"),
        (b"a,,c\n1,2,3\n", r":1: expected a name for each column"),
        (b'a,b\n1,2\n"x\ny",2,3\n', r":3: expected 2 values, one for each of a, b, found 3"),
        (b"a,b\n1\n", r":2: expected 2 values, one for each of a, b, found 1"),
        (b'a,b\n1,2\n"open,3\n4,5\n', r":3: no CSV record begins here: unexpected end of data"),
        (b'a,b\n1,"2"x\n', r":2: no CSV record begins here"),
        (b"a,b\n1,caf\xe9\n", r":2: expected UTF-8 text, found the byte 0xe9"),
        (b"a,b\n", r"expected rows, found none"),
        (b"", r"expected rows, found none"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:24],
)
def test_csv_errors_name_file_and_line(tmp_path, content, said):
    (tmp_path / "rows.csv").write_bytes(content)
    _refused(said, "csv", tmp_path / "rows.csv")


# --- Parquet ---------------------------------------------------------------------------------------------------------


def test_parquet_rows_have_python_values(tmp_path):
    file = tmp_path / "rows.parquet"
    row = {
        "prompt": "a",
        "day": datetime.date(2026, 1, 2),
        "cost": decimal.Decimal("1.10"),
        "turns": [{"role": "user", "content": "x"}],
        "scores": [0.5, None],
        "level": None,
    }
    pq.write_table(pa.Table.from_pylist([row]), file)
    assert _rows("parquet", file).rows == [row]


def test_parquet_files_of_a_folder_come_in_the_order_of_their_names(tmp_path):
    for name, rows in (("b", ROWS[:1]), ("a", ROWS)):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    rows = _rows("parquet", tmp_path)
    assert [row["prompt"] for row in rows] == ["a", "b", "a"]
    assert rows.place(1) == f"{tmp_path}/a.parquet, row 1 (from 0)"
    assert rows.place(2) == f"{tmp_path}/b.parquet, row 0 (from 0)"


def test_parquet_errors(tmp_path):
    _refused("expected .*parquet files in the folder, found none", "parquet", tmp_path)
    file = tmp_path / "rows.parquet"
    file.write_text("prompt\na\n")
    _refused(r"rows\.parquet: can't be read as Parquet", "parquet", file)
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), file)
    _refused(
        r"rows\.parquet: expected columns with different names, found 'a' twice", "parquet", file
    )
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), file)
    _refused("expected rows, found none", "parquet", file)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Data sets in the forms that `datasets` knows, and a cache of its own for what it builds from them."""
    import datasets

    folder = tmp_path_factory.mktemp("hub")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(folder / "one")
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(folder / "splits")
    repository = folder / "repository"
    (repository / "data").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[1:])):
        pq.write_table(
            pa.Table.from_pylist(rows), repository / "data" / f"{split}-00000-of-00001.parquet"
        )
    (repository / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: main, default: true, data_files: [{split: train, path: data/train-*}, "
        "{split: test, path: data/test-*}]}\n"
        "- {config_name: other, data_files: [{split: train, path: data/test-*}]}\n---\n"
    )
    (folder / "broken").mkdir()
    (folder / "broken" / "train.jsonl").write_text('{"prompt": "a"}\n{broken\n')
    (folder / "empty").mkdir()
    (folder / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("one", {}, ROWS),
        ("splits", {}, ROWS),
        ("splits", {"split": "test"}, ROWS[1:]),
        ("repository", {}, ROWS),
        ("repository", {"split": "test"}, ROWS[1:]),
        ("repository", {"split": "train[:1]"}, ROWS[:1]),
        ("repository", {"config": "other"}, ROWS[1:]),
    ],
    ids=lambda value: str(value) if isinstance(value, str | dict) else "",
)
def test_local_data_set_folders(hub, name, fields, expected):
    rows = _rows("huggingface", hub / name, **fields)
    assert rows.rows == expected
    assert rows.place(0) == " ".join([str(hub / name), *fields.values()]) + ", row 0 (from 0)"


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("none", {}, "expected a data-set folder at .*none, found nothing"),
        ("file", {}, "expected a data-set folder at .*file, found a file"),
        ("empty", {}, "empty can't be loaded: .*doesn't contain any data files"),
        ("broken", {}, "broken can't be read: JSON parse error: .* in row 1"),
        ("repository", {"split": "dev"}, r"Unknown split \"dev\". Should be one of \['train', 't"),
        ("repository", {"config": "x"}, r"BuilderConfig 'x' not found. Available: \['main', 'o"),
        ("splits", {"split": "dev"}, "expected one of test, train, found 'dev'"),
        ("splits", {"config": "x"}, "data.train.config: not used"),
        ("one", {"split": "train"}, "data set without splits; remove it"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_local_folders_that_do_not_fit(hub, name, fields, said):
    _refused(said, "huggingface", hub / name, **fields)


def test_a_hub_that_may_not_be_asked_is_said_to_be_so(monkeypatch):
    """Tests run with HF_HUB_OFFLINE=1; the package has read it at its import."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError) as caught:
        _parts({"kind": "huggingface", "name": "offbeat-tests/nothing"})
    assert "data.train: Couldn't reach 'offbeat-tests/nothing' on the Hub" in str(caught.value)
    assert "HF_HUB_OFFLINE=1 forbids downloads" in str(caught.value)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(DataError, match="is there a connection to the hub"):
        _parts({"kind": "huggingface", "name": "offbeat-tests/nothing"})


def test_a_hub_name_that_is_a_folder_here_is_not_taken_for_it(hub, monkeypatch):
    monkeypatch.chdir(hub)
    with pytest.raises(DataError, match="repository is also a local folder here"):
        _parts({"kind": "huggingface", "name": "repository"})


# --- your function, mixtures -----------------------------------------------------------------------------------------


def test_rows_from_a_callable(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(
        "def rows(n):\n    return [{'prompt': str(i)} for i in range(n)]\n"
        "def number():\n    return 3\n"
        "def keys():\n    return [{'a': 1}, {2: 3}]\n"
        "def fails():\n    raise KeyError('token')\n"
    )
    (part,) = _parts({"kind": "python", "path": f"{code}:rows", "params": {"n": 3}})
    assert [row["prompt"] for row in part.rows] == ["0", "1", "2"]
    for name, said in (
        ("number", "must return a list of dicts .*, found int"),
        ("keys", "list of dicts with text as keys, found '{2: 3}' at index 1"),
        ("fails", "raised KeyError: 'token'"),
    ):
        with pytest.raises(DataError, match=said):
            _parts({"kind": "python", "path": f"{code}:{name}"})
    with pytest.raises(ConfigError, match=r"data.train.path: .* has no 'nothing'"):
        _parts({"kind": "python", "path": f"{code}:nothing"})


def test_parts_of_a_mixture_have_their_own_prompts(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    source = {"kind": "csv", "path": str(tmp_path / "rows.csv")}
    mixture = {
        "kind": "mixture",
        "parts": [
            {"name": "one", "source": source, "weight": 3},
            {"name": "two", "source": source, "weight": 1, "prompt": "say {prompt}"},
        ],
    }
    one, two = _parts(mixture)
    assert (one.name, one.prompt, one.weight) == ("one", "{prompt}", 3)
    assert (two.name, two.prompt, two.rows.what) == (
        "two",
        "say {prompt}",
        "data.train.parts.1 (two)",
    )
    mixture["parts"][1]["source"] = {**source, "path": str(tmp_path / "none.csv")}
    with pytest.raises(DataError, match=re.escape("data.train.parts.1 (two): ")):
        _parts(mixture)


def test_both_splits_are_loaded(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    source = {"kind": "csv", "path": str(tmp_path / "rows.csv")}
    raw = load_data(DataSettings.model_validate({"train": source, "heldout": source}))
    assert [part.rows.what for part in raw.train + raw.heldout] == ["data.train", "data.heldout"]
    assert load_data(DataSettings.model_validate({"train": source})).heldout == []
