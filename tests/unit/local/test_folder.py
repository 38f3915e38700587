"""A run's folder belongs to one process at a time."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.checkpoints import Checkpoints, Meta
from offbeat.config import Recipe, load_recipe
from offbeat.errors import CheckpointError, ConfigError
from offbeat.local.folder import RunFolder, find_run, is_locked
from offbeat.resume import fixed_settings

RESUME = "import sys; from pathlib import Path; from offbeat.local.folder import RunFolder; "
RESUME += "RunFolder.resume(Path(sys.argv[1]), [])"


def test_a_new_run_gets_an_id_and_its_resolved_recipe(recipe: Recipe) -> None:
    folder, resolved = RunFolder.create(recipe)
    with folder:
        assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}", resolved.run_id)
        assert folder.path == Path(recipe.run.directory) / resolved.run_id
        assert load_recipe(folder.recipe_file) == resolved


def test_a_folder_cannot_be_made_twice(recipe: Recipe) -> None:
    named = recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": "mine"})})
    with RunFolder.create(named)[0] as folder:
        with pytest.raises(ConfigError, match=r"run\.id mine: .*exists already; .*--resume"):
            RunFolder.create(named)
        assert folder.path.is_dir()


def test_a_running_run_cannot_be_resumed(recipe: Recipe) -> None:
    with RunFolder.create(recipe)[0] as folder:
        assert is_locked(folder.path)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}\\) is running it"):
            RunFolder.resume(folder.path, [])
        command = [sys.executable, "-c", RESUME, str(folder.path)]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "is running it; stop that one first" in other.stderr
    assert not is_locked(folder.path)


def test_resume_keeps_the_recipe_and_takes_overrides(recipe: Recipe) -> None:
    with RunFolder.create(recipe)[0] as folder:
        path = folder.path
    with RunFolder.resume(path, ["schedule.steps=9"])[0] as folder:
        assert load_recipe(folder.recipe_file).schedule.steps == 9
        assert load_recipe(folder.recipe_file).run_id == path.name


def test_a_moved_folder_can_be_resumed(recipe: Recipe, tmp_path: Path) -> None:
    with RunFolder.create(recipe)[0] as folder:
        path = folder.path
    moved = path.rename(tmp_path / "elsewhere")
    with RunFolder.resume(moved, [])[0] as folder:
        resolved = load_recipe(folder.recipe_file)
        assert Path(resolved.run.directory) / resolved.run_id == moved


def test_a_refused_resume_gives_the_lock_back(recipe: Recipe) -> None:
    with RunFolder.create(recipe)[0] as folder:
        path = folder.path
    with pytest.raises(ConfigError, match="stepz"):
        RunFolder.resume(path, ["schedule.stepz=9"])
    assert not is_locked(path)


def test_runs_are_found_by_id_by_folder_and_as_the_newest(recipe: Recipe) -> None:
    paths = []
    for age, name in ((20, "old"), (10, "new")):
        named = recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": name})})
        with RunFolder.create(named)[0] as folder:
            paths.append(folder.path)
            changed = folder.recipe_file.stat().st_mtime - age
            os.utime(folder.recipe_file, (changed, changed))
    runs = Path(recipe.run.directory)
    assert find_run(None, runs) == paths[1]
    assert find_run("old", runs) == paths[0]
    assert find_run(str(paths[0]), runs) == paths[0]
    with pytest.raises(ConfigError, match=r"run other: .*runs there: new, old"):
        find_run("other", runs)


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run found in .*start one with"):
        find_run(None, tmp_path)


def with_checkpoints(recipe: Recipe, *steps: int) -> Path:
    """A run's folder with a checkpoint at each of the steps; nobody runs it."""
    folder, resolved = RunFolder.create(recipe)
    folder.close()
    checkpoints = Checkpoints(folder.path, keep=len(steps))
    for step in steps:
        partial = checkpoints.begin(1, step)
        checkpoints.commit(
            partial, Meta(step, step, 1, {}, [(1, 0)], settings=fixed_settings(resolved))
        )
    return folder.path


def test_a_given_checkpoint_becomes_the_newest(recipe: Recipe) -> None:
    path = with_checkpoints(recipe, 2, 4)
    with pytest.raises(CheckpointError, match="no committed checkpoint '3'"):
        RunFolder.resume(path, [], checkpoint="3")
    with RunFolder.resume(path, [], checkpoint="2")[0]:
        assert [found.step for found in Checkpoints(path, keep=2).committed()] == [2]


def test_a_setting_that_may_not_change_is_refused_before_anything_is_written(
    recipe: Recipe,
) -> None:
    path = with_checkpoints(recipe, 2)
    before = (path / "recipe.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"run\.seed was 0, is 7 \(it decides the order of the data\)"
    ):
        RunFolder.resume(path, ["run.seed=7"])
    assert (path / "recipe.yaml").read_text() == before
    folder, resumed = RunFolder.resume(path, ["learner.optimizer.lr=1e-3"])
    folder.close()
    assert resumed.learner.optimizer.lr == 1e-3


def named(recipe: Recipe, **changes: object) -> Recipe:
    """The recipe of a run that others start; `changes` are of its `run` section."""
    return recipe.model_copy(
        update={"run": recipe.run.model_copy(update={"id": "mine", **changes})}
    )


def test_a_run_that_others_start_has_a_folder_and_goes_on_in_it(recipe: Recipe) -> None:
    with RunFolder.take(named(recipe)) as folder:
        assert load_recipe(folder.recipe_file) == named(recipe)
        assert is_locked(folder.path)
        with pytest.raises(ConfigError, match="is running it; stop that one first"):
            RunFolder.take(named(recipe))
    longer = named(recipe).model_copy(
        update={"schedule": recipe.schedule.model_copy(update={"steps": 9})}
    )
    with RunFolder.take(longer) as folder:
        assert load_recipe(folder.recipe_file).schedule.steps == 9


def test_another_recipe_does_not_take_a_runs_folder(recipe: Recipe) -> None:
    path = with_checkpoints(named(recipe), 2)
    before = (path / "recipe.yaml").read_text()
    with pytest.raises(ConfigError, match=r"run\.seed was 0, is 7"):
        RunFolder.take(named(recipe, seed=7))
    assert (path / "recipe.yaml").read_text() == before
    assert not is_locked(path)


def test_a_run_without_a_name_has_no_folder_to_take(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"run\.id is not set"):
        RunFolder.take(recipe)


def test_the_lock_stays_with_the_program_that_takes_this_ones_place(recipe: Recipe) -> None:
    path = Path(recipe.run.directory) / "mine"
    program = "import sys; sys.stdin.read()"
    script = (
        "import os, sys; from offbeat.config import load_recipe; from offbeat.local.folder import RunFolder; "
        "RunFolder.take(load_recipe(sys.argv[1], sys.argv[2:])).keep_over_exec(); "
        f"print(1, flush=True); os.execv(sys.executable, [sys.executable, '-c', {program!r}])"
    )
    recipe_file = Path(__file__).parents[2] / "data" / "one_of_each.yaml"
    settings = [f"run.directory={recipe.run.directory}", "run.id=mine"]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(recipe_file), *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert is_locked(path)
        process.communicate()
    assert not is_locked(path)


@pytest.fixture
def somebody_elses_folder() -> Iterator[Path]:
    """A folder that this process may look into and not write to."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield path
    if root:
        os.seteuid(0)
    path.rmdir()


def test_a_folder_of_somebody_else_is_one_clear_error(
    recipe: Recipe, somebody_elses_folder: Path
) -> None:
    theirs = named(recipe, directory=str(somebody_elses_folder))
    with pytest.raises(
        ConfigError, match=rf"can't write to .*: {somebody_elses_folder} belongs to"
    ):
        RunFolder.take(theirs)
