"""The tables of docs/results/docker.md are written from what a try measured."""

from pathlib import Path

import pytest

from tests.docker.figures import HEADS, Figure, with_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "docker.md"


def test_each_kind_of_figure_has_its_place_in_the_page() -> None:
    figures = [Figure(what, f"of {what}", 0.123, "GB") for what in HEADS]
    page = with_tables(PAGE.read_text(), figures, {"machine": "here"})
    for what, heads in HEADS.items():
        assert f"<!-- {what} -->\n| {heads[0]} | {heads[1]} |\n" in page
        assert f"| `of {what}` | 0.12 GB |\n<!-- end -->" in page
    assert "<!-- machine -->\nhere\n<!-- end -->" in page


def test_figures_are_shown_in_their_units_and_the_rest_of_the_page_stays() -> None:
    page = "a\n<!-- share -->\nold\n<!-- end -->\nb\n<!-- image -->\nkept\n<!-- end -->\n"
    figures = [Figure("share", "reward 2", 0.2, ""), Figure("share", "reward 1", 0.804, "")]
    written = with_tables(page, figures, {})
    rows = "| container | share of the groups |\n| --- | --- |\n| `reward 1` | 80% |\n| `reward 2` | 20% |"
    assert written == page.replace("old", rows)
    assert with_tables(written, figures, {}) == written


def test_a_figure_without_a_place_is_said() -> None:
    with pytest.raises(ValueError, match="<!-- image -->"):
        with_tables("nothing", [Figure("image", "learner", 1.0, "GB")], {})
