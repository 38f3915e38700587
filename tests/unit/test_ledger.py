"""The ledger fences a learner that was overtaken, and remembers numbers that no checkpoint does."""

from pathlib import Path

import pytest

from offbeat.errors import Fenced
from offbeat.ledger import Ledger, newest_numbers


def test_an_older_term_writes_nothing_once_a_newer_one_has_begun(tmp_path: Path) -> None:
    old = Ledger(tmp_path, 3)
    old.write("start", term=3)
    before = (tmp_path / "ledger" / "000003.jsonl").read_bytes()
    new = Ledger(tmp_path, 5)
    for change in (old.check, lambda: old.write("step", step=1)):
        with pytest.raises(Fenced, match="term 5 began after this one"):
            change()
    new.write("start", term=5)
    assert (tmp_path / "ledger" / "000003.jsonl").read_bytes() == before


def test_numbers_of_learners_that_left_no_checkpoint_are_known(tmp_path: Path) -> None:
    assert newest_numbers(tmp_path) == (0, 0)
    first, second = Ledger(tmp_path, 1), None
    first.write("publish", version=4, parent=0, step=0)
    first.write("publish", version=9, parent=4, step=1)
    second = Ledger(tmp_path, 12)
    second.write("start", term=12)
    assert newest_numbers(tmp_path) == (12, 9)
