"""What a chart and a section of the report are, and charts over the steps. Used by `sections` and `costs`."""

from dataclasses import dataclass, field
from typing import Any

from offbeat.report import figures
from offbeat.report.figures import Line
from offbeat.report.run_data import RunData


@dataclass
class Chart:
    """A figure with its title and what to look for in it."""

    name: str
    title: str
    caption: str
    figure: Any
    legend: list[tuple[str, str]] = field(default_factory=list)
    """(label, colour) of each series."""
    wide: bool = False
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Short numbers under the title."""


@dataclass
class Section:
    """Charts under one heading."""

    name: str
    title: str
    caption: str
    charts: list[Chart]

    def __post_init__(self) -> None:
        """Two charts share a row; one that is left over gets it alone."""
        narrow = [chart for chart in self.charts if not chart.wide]
        if len(narrow) % 2:
            narrow[-1].wide = True


def steps_of(run: RunData) -> list[float]:
    """Numbers of the steps that count."""
    return [line["step"] for line in run.steps]


def line_chart(
    run: RunData, name: str, title: str, caption: str, *drawn: Line, **options: Any
) -> Chart | None:
    """A chart over the steps of those lines that have values; None when none has."""
    shown = [line for line in drawn if any(value is not None for value in line.values)]
    if not shown:
        return None
    legend = [(line.label, line.colour) for line in shown] if len(shown) > 1 else []
    return Chart(name, title, caption, figures.lines(steps_of(run), shown, **options), legend)
