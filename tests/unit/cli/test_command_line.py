"""What the command says when it is used wrongly, and what it prints without starting anything."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from offbeat import __version__
from offbeat.cli import main
from tests.harness import fake_service

RECIPE = Path(__file__).parents[2] / "data" / "one_of_each.yaml"


@dataclass
class Result:
    """What a call of the command left behind."""

    returncode: int
    stdout: str
    stderr: str


Offbeat = Callable[..., Result]


@pytest.fixture
def offbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Offbeat:
    """Calls the entry point in `tmp_path`, in this process: a start of Python for each test is slow."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["offbeat", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Result(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe beside a folder that looks like a model, and its data."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.read_text())
    return path


def test_version(offbeat: Offbeat) -> None:
    assert offbeat("--version").stdout == f"offbeat {__version__}\n"


def test_the_package_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == f"offbeat {__version__}\n"


def test_a_misspelt_key_is_named_with_what_is_allowed(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    result = offbeat("run", recipe, "--set", "schedule.max_lagg=2")
    assert result.returncode == 2
    assert "schedule.max_lagg: unknown key; did you mean max_lag?" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_missing_model_is_one_line_and_leaves_nothing_behind(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    result = offbeat("run", recipe, "--set", "model.path=none")
    assert result.returncode == 1
    assert result.stderr == (
        "model.path: expected a Hugging Face model folder with a config.json, found no such folder at "
        f"{tmp_path}/none; correct the path, or give the recipe a `prepare` section that makes the model\n"
    )
    assert not (tmp_path / "runs").exists()


def test_missing_data_is_one_line_and_leaves_nothing_behind(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    result = offbeat("run", recipe, "--set", "data.train.path=none.jsonl")
    assert result.returncode == 1
    assert result.stderr == (
        f"data.train.path: expected a file at {tmp_path}/none.jsonl, found nothing; correct the path\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "give a recipe, or --resume"),
        (["run", "none.yaml"], "recipe none.yaml: can't be read (No such file or directory)"),
        (["run", "--resume"], "no run found in"),
        (["status", "none"], "run none: found neither a folder"),
        (["export", "none"], "run none: found neither a folder"),
        (["serve", "judge", "--recipe", "x"], "'judge' is not one of"),
        (["serve", "learner", "--recipe", "recipe.yaml"], "run.id is not set"),
        (["prepare", "none.yaml"], "recipe none.yaml: can't be read"),
        (["status", "--json", "--watch"], "--json and --watch exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_with_2_and_say_what_to_do(
    offbeat: Offbeat, recipe: Path, arguments: list[str], said: str
) -> None:
    result = offbeat(*arguments)
    assert result.returncode == 2
    assert said in result.stderr


def test_an_existing_run_is_not_started_again(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    result = offbeat("run", recipe, "--set", "run.id=mine")
    assert result.returncode == 2
    assert "run.id mine: the folder" in result.stderr


def test_a_model_that_is_there_is_not_prepared_again(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    result = offbeat("prepare", recipe)
    assert result.returncode == 0
    assert "is there already" in result.stdout


def test_dry_run_shows_every_process_and_starts_nothing(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    settings = ["run.id=mine", "generator.replicas=2", "learner.ranks=2"]
    sets = [part for setting in settings for part in ("--set", setting)]
    result = offbeat("run", recipe, "--dry-run", *sets)
    assert result.returncode == 0, result.stderr
    tree = yaml.safe_load(result.stdout)
    assert list(tree) == ["checkpoint.0", "generator.0", "generator.1", "reward.0", "learner.0"]
    recipe_file = tmp_path / "runs" / "mine" / "recipe.yaml"
    assert f"-m services.generator --recipe {recipe_file}" in tree["generator.1"]["command"]
    assert "services.learner.launch --ranks 2" in tree["learner.0"]["command"]
    assert tree["learner.0"]["recipe"]["model"]["path"] == str(tmp_path / "model")
    assert tree["reward.0"]["recipe"]["reward"]["functions"][0]["name"] == "exact_match"
    assert tree["checkpoint.0"]["environment"]["OMP_NUM_THREADS"] == "1"
    assert not (tmp_path / "runs").exists()


def test_dry_run_says_that_the_model_would_be_prepared(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    sets = ["--set", "model.path=new", "--set", "prepare.kind=sft"]
    result = offbeat("run", recipe, "--dry-run", *sets)
    assert f"# {tmp_path}/new does not exist yet: it would be prepared first." in result.stdout


def test_status_of_a_run_whose_processes_are_gone(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "mine"
    (folder / "addresses").mkdir(parents=True)
    text = yaml.safe_load(recipe.read_text())
    text["run"] |= {"id": "mine", "directory": str(tmp_path / "runs")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(text))
    (folder / "addresses" / "generator.gone").write_text("127.0.0.1:9")
    result = offbeat("status", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["run_id"], found["running"]) == ("mine", False)
    member = found["members"][0]
    assert (member["member_id"], member["status"], member["error"]) == ("gone", None, "UNAVAILABLE")
    assert "no answer" in offbeat("status", "mine").stdout


def test_prepare_and_export_pass_on_what_they_are_told(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    fake_service.install(tmp_path)
    result = offbeat("prepare", recipe, "--set", "model.path=new", "--set", "prepare.kind=sft")
    assert (result.returncode, result.stdout) == (0, f"prepared\nthe model is in {tmp_path}/new\n")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("{}")
    result = offbeat("export", "mine", "--out", "out")
    expected = f"exporting {folder}\nthe model is in {tmp_path}/out\n"
    assert (result.returncode, result.stdout) == (0, expected)
    result = offbeat("export", "mine", "--out", "none/out")
    assert result.returncode == 1
    assert f"the export of {folder} failed with exit code 1" in result.stderr


def test_doctor_looks_at_a_recipe_and_its_data(
    offbeat: Offbeat, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("[1]\n")
    result = offbeat("doctor", recipe)
    assert result.returncode == 1
    assert f"fail  data: data.train: {tmp_path}/train.jsonl:1: expected a JSON" in result.stdout
    result = offbeat("doctor", recipe, "--set", "data.train.path=none.jsonl")
    assert f"fail  recipe: data.train.path: expected a file at {tmp_path}/none" in result.stdout


def test_doctor_gives_each_check_a_level(offbeat: Offbeat) -> None:
    result = offbeat("doctor")
    lines = [line for line in result.stdout.splitlines() if not line.startswith("      -> ")]
    assert len(lines) >= 12
    assert {line.split()[0] for line in lines} <= {"ok", "warn", "fail"}
    assert result.returncode == any(line.startswith("fail") for line in lines)


def test_a_served_learner_has_a_folder_and_its_share_of_the_cores(
    recipe: Path, tmp_path: Path
) -> None:
    fake_service.install(tmp_path)
    words = ["serve", "learner", "--recipe", "recipe.yaml", "--set", "run.id=mine"]
    done = subprocess.run(
        [sys.executable, "-c", "from offbeat.cli import main; main()", *words, "--share-cores"],
        cwd=tmp_path,
        env={**os.environ, "FAKE_LEARNER": "refuses", "OMP_NUM_THREADS": "77"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert f"threads {max(1, len(os.sched_getaffinity(0)) // 2)}" in done.stdout
    assert (tmp_path / "runs" / "mine" / "recipe.yaml").is_file()
