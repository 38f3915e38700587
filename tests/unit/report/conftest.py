"""A run that was killed and resumed, small enough to be kept: 14 steps of the deterministic engine, made by
`offbeat run` with schedule.steps=14 and evaluation.every_steps=4, killed after step 7; samples of some steps only."""

import shutil
from pathlib import Path

import pytest

RESUMED = Path(__file__).parents[2] / "data" / "resumed_run"


@pytest.fixture
def run_folder(tmp_path):
    """A copy, to be changed at will."""
    return shutil.copytree(RESUMED, tmp_path / "resumed_run")
