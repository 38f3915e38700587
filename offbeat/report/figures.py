"""Figures of the report, drawn by Bokeh. Used by `sections`.

All colours are those of the light theme, each hexadecimal value for one purpose alone: the page's script replaces them
by the dark theme's before it draws. So a figure is stored once, and a reader may switch at any time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    DatetimeTickFormatter,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure

COLOURS = {
    # purpose: (light, dark)
    "ink": ("#1d2127", "#eceef2"),
    "muted": ("#676e79", "#9aa1ad"),
    "grid": ("#e9ebef", "#2a2e36"),
    "surface": ("#ffffff", "#171a20"),
    "indigo": ("#4f5bd5", "#8d97ff"),
    "teal": ("#0d9384", "#3fd0bd"),
    "amber": ("#d98206", "#f6b445"),
    "rose": ("#d6336c", "#ff7aa5"),
    "violet": ("#8a4fd3", "#bd93f9"),
    "sky": ("#1f8fd6", "#6cc1f7"),
    "lime": ("#6a9f1b", "#a9d65c"),
    "slate": ("#8b93a1", "#7d8594"),
    "quiet": ("#dfe2e8", "#333944"),
    "mist": ("#b9c0cc", "#4d5563"),
}
LIGHT = {name: pair[0] for name, pair in COLOURS.items()}
CYCLE = ("indigo", "teal", "amber", "rose", "violet", "sky", "lime", "slate")
FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
MOST_POINTS = 1500
"""Of a line; more of them can't be seen."""
HEIGHT = 230


@dataclass(frozen=True)
class Line:
    """A line over the steps. None and values that are not finite are gaps."""

    label: str
    values: Sequence[float | None]
    colour: str
    smooth: bool = False
    """Draws the values faintly, and a moving average over them."""
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    """Bounds of a band around the line."""
    dots: bool = False
    dash: str = "solid"


def lines(
    x: Sequence[float],
    drawn: Sequence[Line],
    *,
    log: bool = False,
    form: str = "0.[000]",
    bound: float | None = None,
    from_zero: bool = False,
    height: int = HEIGHT,
) -> Any:
    """Lines over the steps; one tooltip names all their values at a step. `bound`: a dashed horizontal line."""
    keep = thinned(len(x))
    source = ColumnDataSource({"x": [x[place] for place in keep]})
    plot = _figure(log=log, height=height)
    for number, line in enumerate(drawn):
        source.data[f"y{number}"] = _values(line.values, keep, log=log)
    first = None
    for number, line in enumerate(drawn):
        colour = LIGHT[line.colour]
        if line.low:
            source.data[f"low{number}"] = _values(line.low, keep, log=log)
            source.data[f"high{number}"] = _values(line.high, keep, log=log)
            plot.varea(
                "x",
                f"low{number}",
                f"high{number}",
                source=source,
                fill_color=colour,
                fill_alpha=0.14,
            )
        style: dict[str, Any] = {"line_color": colour, "line_dash": line.dash}
        if line.smooth and len(keep) > 20:
            source.data[f"smooth{number}"] = moving_average(source.data[f"y{number}"])
            plot.line("x", f"smooth{number}", source=source, line_width=2.2, **style)
            style |= {"line_alpha": 0.32, "line_width": 1.1}
        else:
            style |= {"line_width": 2}
        drawn_line = plot.line("x", f"y{number}", source=source, **style)
        if line.dots or is_sparse(source.data[f"y{number}"]):
            size = 6 if len(keep) < 60 else 3.5
            drawn_line = plot.scatter("x", f"y{number}", source=source, size=size, color=colour)
        first = first or drawn_line
    if bound is not None:
        plot.add_layout(
            Span(
                location=bound,
                dimension="width",
                line_color=LIGHT["rose"],
                line_dash="dashed",
                line_width=1.2,
            )
        )
    if "e" in form and not log:
        plot.yaxis.formatter = PrintfTickFormatter(format="%.1e")
    elif form.endswith("%"):
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]%")
    if from_zero and not log:
        plot.y_range.start = 0
    tips = [
        ("step", "@x{0,0}"),
        *((line.label, f"@y{n}{{{form}}}") for n, line in enumerate(drawn)),
    ]
    _add_hover(plot, [first] if first else [], tips, mode="vline")
    return plot


def stack(
    x: Sequence[float],
    parts: Mapping[str, tuple[Sequence[float | None], str]],
    *,
    form: str = "0.[000]",
    unit: str = "s",
    height: int = HEIGHT,
) -> Any:
    """Bars over the steps, stacked: label -> (values, colour)."""
    keep = thinned(len(x), limit=400)
    data = {"x": [x[place] for place in keep]}
    for number, (values, _) in enumerate(parts.values()):
        data[f"y{number}"] = [values[place] or 0.0 for place in keep]
    source = ColumnDataSource(data)
    plot = _figure(height=height)
    width = min((b - a for a, b in zip(data["x"], data["x"][1:], strict=False)), default=1.0) or 1.0
    columns = [f"y{number}" for number in range(len(parts))]
    colours = [LIGHT[colour] for _, colour in parts.values()]
    bars = plot.vbar_stack(
        columns, x="x", width=width * 0.92, source=source, color=colours, line_width=0
    )
    plot.y_range.start = 0
    tips = [
        ("step", "@x{0,0}"),
        *((label, f"@y{n}{{{form}}} {unit}") for n, label in enumerate(parts)),
    ]
    _add_hover(plot, bars[-1:], tips, mode="vline")
    return plot


def bars(
    labels: Sequence[str], values: Sequence[float], colour: str, *, tip: str, height: int = HEIGHT
) -> Any:
    """One bar for each label, its value and its share written in the tooltip."""
    total = sum(values) or 1.0
    source = ColumnDataSource(
        {"x": list(labels), "y": list(values), "share": [value / total for value in values]}
    )
    plot = _figure(height=height, x_range=FactorRange(*labels))
    drawn = plot.vbar(
        "x", width=0.45, top="y", source=source, fill_color=LIGHT[colour], line_width=0
    )
    plot.y_range.start = 0
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    _add_hover(plot, [drawn], [(tip, "@x"), ("groups", "@y{0,0}"), ("share", "@share{0.0%}")])
    return plot


def timeline(lanes: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]]) -> Any:
    """Who did what when: lane -> (start, end, state, colour), in seconds since the start. The first lane is on top."""
    names = [name for name, _ in lanes]
    keys = ("lane", "left", "right", "state", "color", "seconds", "at")
    columns: dict[str, list[Any]] = {key: [] for key in keys}
    for name, intervals in lanes:
        for start, end, state, colour in intervals:
            at = f"{int(start) // 60}:{start % 60:04.1f}"
            left, right = round(start * 1000), round(end * 1000)
            values = (name, left, right, state, LIGHT[colour], round(end - start, 3), at)
            for key, value in zip(keys, values, strict=True):
                columns[key].append(value)
    end = max((end for _, intervals in lanes for _, end, *_ in intervals), default=1.0)
    plot = _figure(
        height=70 + 44 * max(1, len(lanes)),
        y_range=FactorRange(*reversed(names)),
        x_range=Range1d(0, end * 1000, bounds=(0, end * 1000)),
        x_axis_type="datetime",
        tools="xpan,xwheel_zoom,xbox_zoom,reset",
    )
    plot.toolbar_location = "above"
    plot.toolbar.logo = None
    source = ColumnDataSource(columns)
    drawn = plot.hbar(
        "lane",
        left="left",
        right="right",
        height=0.72,
        source=source,
        fill_color="color",
        line_width=0,
    )
    plot.xaxis.formatter = DatetimeTickFormatter(
        milliseconds="%M:%S.%3N",
        seconds="%M:%S",
        minsec="%M:%S",
        minutes="%M:%S",
        hourmin="%H:%M:%S",
        hours="%H:%M",
        days="%H:%M",
    )
    plot.ygrid.visible = False
    plot.yaxis.major_label_text_color = LIGHT["ink"]
    tips = [
        ("", "@lane"),
        ("", "@state"),
        ("lasted", "@seconds{0.00} s"),
        ("at", "@at"),
    ]
    _add_hover(plot, [drawn], tips)
    return plot


# --- helpers


def thinned(count: int, *, limit: int = MOST_POINTS) -> list[int]:
    """Places of at most about `limit` of `count` values, evenly spread, the last one among them."""
    stride = max(1, -(-count // limit))
    places = list(range(0, count, stride))
    if count and places[-1] != count - 1:
        places.append(count - 1)
    return places


def is_sparse(values: Sequence[float]) -> bool:
    """Whether so many values are missing that a line alone would hide the others."""
    return len(values) < 3 or sum(map(math.isnan, values)) > len(values) / 5


def moving_average(values: Sequence[float], *, weight: float = 0.9) -> list[float]:
    """An exponential moving average that starts without a bias to 0; gaps stay gaps."""
    result, total, mass = [], 0.0, 0.0
    for value in values:
        if math.isnan(value):
            result.append(value)
            continue
        total, mass = weight * total + value, weight * mass + 1.0
        result.append(total / mass)
    return result


def _values(values: Sequence[float | None], keep: Sequence[int], *, log: bool) -> list[float]:
    chosen = [values[place] if place < len(values) else None for place in keep]
    return [
        math.nan
        if value is None or not math.isfinite(value) or (log and value <= 0)
        else float(value)
        for value in chosen
    ]


def _figure(
    *,
    log: bool = False,
    height: int = HEIGHT,
    tools: str = "",
    x_axis_type: str = "auto",
    **ranges: Any,
) -> Any:
    """An empty plot in the page's style."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        toolbar_location=None,
        x_axis_type=x_axis_type,
        y_axis_type="log" if log else "auto",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
        min_border_left=44,
        min_border_right=8,
        min_border_top=8,
        **ranges,
    )
    for axis in plot.axis:
        axis.axis_line_color = None
        axis.major_tick_line_color = None
        axis.minor_tick_line_color = None
        axis.major_label_text_color = LIGHT["muted"]
        axis.major_label_text_font = FONT
        axis.major_label_text_font_size = "11px"
    plot.grid.grid_line_color = LIGHT["grid"]
    plot.xgrid.visible = False
    if not log and not isinstance(plot.y_range, FactorRange):
        plot.yaxis.ticker = BasicTicker(desired_num_ticks=5)
    return plot


def _add_hover(
    plot: Any, renderers: Sequence[Any], tips: Sequence[tuple[str, str]], *, mode: str = "mouse"
) -> None:
    if not renderers:
        return
    rows = "".join(
        f"<div style='display:flex;gap:14px;justify-content:space-between'>"
        f"<span style='opacity:.65'>{escape(label)}</span><b style='font-weight:600'>{value}</b></div>"
        for label, value in tips
    )
    html = f'<div style="font:12px/1.5 {FONT.replace(chr(39), "")};min-width:110px">{rows}</div>'
    plot.add_tools(
        HoverTool(renderers=list(renderers), tooltips=html, mode=mode, point_policy="snap_to_data")
    )
