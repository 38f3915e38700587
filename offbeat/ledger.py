"""The ledger: what happened to every ordinal and version, one JSON line an event.

Written by `loop` and `coordinator`, read by audit.

A term has its own file, so that a learner that was replaced can't spoil the record of its successor. Events:

    start       {term, step, parent: [term, step] | null, max_lag}   this term trains from step on, from that checkpoint
    issue       {cohort, first, last, min_version}
    reissue     {ordinal, attempt, why}
    step        {step, trained: [...], filtered: [...], dead: {ordinal: why}, lag: [...], versions: [...]}
    publish     {version, parent, step}
    checkpoint  {step, name}
    finish      {step}
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

from offbeat.errors import CheckpointError


class Ledger:
    """Appends events to ``<run>/ledger/<term>.jsonl``."""

    def __init__(self, run_folder: Path, term: int) -> None:
        folder = run_folder / "ledger"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{term:06d}.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event. It survives the end of this process at once, that of the machine after `sync`."""
        line = json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        """Makes all events durable; called before a checkpoint is committed."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_ledger(run_folder: Path) -> dict[int, list[dict[str, Any]]]:
    """All events by term. A last line that was cut off by a crash is left out; any other bad line is an error."""
    events: dict[int, list[dict[str, Any]]] = {}
    for file in sorted((run_folder / "ledger").glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").split("\n")
        found = events.setdefault(int(file.stem), [])
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number == len(lines):
                    continue
                raise CheckpointError(
                    f"{file}:{number}: expected a JSON object, found {line[:60]!r}: the ledger is damaged"
                ) from error
    return events


def finished(run_folder: Path) -> bool:
    """Whether the last term came to the end of the run, export included."""
    events = read_ledger(run_folder)
    last = events[max(events)] if events else []
    return any(event["event"] == "finish" for event in last)
