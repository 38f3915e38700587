"""What `offbeat run` says at the end: what was gained, how long it took, where everything is."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from offbeat.local.folder import RunFolder
from offbeat.local.run import Outcome

KINDS = ("greedy", "sampled")
COUNTS = ("prompts", "dead", "other_version")
BOUNDS = ("_low", "_high", "_start", "_end")


def collect_metrics(folder: Path, last: Mapping[str, float]) -> dict[str, float]:
    """All metrics of a run by name, the last value of each; an evaluation's first value as NAME_start.

    The file goes back to before a restart or a resume, which the learner's last message does not.
    """
    metrics: dict[str, float] = {}
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # the learner died while it wrote this line
        found = {name: value for name, value in entry.items() if isinstance(value, int | float)}
        for name in heldout_names(found):
            metrics.setdefault(f"{name}_start", found[name])
            for bound in ("_low", "_high"):
                if name + bound in found:
                    metrics.setdefault(f"{name}_start{bound}", found[name + bound])
        metrics.update(found)
    metrics.update(last)
    return metrics


def heldout_names(metrics: Mapping[str, float]) -> list[str]:
    """Names of what evaluations measured: pass@1, the reward, each reward function; in order of appearance."""
    kinds = tuple(f"eval/{kind}/" for kind in KINDS)
    return [
        name
        for name in metrics
        if name.startswith(kinds)
        and not name.endswith(BOUNDS)
        and name.rpartition("/")[2] not in COUNTS
    ]


def print_summary(console: Console, folder: RunFolder, outcome: Outcome) -> None:
    """Prints tables of results and times, and where to look further."""
    last = outcome.progress
    metrics = collect_metrics(folder.path, last.metrics if last is not None else {})
    console.print()
    if heldout_names(metrics):
        console.print(_heldout_table(metrics))
    if last is not None:
        _print_fact(console, "steps", f"{last.step} of {last.total_steps}, version {last.version}")
        groups = f"{last.trained} trained, {last.filtered} filtered, {last.dead} dead"
        _print_fact(console, "groups", groups)
    for name, seconds in (
        ("preparing", outcome.prepare_seconds),
        ("starting", outcome.start_seconds),
        ("training", outcome.train_seconds),
    ):
        if seconds:
            _print_fact(console, name, f"{seconds:.0f} s")
    for name, path in (
        ("model", folder.export),
        ("checkpoints", folder.path / "checkpoints"),
        ("metrics", folder.path / "metrics.jsonl"),
        ("logs", folder.logs),
    ):
        if path.exists():
            _print_fact(console, name, str(path))
    _print_hints(console, folder)


def _print_fact(console: Console, name: str, text: str) -> None:
    # Paths are to be copied: they are not wrapped.
    console.print(f"{name:<12} {text}", markup=False, highlight=False, soft_wrap=True)


def _print_hints(console: Console, folder: RunFolder) -> None:
    hints = [f"offbeat report {folder.path}", f"offbeat run --resume {folder.path}"]
    if not folder.export.exists():
        hints.insert(0, f"offbeat export {folder.path}")
    if (folder.path / "tensorboard").exists():
        hints.append(f"tensorboard --logdir {folder.path / 'tensorboard'}")
    for index, hint in enumerate(hints):
        _print_fact(console, "see further" if index == 0 else "", hint)


def _heldout_table(metrics: Mapping[str, float]) -> Table:
    table = Table(title="Held-out", title_justify="left")
    for column in ("", "before", "after", "gain"):
        table.add_column(column, justify="left" if not column else "right")
    for name in heldout_names(metrics):
        after, before = metrics.get(f"{name}_end", metrics[name]), metrics.get(f"{name}_start")
        _, kind, what = name.split("/", 2)
        table.add_row(
            f"held-out {what.removeprefix('component/')}, {kind}",
            _with_interval(metrics, before, f"{name}_start"),
            _with_interval(metrics, after, f"{name}_end", name),
            _gain(what, before, after),
        )
    return table


def _gain(what: str, before: float | None, after: float) -> str:
    if before is None:
        return "–"
    return (
        f"{100 * (after - before):+.1f} points"
        if what.startswith("pass@")
        else f"{after - before:+.3f}"
    )


def _with_interval(metrics: Mapping[str, float], value: float | None, *names: str) -> str:
    """A value and its 95 % interval, where one of `names` has one (NAME_low, NAME_high)."""
    if value is None:
        return "–"
    for name in names:
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        if low is not None and high is not None:
            return f"{value:.3f} [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}"
