"""``samples.jsonl``: a bounded part of what was trained on and evaluated, as text, for people. Written by the loop.

One completion a line: kind (train, evaluation), mode, step, term, version, lag, ordinal, index, prompt, completion,
reward, components, finish_reason, tokens, time. Which groups of a step are kept depends on the run's seed and the step
alone. A file that grows past its bound is thinned out: every second step of those kept, and half of each evaluation.
"""

import json
import logging
import queue
import random
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from offbeat.config.service import SamplesSettings
from offbeat.v1 import samples_pb2 as samples

log = logging.getLogger(__name__)

MOST_HALVINGS = 30
"""One prompt of each evaluation always stays, so that halving alone might go on for ever."""

Row = dict[str, Any]
Item = TypeVar("Item")

FINISH_REASONS = {
    samples.FINISH_REASON_STOP: "stop",
    samples.FINISH_REASON_LENGTH: "length",
}


def chosen(groups: Sequence[Item], count: int, *, seed: int, step: int) -> list[Item]:
    """`count` of a step's groups, in their order."""
    generator = random.Random(f"{seed}:samples:{step}")
    places = sorted(generator.sample(range(len(groups)), min(count, len(groups))))
    return [groups[place] for place in places]


def rows_of(
    scored: samples.ScoredRollout, *, max_characters: int, lags: Sequence[int] = (), **fields: Any
) -> list[Row]:
    """A line for each completion of a group. `lags`: by completion; none for an evaluation."""
    task = scored.rollout.task
    now = round(time.time(), 3)
    rows = []
    for index, (completion, score) in enumerate(
        zip(scored.rollout.completions, scored.scores, strict=True)
    ):
        versions = [span.version for span in completion.version_spans]
        rows.append(
            {
                **fields,
                "time": now,
                "version": min(versions, default=0),
                "newest_version": max(versions, default=0),
                "lag": lags[index] if lags else None,
                "ordinal": task.ordinal,
                "index": index,
                "prompt": cut(task.prompt_text, max_characters),
                "completion": cut(completion.text, max_characters),
                "reward": score.total,
                "components": {
                    part.name: part.value if part.HasField("value") else None
                    for part in score.components
                },
                "finish_reason": FINISH_REASONS.get(completion.finish_reason, "unknown"),
                "tokens": len(completion.token_ids),
            }
        )
    return rows


def cut(text: str, length: int) -> str:
    """The text, and how much is missing where it is longer than that."""
    return text if len(text) <= length else f"{text[:length]}… [{len(text) - length} more]"


class SamplesFile:
    """Appends rows on a thread of its own. `add` returns at once."""

    def __init__(self, run_folder: Path, settings: SamplesSettings) -> None:
        self.path = run_folder / "samples.jsonl"
        self._settings = settings
        self._thinning = Thinning(settings.evaluation_prompts)
        self._work: queue.SimpleQueue[list[Row] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="samples", daemon=True)
        self._thread.start()

    def add(self, rows: list[Row]) -> None:
        """Takes rows of one group or more."""
        self._work.put(rows)

    def close(self) -> None:
        """Writes what is left."""
        self._work.put(None)
        self._thread.join()

    def _write(self) -> None:
        try:
            while (rows := self._work.get()) is not None:
                kept = [row for row in rows if self._thinning.keeps(row)]
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(_lines(kept))
                    size = file.tell()
                if size > self._settings.max_mb * 1024**2:
                    self._thin()
        except OSError as error:
            log.warning("no more samples are kept, training goes on: %s", error)

    def _thin(self) -> None:
        """Halves what is kept until the file is at most half as large as it may be."""
        rows = list(read_rows(self.path))
        text = _lines(rows)
        for _ in range(MOST_HALVINGS):
            if len(text.encode()) <= self._settings.max_mb * 1024**2 // 2:
                break
            self._thinning.halve()
            rows = [row for row in rows if self._thinning.keeps(row)]
            text = _lines(rows)
        partial = self.path.with_name(f".{self.path.name}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path)
        log.info("samples.jsonl was thinned out to %d completions", len(rows))


class Thinning:
    """Which rows are kept: of every `stride`-th step, and of the first prompts of an evaluation."""

    def __init__(self, evaluation_prompts: int) -> None:
        self._stride = 1
        self._prompts = evaluation_prompts

    def halve(self) -> None:
        """Keeps half of that from now on."""
        self._stride *= 2
        self._prompts = (self._prompts + 1) // 2

    def keeps(self, row: Row) -> bool:
        """Whether the row is kept."""
        if row["kind"] == "evaluation":
            return bool(row["ordinal"] < self._prompts)
        return bool(row["step"] % self._stride == 0)


def read_rows(path: Path) -> Iterable[Row]:
    """The rows of a file; a line that was cut off by a crash is left out."""
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row


def _lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
