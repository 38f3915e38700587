"""docs/results/weights.md: the cells as tables, and a model of larger models made of their rates."""

from collections.abc import Iterable

from benchmarks.suite.cells import Cell, Row
from benchmarks.suite.table import number

NOTES = "docs/results/weights_notes.md"
TITLES = {
    "steps": "Real steps: how much changes",
    "transfer": "One publisher, one receiver",
    "fan-out": "Many receivers of a synthetic 135M step",
    "pause": "The generator's pause",
}
MODELS = {"8B": 16.06e9, "70B": 141.1e9}
LINKS = {"10 Gb/s": 1.25e9, "25 Gb/s": 3.125e9, "100 Gb/s": 12.5e9}


def page(cells: Iterable[Cell]) -> str:
    """The whole page."""
    by_kind: dict[str, list[Cell]] = {}
    for cell in cells:
        by_kind.setdefault(cell.letter, []).append(cell)
    parts = [
        f"<!-- Written by `python -m benchmarks.weights`; what it means stands in {NOTES.rpartition('/')[2]}. -->",
        "# The weight path beside raw TCP and the engine's own load\n",
        "What it means: [weights_notes.md](weights_notes.md). Medians of the rounds, which alternate between the "
        "things compared; behind them the smallest and the largest. Ratios (×) are of the same rounds, and alone "
        "comparable between sittings: the machine was shared. The load stands beside each cell.\n",
    ]
    for kind, title in TITLES.items():
        if kind not in by_kind:
            continue
        parts += [
            f"## {title}\n",
            "| cell | what | median | smallest … largest | rounds | target |",
        ]
        parts.append("|---|---|---:|---|---:|---|")
        parts += [_line(cell, row) for cell in by_kind[kind] for row in cell.rows]
        parts.append("\n" + " ".join(_circumstances(cell) for cell in by_kind[kind]) + "\n")
    parts += _model({row.name: row for c in by_kind.get("transfer", []) for row in c.rows})
    return "\n".join(parts) + "\n"


def _line(cell: Cell, row: Row) -> str:
    spread = f"{number(min(row.values))} … {number(max(row.values))}" if row.values[1:] else ""
    target = ""
    if row.target is not None:
        target = f"{row.target[0]} {row.target[1]:g}: {'**met**' if row.met else 'not met'}"
    what = row.name + (f" ({row.note})" if row.note else "")
    figure = f"{number(row.median)} {row.unit}".replace(" x", " ×")
    return f"| {cell.name} | {what} | {figure} | {spread} | {len(row.values)} | {target} |"


def _circumstances(cell: Cell) -> str:
    c = cell.circumstances
    return (
        f"*{cell.name}: commit {c['commit']}, {c['date']}, load {c['load']} to {c.get('load_at_end', '?')} on "
        f"{len(c['cores'])} cores, {cell.seconds:.0f} s.*"
    )


def _model(rows: dict[str, Row]) -> list[str]:
    """Seconds per step for larger models, computed from the rates of the last transfer cell; nothing is measured."""
    names = {
        "delta up": "delta up, hashes included, CPU of both ends",
        "delta down": "delta down, CPU of both ends",
        "share": "a step's delta",
    }
    if not set(names.values()) <= rows.keys():
        return []
    up, down = rows[names["delta up"]].median, rows[names["delta down"]].median
    share = rows[names["share"]].median / 100
    parts = [
        "## A model of larger models (computed, not measured)\n",
        f"Seconds for one step's weights (bfloat16) from the learner to one receiver, over one link. Full: bytes over "
        f"the link's rate, hashing and writing beside it. Delta: {100 * share:.3f} % of the bytes over the link, and "
        f"{up:.2g} + {down:.2g} CPU-seconds per GB of weights (measured above, both ends), spread over 16 cores.\n",
        "| model | bytes | "
        + " | ".join(f"full, {link}" for link in LINKS)
        + " | "
        + " | ".join(f"delta, {link}" for link in LINKS)
        + " | of which CPU |",
        "|---|---:|" + "---:|" * (2 * len(LINKS) + 1),
    ]
    for model, nbytes in MODELS.items():
        cpu = nbytes / 1e9 * (up + down) / 16
        full = [nbytes / rate for rate in LINKS.values()]
        delta = [nbytes * share / rate + cpu for rate in LINKS.values()]
        figures = " | ".join(number(value) for value in [*full, *delta, cpu])
        parts.append(f"| {model} | {nbytes / 1e9:.0f} GB | {figures} |")
    parts.append("")
    return parts
