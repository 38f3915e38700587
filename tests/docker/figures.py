"""Figures that a try gives beside its outcome: sizes of images, times of starts, shares of the work.

OFFBEAT_DOCKER_FIGURES   file that gets a JSON object a line; default: nothing is kept
OFFBEAT_DOCKER_PAGE      page whose tables get the figures of a try that passed; `make test-docker` names
                         docs/results/docker.md
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HEADS = {
    "image": ("image", "size, CPU build"),
    "cold start": ("container", "healthy after"),
    "share": ("container", "share of the groups"),
    "back after a kill": ("container", "healthy again after"),
}
"""Column heads of the table of each kind of figure."""


@dataclass(frozen=True)
class Figure:
    """One figure; `unit` is "GB", "s", or "" for a share of 1."""

    what: str
    name: str
    value: float
    unit: str


_kept: list[Figure] = []


def keep(what: str, name: str, value: float, unit: str) -> None:
    """Keeps one figure, such as ``keep("image", "learner", 1.9, "GB")``."""
    _kept.append(Figure(what, name, value, unit))
    path = os.environ.get("OFFBEAT_DOCKER_FIGURES")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(_kept[-1])) + "\n")


def write_page() -> None:
    """Writes what was kept into the page, if one is named."""
    path = os.environ.get("OFFBEAT_DOCKER_PAGE")
    if path and _kept:
        load = ", ".join(f"{each:.0f}" for each in os.getloadavg())
        where = (
            f"{time.strftime('%Y-%m-%d')} · {os.cpu_count()} cores, load averages at the end {load}"
        )
        page = Path(path)
        page.write_text(with_tables(page.read_text(), _kept, {"machine": where}))


def with_tables(page: str, figures: Sequence[Figure], lines: Mapping[str, str]) -> str:
    """The page with its marked parts replaced; parts of which there is nothing new stay as they are.

    A part stands between ``<!-- KIND -->`` and ``<!-- end -->``.

    Raises:
        ValueError: a kind has no part in the page.
    """
    kinds = dict.fromkeys(figure.what for figure in figures)
    parts = {**lines, **{what: table([f for f in figures if f.what == what]) for what in kinds}}
    for name, text in parts.items():
        part = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not part.search(page):
            raise ValueError(f"expected a part `<!-- {name} -->` … `<!-- end -->` in the page")
        page = part.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)  # type: ignore[misc]
    return page


def table(figures: Sequence[Figure]) -> str:
    """A Markdown table of figures of one kind; of two with one name the later counts."""
    latest = {figure.name: figure for figure in figures}
    rows = [HEADS[figures[0].what], ("---", "---")]
    rows += [(f"`{name}`", _shown(latest[name])) for name in sorted(latest)]
    return "\n".join(f"| {left} | {right} |" for left, right in rows)


def _shown(figure: Figure) -> str:
    if figure.unit == "":
        return f"{figure.value:.0%}"
    return f"{figure.value:.2f} GB" if figure.unit == "GB" else f"{figure.value:.0f} s"
