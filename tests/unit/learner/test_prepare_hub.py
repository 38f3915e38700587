"""Model folders from the hub: through the library's own cache, as on a machine without a connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.harness.paper_fixtures import llama, pythia

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _cached(home: Path, repository: str, folder: Path) -> None:
    """Puts a model into the cache, as if it had been downloaded."""
    place = home / "hub" / f"models--{repository.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    (place / "blobs").mkdir()
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename(place / "blobs" / file.name)
        (snapshot / file.name).symlink_to(place / "blobs" / file.name)


def _prepare(folder: Path, home: Path, others: str) -> subprocess.CompletedProcess[str]:
    recipe = {
        "model": {"path": "models/policy", "max_context": 64},
        "prepare": {
            "kind": "hub",
            "params": {
                "repo": "someone/policy",
                "others": [{"repo": others, "path": "models/judge"}],
            },
        },
        "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
        "sampling": {"max_tokens": 8},
        "schedule": {"steps": 1, "prompts_per_step": 1},
        "learner": {"loss": {"name": "online_dpo"}},
        "reward": {"functions": [{"name": "exact_match"}]},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return subprocess.run(
        [sys.executable, "-m", "services.learner.prepare", "--recipe", str(folder / "recipe.yaml")],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_models_are_there_or_the_policy_is_not(tmp_path: Path) -> None:
    from services.learner.model import check_model, load_policy, load_tokenizer

    home, models = tmp_path / "home", tmp_path / "models"
    pythia(tmp_path / "a", seed=1)
    llama(tmp_path / "b", seed=2, reward=True)
    _cached(home, "someone/policy", tmp_path / "a")
    _cached(home, "someone/judge", tmp_path / "b")

    missing = _prepare(tmp_path, home, "someone/nothing")
    assert missing.returncode == 1
    assert "someone/nothing at main can't be had from the hub" in missing.stderr
    assert not models.exists()

    made = _prepare(tmp_path, home, "someone/judge")
    assert made.returncode == 0, made.stderr
    assert sorted(path.name for path in models.iterdir()) == ["judge", "policy"]
    assert not any(path.is_symlink() for path in (models / "policy").iterdir())
    assert check_model(models / "policy").vocabulary == 264
    load_policy(models / "policy")
    assert load_tokenizer(models / "policy").eos_token == "<|endoftext|>"
    described = json.loads((models / "policy" / "prepare.json").read_text())
    assert described == {"repo": "someone/policy", "revision": "main", "commit": COMMIT}

    again = _prepare(tmp_path, home, "someone/judge")
    assert again.returncode == 0
    assert "is already there" in again.stderr + again.stdout
