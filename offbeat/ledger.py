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

from offbeat.errors import CheckpointError, Fenced


class Ledger:
    """Appends events to ``<run>/ledger/<term>.jsonl``.

    The file of a newer term is also what fences this learner off the run's folder: see `check`.
    """

    def __init__(self, run_folder: Path, term: int) -> None:
        self._folder = run_folder / "ledger"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._term = term
        self._file = (self._folder / f"{term:06d}.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises `Fenced` when a newer learner has begun: one that was frozen must not write beside its successor.

        Redis and the checkpoint service refuse an older term by themselves; a folder does not.
        """
        newest = max(int(file.stem) for file in self._folder.glob("*.jsonl"))
        if newest > self._term:
            raise Fenced(
                f"term {newest} began after this one ({self._term}); stop this learner, the newer one goes on"
            )

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event. It survives the end of this process at once, that of the machine after `sync`.

        Raises `Fenced`, see `check`.
        """
        self.check()
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


def newest_numbers(run_folder: Path) -> tuple[int, int]:
    """The newest term and version that the ledger knows of; 0 where it knows none.

    A checkpoint may be older: what a learner did after its last one is lost, but its numbers must not come again.
    """
    events = read_ledger(run_folder)
    versions = [e["version"] for term in events.values() for e in term if e["event"] == "publish"]
    return max(events, default=0), max(versions, default=0)


def finished(run_folder: Path) -> bool:
    """Whether the last term came to the end of the run, export included."""
    events = read_ledger(run_folder)
    last = events[max(events)] if events else []
    return any(event["event"] == "finish" for event in last)
