"""A user's code is found by its path; what is wrong with the path or the code is one clear error."""

import sys

import pytest

from offbeat.errors import ConfigError
from offbeat.imports import load_callable, load_object

KEY = "reward.functions.0.path"


def test_module_and_dotted_name():
    assert load_object("math:pi", key=KEY) > 3
    assert load_callable("pathlib:Path.exists", key=KEY)


def test_file_is_loaded_once(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n")
    assert load_object(f"{file}:A", key=KEY)().x == 1
    assert load_object(f"{file}:A", key=KEY) is load_object(f"{file}:A", key=KEY)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_colon", ["module:name", "no_colon"]),
        (":name", ["module:name"]),
        ("math:", ["module:name"]),
        ("nowhere_at_all:f", ["no module 'nowhere_at_all'", "PYTHONPATH"]),
        ("os.nowhere:f", ["no module 'os.nowhere'"]),
        ("math:nothing", ["no 'nothing'", "after the colon"]),
        ("/nowhere/mine.py:f", ["no file /nowhere/mine.py"]),
    ],
)
def test_bad_paths(path, words):
    with pytest.raises(ConfigError) as raised:
        load_object(path, key=KEY)
    for word in [KEY, *words]:
        assert word in str(raised.value)


@pytest.mark.parametrize("body", ["1/0", "def f(:", "import nowhere_at_all"])
def test_file_that_fails_is_not_kept(tmp_path, body):
    file = tmp_path / "broken.py"
    file.write_text(body)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=r"broken\.py failed|no module"):
        load_object(f"{file}:f", key=KEY)
    assert not [name for name in set(sys.modules) - before if "broken" in name]
    file.write_text("def f(): return 1")
    assert load_object(f"{file}:f", key=KEY)() == 1


def test_something_that_cannot_be_called():
    with pytest.raises(ConfigError, match="expected a function or a class at math:pi, found float"):
        load_callable("math:pi", key=KEY)
