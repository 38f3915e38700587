"""Which tensors a version must have for a model folder. Used by the engines that have a model.

Checked before the engine is touched: a version of another architecture, or one that lacks a tensor, is refused while
the generator goes on serving. (Of a layer that gets only a part of its weights, vLLM would keep the rest as it was.)
"""

from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from offbeat.errors import ModelError, WeightsError
from offbeat.weights.staged import StagedWeights

Shape = tuple[int, ...]


class ExpectedTensors:
    """Names and shapes of a model's tensors. Of tied ones, one is enough."""

    def __init__(self, shapes: Mapping[str, Shape], tied: frozenset[str]) -> None:
        self._shapes = dict(shapes)
        self._optional = tied

    @classmethod
    def of_folder(cls, path: str) -> "ExpectedTensors":
        """Builds the model without memory. Raises `ModelError` when `transformers` does not know it."""
        try:
            config = AutoConfig.from_pretrained(path)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path {path}: {error}") from error
        # The names of the model's files, which are those of a version; transformers renames some when it loads.
        tensors = revert_weight_conversion(model, model.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        tied = set(getattr(model, "_tied_weights_keys", None) or ()) if _ties(config) else set()
        return cls(shapes, frozenset(tied))

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors, tied ones included."""
        return frozenset(self._shapes)

    def check(self, weights: StagedWeights) -> None:
        """Raises `WeightsError` naming what is missing, unknown, or of another shape."""
        found = {spec.name: tuple(spec.shape) for spec in weights.tensors}
        missing = sorted(self._shapes.keys() - self._optional - found.keys())
        unknown = sorted(found.keys() - self._shapes.keys())
        reshaped = [
            f"{name} (expected {list(shape)}, found {list(found[name])})"
            for name, shape in self._shapes.items()
            if name in found and found[name] != shape
        ]
        problems = [
            f"{len(names)} {what}, such as {names[0]}"
            for what, names in (
                ("tensors are missing", missing),
                ("are unknown", unknown),
                ("have another shape", reshaped),
            )
            if names
        ]
        if problems:
            raise WeightsError(
                f"version {weights.version} is not of the model in model.path: {'; '.join(problems)}. "
                "Learner and generator must use the same model folder"
            )


def _ties(config: object) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))
