"""The folder of one run: made once, locked by the process that runs it, found again by `status` and the like.

RUN/recipe.yaml   the resolved recipe          RUN/logs/       a log per process and attempt
RUN/lock          held while the run goes on   RUN/addresses/  HOST:PORT of each process
"""

import fcntl
import os
import secrets
import time
from pathlib import Path
from types import TracebackType

from offbeat.checkpoints import Checkpoints
from offbeat.config import Recipe, load_recipe
from offbeat.config.load import dump_recipe
from offbeat.errors import ConfigError, OffbeatError
from offbeat.resume import check_settings
from offbeat.rpc.entry import run_folder

RECIPE_FILE = "recipe.yaml"
LOCK_FILE = "lock"


class RunFolder:
    """A run's folder, locked for this process until `close`. Make it with `create` or `resume`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.logs = path / "logs"
        self.addresses = path / "addresses"
        self.export = path / "export"
        self.recipe_file = path / RECIPE_FILE
        self._lock = lock

    @classmethod
    def create(cls, recipe: Recipe) -> tuple["RunFolder", Recipe]:
        """Makes the folder of a new run, and the recipe with the run's id and absolute folder.

        Raises `ConfigError` when the folder exists.
        """
        recipe = with_run_id(recipe)
        path = Path(recipe.run.directory) / recipe.run_id
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            raise ConfigError(
                f"run.id {recipe.run_id}: the folder {path} exists already; choose another run.id, "
                f"or go on with that run: offbeat run --resume {path}"
            ) from None
        folder = cls(path, _lock(path))
        folder.recipe_file.write_text(dump_recipe(recipe), encoding="utf-8")
        return folder, recipe

    @classmethod
    def resume(
        cls, path: Path, overrides: list[str], *, checkpoint: str | None = None
    ) -> tuple["RunFolder", Recipe]:
        """Takes the folder of an earlier run, with its recipe changed by `overrides`.

        `checkpoint` names the one to go on from, or its step; None: the newest. Raises `ConfigError` when it is no
        run's folder, another process runs it, or a setting changed that may not; `CheckpointError` when the checkpoint
        is not there. Then nothing is changed.
        """
        path = path.resolve()
        lock = _lock(path)
        try:
            recipe = load_recipe(path / RECIPE_FILE, overrides)
            if Path(recipe.run.directory) / recipe.run_id != path:
                # The folder was moved; its settings follow.
                place = [f"run.directory={path.parent}", f"run.id={path.name}"]
                recipe = load_recipe(path / RECIPE_FILE, [*overrides, *place])
            checkpoints = Checkpoints(path, keep=recipe.learner.checkpoints.keep)
            committed = checkpoints.committed()
            if checkpoint is not None:
                check_settings(checkpoints.find(checkpoint), recipe)
                checkpoints.go_back_to(checkpoint)
            elif committed:
                check_settings(committed[-1], recipe)
        except OffbeatError:
            os.close(lock)
            raise
        folder = cls(path, lock)
        folder.recipe_file.write_text(dump_recipe(recipe), encoding="utf-8")
        return folder, recipe

    @classmethod
    def take(cls, recipe: Recipe) -> "RunFolder":
        """Makes the folder of a run whose processes others start, or takes it again to go on with that run.

        The recipe must name the run; it takes the place of the one in the folder. Raises `ConfigError` when the folder
        can't be written to, another process runs it, or a setting differs that may not change; then nothing is changed.
        """
        path = run_folder(recipe).resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except PermissionError as error:
            raise ConfigError(_not_ours(path, error)) from error
        committed = Checkpoints(path, keep=recipe.learner.checkpoints.keep).committed()
        try:
            if committed:
                check_settings(committed[-1], recipe)
        except OffbeatError:
            os.close(lock)
            raise
        folder = cls(path, lock)
        folder.recipe_file.write_text(dump_recipe(recipe), encoding="utf-8")
        return folder

    def keep_over_exec(self) -> None:
        """The program that takes this process's place holds the lock until it ends."""
        os.set_inheritable(self._lock, True)

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def with_run_id(recipe: Recipe) -> Recipe:
    """The recipe with a run id (name, time, and four random digits unless it has one) and an absolute folder."""
    made = f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = str(Path(recipe.run.directory).resolve())
    run = recipe.run.model_copy(update={"id": recipe.run.id or made, "directory": directory})
    return recipe.model_copy(update={"run": run})


def find_run(run: str | None, runs: Path) -> Path:
    """The folder of a run: `run` is a folder or an id below `runs`; None means the newest.

    Raises `ConfigError` when there is none.
    """
    if run is not None:
        for path in (Path(run), runs / run):
            if (path / RECIPE_FILE).is_file():
                return path.resolve()
        raise ConfigError(
            f"run {run}: found neither a folder {run} nor {runs / run} with a {RECIPE_FILE}; "
            f"runs there: {', '.join(path.name for path in list_runs(runs)) or 'none'}"
        )
    found = list_runs(runs)
    if not found:
        raise ConfigError(
            f"no run found in {runs.resolve()}; start one with `offbeat run RECIPE`, or name its folder"
        )
    return found[0].resolve()


def list_runs(runs: Path) -> list[Path]:
    """Folders of runs below `runs`, the newest first."""
    files = list(runs.glob(f"*/{RECIPE_FILE}"))
    return [file.parent for file in sorted(files, key=lambda file: -file.stat().st_mtime)]


def is_locked(path: Path) -> bool:
    """Whether a process is running the run at this moment. Changes nothing: the folder may be someone else's."""
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _not_ours(path: Path, error: PermissionError) -> str:
    # os.path: a folder that may not be searched counts as missing.
    place = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    owner = place.stat()
    return (
        f"run.directory: can't write to {error.filename or path}: {place} belongs to user {owner.st_uid}, group "
        f"{owner.st_gid}, and this process is user {os.geteuid()}, group {os.getegid()}; run it as the owner "
        "(docker compose: RUN_AS=UID:GID), or change the owner"
    )


def _lock(path: Path) -> int:
    if not path.is_dir():
        raise ConfigError(f"run folder {path}: no such folder; `offbeat status` lists runs")
    # Not inheritable (the default), so that a child that outlives its parent can't hold it.
    descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"run folder {path}: another process (pid {owner}) is running it; stop that one first, "
            "or start a new run"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
