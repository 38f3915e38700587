"""Keeps the version with the best evaluation so far. Used by `loop`.

The weights are written when the evaluation of a version is opened, since by the time its results are in, the checkpoint
service may have dropped that version.
"""

import json
import logging
import shutil
from pathlib import Path

from services.learner.snapshot import Snapshot

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

    def add_candidate(self, step: int, snapshot: Snapshot) -> None:
        """Writes the weights of a version that is being evaluated."""
        from safetensors.torch import save_file

        self._candidates.mkdir(parents=True, exist_ok=True)
        save_file(
            snapshot.tensors, self._candidates / f"{step}.safetensors", metadata={"format": "pt"}
        )
        if snapshot.adapter_config is not None:
            (self._candidates / ADAPTER_CONFIG).write_text(snapshot.adapter_config)

    def judge(self, step: int, version: int, metric: str, value: float) -> None:
        """The evaluation of a candidate is over: it becomes the best one, or goes."""
        candidate = self._candidates / f"{step}.safetensors"
        if not candidate.exists():
            return
        if value <= self._value():
            candidate.unlink()
            return
        config = self._candidates / ADAPTER_CONFIG
        for file in [config] if config.exists() else self._model_folder.iterdir():
            if file.is_file() and file.suffix not in {".safetensors", ".bin", ".gguf"}:
                shutil.copy(file, self._folder / file.name)
        name = "adapter_model.safetensors" if config.exists() else "model.safetensors"
        candidate.replace(self._folder / name)
        said = {"step": step, "version": version, "metric": metric, "value": value}
        partial = self._folder / ".best.json"
        partial.write_text(json.dumps(said, indent=1))
        partial.replace(self._folder / "best.json")
        log.info("version %d (step %d) is the best so far: %s = %.4f", version, step, metric, value)

    def _value(self) -> float:
        try:
            return float(json.loads((self._folder / "best.json").read_text())["value"])
        except (FileNotFoundError, ValueError, KeyError):
            return float("-inf")
