"""Posts and references from docstrings: what is taken, what is not, and in which order."""

import sys
from pathlib import Path

import pytest

from offbeat.errors import DataError
from services.learner.prepare.docstrings import (
    docstrings_of,
    read_docstrings,
    split_docstring,
    whole_sentences,
)

PROSE = "The lock is taken before the file is opened. It is given back when the file is closed, or lost."
MODULE = f'''"""Open a file under a lock.

{PROSE}

:param path: the file
"""
raise RuntimeError("never imported")

class Lock:
    """A lock that one process holds.

    {PROSE.replace("file", "folder")}
    """

    def take(self):
        """Wait for the lock and take it."""
        def inner():
            """Not a place that documentation shows."""
'''


def test_docstrings_of_modules_classes_and_methods_are_found():
    assert [text.partition("\n")[0] for text in docstrings_of(MODULE)] == [
        "Open a file under a lock.",
        "A lock that one process holds.",
        "Wait for the lock and take it.",
        "Not a place that documentation shows.",
    ]
    assert not list(docstrings_of("def broken(:"))


def test_the_first_line_is_the_reference_and_the_prose_the_post():
    assert split_docstring(next(docstrings_of(MODULE))) == (PROSE, "Open a file under a lock.")


@pytest.mark.parametrize(
    "text",
    [
        "Only a first line of some words.",
        "Two words.\n\n" + PROSE,
        "A first line that has a good many words " * 3 + "\n\n" + PROSE,
        "A good first line.\n\nToo short a post.",
        "A good first line.\n\nParameters\n----------\nx : int, of which much can be said in many many words here",
        "A good first line.\n\n.. note:: " + PROSE,
        "A ``marked`` first line.\n\n" + PROSE,
        "Eine schöne erste Zeile.\n\n" + PROSE,
    ],
)
def test_what_is_no_plain_prose_is_left_out(text):
    assert split_docstring(text) is None


def test_posts_are_cut_after_whole_sentences():
    assert list(whole_sentences("One. Two: three? Four")) == [
        "One.", "One. Two:", "One. Two: three?", "One. Two: three? Four",
    ]  # fmt: skip


def _package(folder: Path, name: str, modules: dict[str, str]) -> None:
    for file, source in modules.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def test_packages_are_read_in_order_without_doubles_tests_or_imports(tmp_path, monkeypatch):
    other = MODULE.replace("lock", "pipe").replace("Lock", "Pipe")
    _package(tmp_path, "rows_b", {"__init__.py": "", "z.py": MODULE, "a.py": other})
    _package(tmp_path, "rows_a", {"__init__.py": "", "copy.py": MODULE, "tests/t.py": other})
    monkeypatch.syspath_prepend(tmp_path)
    found = read_docstrings(["rows_b", "rows_a"])
    assert [(one.package, one.reference) for one in found] == [
        ("rows_b", "Open a file under a pipe."),
        ("rows_b", "A pipe that one process holds."),
        ("rows_b", "Open a file under a lock."),
        ("rows_b", "A lock that one process holds."),
    ]
    assert found == read_docstrings(["rows_b", "rows_a"])
    assert not {"rows_a", "rows_b"} & set(sys.modules)


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(DataError, match="'no_such_package'"):
        read_docstrings(["no_such_package"])
