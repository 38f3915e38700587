"""The results as one Markdown page."""

from collections.abc import Iterable, Mapping

from benchmarks.suite.cells import Cell, Row

TITLES = {
    "a": "Generator ÷ bare vLLM `AsyncLLM`: the same flags, prompts and seeds",
    "b": "Learner ÷ bare DeepSpeed loop: the same tensors, micro-batches and loss",
    "d": "Asynchronous step ÷ the limit (c), synchronous ÷ asynchronous (d): emulated devices",
    "e": "The sample path: CPU from a generated group to the training tensor",
    "f": "Seconds from `offbeat run` to the first token and the first step",
    "g": "Memory of each service",
    "h": "Beside TRL's OnlineDPO: the same model, prompts, lengths and reward",
    "i": "Growth: what a sample costs as things get larger",
}


def page(cells: Iterable[Cell], before: Mapping[str, Cell], command: str) -> str:
    """The table of all cells; `before` are those of the last results, by key."""
    parts = [
        "<!-- Written by `make bench`; what it means stands in benchmarks_notes.md. -->",
        f"`{command}`\n",
        "Medians of the rounds, which alternate between the things compared; behind them the smallest and the largest. "
        "Ratios (x) are of one sitting. *Before*: the median of the results that this page replaced.\n",
    ]
    by_letter: dict[str, list[Cell]] = {}
    for cell in cells:
        by_letter.setdefault(cell.letter, []).append(cell)
    for letter in sorted(by_letter):
        parts.append(f"## ({letter}) {TITLES[letter]}\n".replace("(d) Async", "(c), (d) Async"))
        parts.append("| cell | what | median | smallest … largest | rounds | target | before |")
        parts.append("|---|---|---:|---|---:|---|---:|")
        for cell in by_letter[letter]:
            old = before.get(cell.key)
            medians = {row.name: row.median for row in old.rows} if old is not None else {}
            parts += [_line(cell, row, medians.get(row.name)) for row in cell.rows]
        parts.append("\n" + " ".join(_circumstances(cell) for cell in by_letter[letter]) + "\n")
    return "\n".join(parts)


def _line(cell: Cell, row: Row, before: float | None) -> str:
    spread = f"{number(min(row.values))} … {number(max(row.values))}" if row.values[1:] else ""
    target = ""
    if row.target is not None:
        target = f"{row.target[0]} {row.target[1]:g}: {'**met**' if row.met else 'not met'}"
    what = row.name + (f" ({row.note})" if row.note else "")
    old = "" if before is None else number(before)
    figure = f"{number(row.median)} {row.unit}".replace(" x", " ×")
    return f"| {cell.name} | {what} | {figure} | {spread} | {len(row.values)} | {target} | {old} |"


def _circumstances(cell: Cell) -> str:
    c = cell.circumstances
    where = c.get("gpu") or f"cores {','.join(map(str, c['cores']))}"
    return f"*{cell.name}: commit {c['commit']}, {c['date']}, load {c['load']}, {where}, {cell.seconds:.0f} s.*"


def number(value: float) -> str:
    """Three significant digits, without an exponent where people read none."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.2e}"
