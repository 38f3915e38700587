"""``metrics.jsonl`` and TensorBoard: what every step and every evaluation told. Written by the loop, on rank 0.

One JSON object a line, appended and never changed:

    {"step": 0, "time": …, "kind": "start", "term": 1, …}             a learner begins after this step
    {"step": 1, "time": …, "kind": "step", "term": 1, "version": 1, "reward/mean": …}
    {"step": 0, "time": …, "kind": "evaluation", "mode": "greedy", "term": 1, "version": 1, "eval/greedy/pass@1": …}

A learner that resumes trains the steps past its checkpoint once more. Its line of kind "start" says so: what stands
before it with a larger step is not in the weights any more. `offbeat.report.records` reads the file in that sense.
"""

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class MetricsFile:
    """Appends to ``<run>/metrics.jsonl`` at once. Thread-safe."""

    def __init__(self, run_folder: Path) -> None:
        path = run_folder / "metrics.jsonl"
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, step: int, metrics: Mapping[str, float], **fields: int | str) -> None:
        """One line. NaN and infinity become null, which every reader of JSON takes."""
        values = {
            name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())
        }
        line = json.dumps({"step": step, "time": round(time.time(), 3), **fields, **values}) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Removes what a killed learner left of its last line, so that every line is JSON."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class TensorBoard:
    """Event files in ``<run>/tensorboard``, written by a thread of its own: even its import takes a second.

    `first_step`: events past it, of a learner that came before, are hidden.
    """

    def __init__(self, run_folder: Path, *, first_step: int) -> None:
        self._folder = run_folder / "tensorboard"
        self._first_step = first_step
        self._work: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds scalars."""
        now, copied = time.time(), dict(metrics)

        def write(board: Any) -> None:
            for name, value in copied.items():
                board.add_scalar(name, value, step, walltime=now)

        self._work.put(write)

    def close(self) -> None:
        """Writes what is left."""
        self._work.put(None)
        self._thread.join()

    def _write(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.info("TensorBoard is not installed; metrics go to metrics.jsonl alone")
            return
        try:
            with SummaryWriter(str(self._folder), purge_step=self._first_step + 1) as board:
                while (write := self._work.get()) is not None:
                    write(board)
        except OSError as error:
            log.warning("no more events for TensorBoard, training goes on: %s", error)


class MetricsWriter:
    """What the loop writes metrics with."""

    def __init__(self, run_folder: Path, *, tensorboard: bool = True) -> None:
        self._run_folder = run_folder
        self._file = MetricsFile(run_folder)
        self._wants_board = tensorboard
        self._board: TensorBoard | None = None
        self._term = 0

    def start(self, term: int, step: int) -> None:
        """A learner goes on after `step` steps."""
        self._term = term
        self._file.write(step, {}, kind="start", term=term)
        if self._wants_board:
            self._board = TensorBoard(self._run_folder, first_step=step)

    def write_step(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """The step is done; `version` is the newest one then."""
        self._write(step, metrics, kind="step", version=version)

    def write_evaluation(
        self, step: int, version: int, mode: str, metrics: Mapping[str, float]
    ) -> None:
        """An evaluation of `version`, the weights after `step` steps, has its results."""
        self._write(step, metrics, kind="evaluation", mode=mode, version=version)

    def _write(self, step: int, metrics: Mapping[str, float], **fields: int | str) -> None:
        self._file.write(step, metrics, term=self._term, **fields)
        if self._board is not None:
            self._board.add(step, metrics)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()
