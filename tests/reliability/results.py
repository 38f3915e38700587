"""Writes docs/results/reliability.md from what campaigns and soaks have left in their folder."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "reliability.md"
ROUNDS = ("at_most_1", "exact_1", "at_most_3")
ZERO = {
    "missing": "ordinals missing",
    "trained_twice": "ordinals trained twice",
    "lag_above_bound": "samples with a lag above the bound",
    "torn": "completions of weights that were torn",
    "stale": "writes of an overtaken learner accepted",
}

Result = dict[str, Any]


def write(folder: Path) -> Path:
    """Writes the page from the JSON files of the folder; what is not there is left out."""
    parts = [_head()]
    found = [_read(folder / f"{name}.json") for name in ROUNDS]
    rounds = [result for result in found if result]
    stale = _read(folder / "stale.json")
    if rounds:
        parts += [_campaign(rounds, stale), _counts(rounds, stale), _recovery(rounds, stale)]
    soak = _read(folder / "soak.json")
    if soak:
        parts.append(_soak(soak))
    PAGE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return PAGE


def _read(file: Path) -> Result | None:
    return json.loads(file.read_text()) if file.exists() else None


def _head() -> str:
    return (
        "# Faults, and what came of them\n\n"
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores on which other work was running as well, so seconds are "
        "those of a busy machine. Deterministic engine; Redis, gRPC, DeepSpeed, files and processes are real. Written "
        "by `make reliability` and `make soak`; [docs/reliability.md](../reliability.md) says what is promised."
    )


def _campaign(rounds: Sequence[Result], stale: Result | None) -> str:
    faults = sum(len(result["faults"]) for result in rounds) + (stale or {}).get("learners", 0)
    minutes = sum(result["seconds"] for result in rounds) / 60
    lines = [
        "## The campaign",
        "",
        f"`make reliability SEED={rounds[0]['seed']}`: {faults} faults, up to three under way at once, "
        f"in {minutes:.0f} minutes. At the end of each run the command itself is killed, and the run is resumed.",
        "",
        "| run | commit | Redis | steps | ordinals | terms | issued again | steps trained again | given up | lags |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in rounds:
        audit = result["audit"]
        lags = ", ".join(f"{lag}: {count}" for lag, count in audit["lag_counts"].items())
        schedule = result["sections"]["schedule"]
        mode = schedule.get("lag_mode", "at_most")
        cells = [
            f"max_lag {result['max_lag']}, {mode}",
            *(result[name] for name in ("commit", "server")),
            *(audit[name] for name in ("steps", "ordinals", "terms", "reissued")),
            *(audit[name] for name in ("retrained_steps", "dead")),
            lags,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _counts(rounds: Sequence[Result], stale: Result | None) -> str:
    lines = ["| what must not be | found | looked at |", "|---|---|---|"]
    ordinals = sum(result["audit"]["ordinals"] for result in rounds)
    versions = sum(result["audit"]["versions"] for result in rounds)
    completions = sum(result["completions"] for result in rounds)
    looked_at = {
        "missing": f"{ordinals} ordinals",
        "trained_twice": f"{ordinals} ordinals",
        "lag_above_bound": f"{ordinals} ordinals",
        "torn": f"{completions} completions, made again from the digest of their version",
        "stale": f"{versions} versions, and {(stale or {}).get('learners', 0)} learners frozen and woken",
    }
    for name, text in ZERO.items():
        total = sum(result[name] for result in rounds)
        if name == "stale" and stale:
            total += stale["stale"]
        lines.append(f"| {text} | {total} | {looked_at[name]} |")
    return "\n".join(lines)


def _recovery(rounds: Sequence[Result], stale: Result | None) -> str:
    """Faults and recovery times by kind."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for result in rounds:
        for fault in result["faults"]:
            seconds[fault["kind"]].append(fault["seconds"])
    if stale:
        seconds["learner frozen, overtaken, woken"] = stale["seconds"]
    lines = [
        "Recovery is the time from the fault until: a killed or frozen worker's entries are handed on by others and "
        "all workers are there; the next learner has trained a step; after other faults one or two further steps are "
        "trained. Another fault under way is part of it: where a step is waited for, mostly a learner that was killed.",
        "",
        "| fault | times | p50 s | p95 s |",
        "|---|---|---|---|",
    ]
    for kind, found in sorted(seconds.items(), key=lambda item: (-len(item[1]), item[0])):
        p50, p95 = quantile(found, 0.5), quantile(found, 0.95)
        lines.append(f"| {kind} | {len(found)} | {p50:.1f} | {p95:.1f} |")
    total = sum(map(len, seconds.values()))
    return "\n".join([*lines, f"| all | {total} | | |"])


def _soak(soak: Result) -> str:
    audit = soak["audit"]
    rate, calm = soak["baseline_steps_per_second"], soak["calm_steps_per_second"]
    lines = [
        "## The soak",
        "",
        f"`make soak MINUTES={soak['minutes']:g} SEED={soak['seed']}`, commit {soak['commit']}: "
        f"{len(soak['faults'])} faults in {soak['seconds'] / 60:.0f} minutes, {audit['ordinals']} ordinals, "
        f"{audit['terms']} terms. Missing "
        f"{soak['missing']}, trained twice {soak['trained_twice']}, lag above the bound {soak['lag_above_bound']}, "
        f"torn {soak['torn']} of {soak['completions']} completions, writes of an overtaken learner {soak['stale']}.",
        "",
        f"Throughout: {rate:.2f} steps/s without faults (mean of {soak['baseline_windows']} windows of "
        f"{soak['window_seconds']:g} s), {calm:.2f} outside of recovery ({soak['calm_windows']} windows): "
        f"{100 * (calm / rate - 1):+.0f} %. {100 * soak['calm_share']:.0f} % of the time was outside of recovery.",
        "",
        "| service | processes | median MiB | growth MiB/h | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for service, memory in soak["memory"].items():
        lines.append(
            f"| {service} | {memory['processes']} | {memory['median_mib']:.0f} | {memory['slope_mib_per_hour']:+.1f} "
            f"| {memory['low']:+.1f} .. {memory['high']:+.1f} |"
        )
    lines += [
        "",
        "Growth: one slope for all processes of a service, each with a level of its own; "
        + soak["note"],
    ]
    return "\n".join(lines)


def quantile(values: Iterable[float], share: float) -> float:
    """The value that a share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
