"""Checkpoints of the learner: the system of record. Atomic folders, verified on the way in.

The learner writes and loads them; ``offbeat run --resume`` chooses one, and the audit counts from the newest.

    <run>/checkpoints/<term>-<step>/     state files of the trainer, meta.json, COMMITTED
    <run>/checkpoints/.partial-…/        one that is being written; worthless
    <run>/checkpoints/superseded/…       newer than the one that the run was sent back to

COMMITTED is written last and holds the hash of every other file; a folder without it does not exist.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from offbeat.errors import CheckpointError, Fenced
from offbeat.failpoints import failpoint

log = logging.getLogger(__name__)

COMMITTED = "COMMITTED"
META = "meta.json"
NAME = re.compile(r"^(\d{6})-(\d{8})$")


@dataclass
class Meta:
    """What a checkpoint knows beside the trainer's state."""

    step: int
    update: int
    term: int
    lineage: dict[int, tuple[int, int]]
    """Version -> (steps, updates), for every version that these weights descend from."""
    history: list[tuple[int, int]]
    """(term, first step) of every learner whose steps are in these weights, oldest first."""
    counts: dict[str, int] = field(default_factory=dict)
    """Ordinals so far: trained, filtered, dead."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that a resumed run must share."""

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> "Meta":
        """From JSON."""
        tree = json.loads(text)
        tree["lineage"] = {int(version): tuple(at) for version, at in tree["lineage"].items()}
        tree["history"] = [tuple(item) for item in tree["history"]]
        return cls(**tree)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    term: int
    step: int

    def verify(self) -> None:
        """Compares every file with its hash. Raises `CheckpointError` naming the first that differs."""
        try:
            hashes = dict(json.loads((self.path / COMMITTED).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {self.path}: {COMMITTED} is damaged ({error}); resume from an older checkpoint, "
                "or delete this folder"
            ) from error
        for name, expected in hashes.items():
            file = self.path / name
            found = _hash(file) if file.is_file() else "missing"
            if found != expected:
                raise CheckpointError(
                    f"checkpoint {self.path}: {name} is damaged (expected hash {expected[:16]}…, found {found[:16]}…); "
                    "resume from an older checkpoint, or delete this folder"
                )

    def meta(self) -> Meta:
        """Its metadata."""
        return Meta.parse((self.path / META).read_text())


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_folder: Path, *, keep: int) -> None:
        self.folder = run_folder / "checkpoints"
        self._keep = keep

    def begin(self, term: int, step: int) -> Path:
        """An empty folder to write the trainer's state into. What broken attempts left behind is removed.

        Never what a newer learner is writing: this one may have been frozen, and not know yet that it was overtaken.
        """
        partial = self.folder / f".partial-{term:06d}-{step:08d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".partial-*"):
                if leftover.name < f".partial-{term + 1:06d}":
                    shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {self.folder}: {error}"
            ) from error
        return partial

    def commit(
        self, partial: Path, meta: Meta, *, fence: Callable[[], None] = lambda: None
    ) -> Checkpoint:
        """Makes a folder from `begin` a checkpoint: hashes, fsync, rename, COMMITTED. Prunes old ones afterwards.

        Raises `CheckpointError` when it can't be written; earlier checkpoints are untouched then. `fence` is asked
        before each change that others see: what it raises (`Fenced`) leaves nothing behind.
        """
        try:
            return self._commit(partial, meta, fence)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {meta.step} can't be written to {self.folder}: {error}; "
                "free space, then resume the run: earlier checkpoints are untouched"
            ) from error

    def _commit(self, partial: Path, meta: Meta, fence: Callable[[], None]) -> Checkpoint:
        (partial / META).write_text(meta.dump(), encoding="utf-8")
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        hashes = {str(file.relative_to(partial)): _hash(file) for file in files}
        for file in files:
            _sync(file)
        failpoint("checkpoint.before_rename")
        with _removed_when_fenced(partial):
            fence()
        final = self.folder / f"{meta.term:06d}-{meta.step:08d}"
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        failpoint("checkpoint.before_committed")
        with _removed_when_fenced(final):
            fence()
        marker = final / f".{COMMITTED}"
        marker.write_text(json.dumps(hashes, indent=1), encoding="utf-8")
        _sync(marker)
        marker.rename(final / COMMITTED)
        _sync(final)
        _sync(self.folder)
        failpoint("checkpoint.after_committed")
        self._prune()
        return Checkpoint(final, meta.term, meta.step)

    def committed(self) -> list[Checkpoint]:
        """All committed checkpoints, the oldest first: by term, then by step."""
        return sorted(self._scan(), key=lambda found: (found.term, found.step))

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint that is intact; damaged ones are passed over with a loud line in the log.

        None when there is none at all; raises `CheckpointError` when there are some and all are damaged.
        """
        for checkpoint in reversed(self.committed()):
            try:
                checkpoint.verify()
            except CheckpointError as error:
                log.error("passed over: %s", error)
                continue
            return checkpoint
        if self.committed():
            raise CheckpointError(
                f"all checkpoints in {self.folder} are damaged; restore one from a backup, or remove them all "
                "to begin anew"
            )
        return None

    def find(self, name: str) -> Checkpoint:
        """The checkpoint of that name or step, verified. Raises `CheckpointError` listing what there is."""
        for checkpoint in reversed(self.committed()):
            if name in {checkpoint.path.name, str(checkpoint.step)}:
                checkpoint.verify()
                return checkpoint
        there = ", ".join(checkpoint.path.name for checkpoint in self.committed()) or "none"
        raise CheckpointError(
            f"no committed checkpoint {name!r} in {self.folder}; there are: {there}"
        )

    def go_back_to(self, name: str) -> Checkpoint:
        """Makes the checkpoint of that name or step the newest one: newer ones are put aside, not deleted.

        Raises `CheckpointError` when it is not there or damaged; then nothing is changed.
        """
        chosen = self.find(name)
        aside = self.folder / "superseded"
        for checkpoint in reversed(self.committed()):
            if (checkpoint.term, checkpoint.step) <= (chosen.term, chosen.step):
                break
            aside.mkdir(exist_ok=True)
            checkpoint.path.rename(aside / checkpoint.path.name)
        return chosen

    def _scan(self) -> Iterator[Checkpoint]:
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            match = NAME.match(path.name)
            if match and (path / COMMITTED).is_file():
                yield Checkpoint(path, int(match[1]), int(match[2]))

    def _prune(self) -> None:
        for checkpoint in self.committed()[: -self._keep]:
            # Without its marker first: a removal that is cut short leaves no folder that looks whole.
            (checkpoint.path / COMMITTED).unlink()
            shutil.rmtree(checkpoint.path)


@contextmanager
def _removed_when_fenced(folder: Path) -> Iterator[None]:
    try:
        yield
    except Fenced:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _hash(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _sync(path: Path) -> None:
    failpoint("checkpoint.fsync")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
