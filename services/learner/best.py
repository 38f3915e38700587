"""Keeps the version with the best evaluation so far. Used by `loop`.

The weights are written when the evaluation of a version is opened, since by the time its results are in, the checkpoint
service may have dropped that version.
"""

import json
import logging
import shutil
from pathlib import Path

from safetensors import safe_open

from services.learner.model import INDEX, shard_name, write_index
from services.learner.snapshot import Snapshot, candidate_files, write_candidate

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"


class BestVersion:
    """``<run>/best/`` is a model folder, in a LoRA run an adapter's; ``best.json`` in it says which version, how good.

    The metric is eval/greedy/pass@1 when evaluation is greedy, else eval/sampled/pass@1; or the mean reward where the
    recipe has no threshold of passing. Candidates wait in ``<run>/best/.candidates``.
    """

    def __init__(self, run_folder: Path, model_folder: Path) -> None:
        self._folder = run_folder / "best"
        self._candidates = self._folder / ".candidates"
        self._model_folder = model_folder
        shutil.rmtree(self._candidates, ignore_errors=True)

    def candidate(self, step: int) -> Path:
        """Where the weights of a version that is being evaluated wait; files with this stem."""
        return self._candidates / str(step)

    def add_candidate(self, step: int, snapshot: Snapshot) -> None:
        """Writes the weights of a version that is being evaluated, or rank 0's part of them."""
        write_candidate(snapshot, self.candidate(step))
        if snapshot.adapter_config is not None:
            (self._candidates / ADAPTER_CONFIG).write_text(snapshot.adapter_config)

    def judge(self, step: int, version: int, metric: str, value: float) -> None:
        """The evaluation of a candidate is over: it becomes the best one, or goes."""
        candidates = candidate_files(self.candidate(step))
        if not candidates:
            return
        if value <= self._value():
            for candidate in candidates:
                candidate.unlink()
            return
        config = self._candidates / ADAPTER_CONFIG
        for file in [config] if config.exists() else self._model_folder.iterdir():
            if file.is_file() and file.suffix not in {".safetensors", ".bin", ".gguf"}:
                shutil.copy(file, self._folder / file.name)
        self._take(candidates, "adapter_model" if config.exists() else "model")
        said = {"step": step, "version": version, "metric": metric, "value": value}
        partial = self._folder / ".best.json"
        partial.write_text(json.dumps(said, indent=1))
        partial.replace(self._folder / "best.json")
        log.info("version %d (step %d) is the best so far: %s = %.4f", version, step, metric, value)

    def _take(self, candidates: list[Path], name: str) -> None:
        """Moves a candidate's files to their place, in the stead of those of the best version before."""
        count, total = len(candidates), 0
        files: dict[str, str] = {}
        (self._folder / INDEX).unlink(missing_ok=True)
        for old in self._folder.glob("*.safetensors"):
            old.unlink()
        for index, candidate in enumerate(candidates):
            target = f"{name}.safetensors" if count == 1 else shard_name(index, count)
            with safe_open(candidate, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), target)
            total += candidate.stat().st_size
            candidate.replace(self._folder / target)
        if count > 1:
            write_index(self._folder, files, total)

    def _value(self) -> float:
        try:
            return float(json.loads((self._folder / "best.json").read_text())["value"])
        except (FileNotFoundError, ValueError, KeyError):
            return float("-inf")
