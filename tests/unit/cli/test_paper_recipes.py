"""The paper's recipes: each resolves synchronous and asynchronous, says what it would load, and loads nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.cli import main
from offbeat.config import load_recipe

FOLDER = Path(__file__).parents[3] / "recipes" / "paper"
RECIPES = sorted(FOLDER.glob("*.yaml"))
NAMES = [path.stem for path in RECIPES]


def test_every_experiment_has_its_recipe() -> None:
    sizes = [f"tldr_pythia_{size}" for size in ("1b", "2.8b", "410m")]
    assert sorted(NAMES) == ["gsm8k_rho_1b", "no_robots_llama31_8b", *sizes]


@pytest.mark.parametrize("max_lag", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_dry_run_says_what_would_be_loaded(
    path: Path,
    max_lag: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["offbeat", "run", str(path), "--dry-run", "--set", f"schedule.max_lag={max_lag}"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    assert not ended.value.code, err
    recipe = load_recipe(path)
    said = [line for line in out.splitlines() if line.startswith("#")]
    assert any(line.startswith("# data.heldout:") and "hub" in line for line in said)
    models = [line for line in said if "would be fetched" in line]
    repositories = [recipe.prepare.params["repo"]] + [
        other["repo"] for other in recipe.prepare.params.get("others", [])
    ]
    for repository in repositories:
        assert any(f"would be fetched: {repository} at" in line for line in models)
    assert not any("not there" in line for line in said)
    tree = yaml.safe_load(out)
    assert tree["learner.0"]["recipe"]["schedule"]["max_lag"] == max_lag
    devices = [
        tree[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in tree if "check" not in name
    ]
    assert devices[0] == devices[1] == str(recipe.learner.ranks)  # generator, reward
    assert devices[2] == ",".join(map(str, range(recipe.learner.ranks)))
    assert os.listdir(tmp_path) == []


def test_sizes_of_tldr_differ_in_names_and_memory_alone() -> None:
    allowed = {"name", "path", "repo", "micro_batch_tokens", "gpu_memory_utilization"}
    allowed.add("gradient_checkpointing")
    trees = [load_recipe(path).model_dump() for path in RECIPES if path.stem.startswith("tldr")]
    assert _differences(trees[0], trees[1]) | _differences(trees[0], trees[2]) == allowed
    sizes = ("1b", "2.8b", "410m")
    for size, text in zip(sizes, (path.read_text() for path in RECIPES[2:]), strict=True):
        assert {word for word in sizes if f"pythia{word}-" in text} == {size}


def _differences(left: Any, right: Any, key: str = "") -> set[str]:
    """Names of the settings whose values differ."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        return set().union(*(_differences(left[name], right[name], name) for name in left))
    if isinstance(left, list) and left and isinstance(left[0], dict):
        assert len(left) == len(right)
        return set().union(*(_differences(*pair, key) for pair in zip(left, right, strict=True)))
    return set() if left == right else {key}
