"""docs/reliability.md names tests: each is there, so that no promise rests on one that was renamed or removed."""

import re
from pathlib import Path

import pytest

from tests.harness.faulted_run import FAILPOINTS
from tests.reliability.campaign import rounds

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAME = re.compile(r"`(?P<file>[a-z0-9_/]+\.py)?(?:::(?P<test>test_\w+)(?P<more>_?…)?)?`")


def named() -> list[tuple[str, str, bool]]:
    """(file, test, whether only its beginning is given) of each name; a bare ::test is of the file before."""
    found, file = [], ""
    for row in PAGE.splitlines():
        if not row.startswith("| "):
            continue
        for match in NAME.finditer(row):
            if match["file"] or match["test"]:
                file = match["file"] or file
                found.append((file, match["test"] or "", bool(match["more"])))
    return found


def test_every_test_that_is_named_is_there():
    names = named()
    assert len(names) > 50
    for file, test, only_begins in names:
        text = (TESTS / file).read_text(encoding="utf-8")
        if test:
            assert f"def {test}{'' if only_begins else '('}" in text, (file, test)


def test_a_campaign_is_as_large_as_promised():
    counts: dict[str, int] = {}
    for part in rounds():
        for fault, count in part.counts.items():
            counts[fault.kind] = counts.get(fault.kind, 0) + count

    def total(*beginnings: str) -> int:
        return sum(n for kind, n in counts.items() if kind.startswith(beginnings))

    assert total("generator killed") >= 50
    assert total("reward worker killed") >= 50
    assert total("learner killed") >= 30
    assert total("learner killed: ") >= 10
    assert total("Redis killed") >= 10
    assert total("link to") >= 20


@pytest.mark.parametrize("point", FAILPOINTS)
def test_every_failpoint_of_the_campaign_exists(point):
    sources = [*(ROOT / "offbeat").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    assert any(f'failpoint("{point}")' in source.read_text() for source in sources)
