"""The launcher of the learner's ranks passes on what became of them."""

import subprocess
import sys
from pathlib import Path


def test_a_mistake_in_the_settings_is_not_turned_into_a_crash(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learner: {nope: 1}\n")
    launch = [sys.executable, "-m", "services.learner.launch", "--ranks", "2"]
    ended = subprocess.run(
        [*launch, "--recipe", str(recipe)], check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2, ended.stderr
    assert "learner.nope: unknown key" in "\n".join(ended.stderr.splitlines()[-8:])
