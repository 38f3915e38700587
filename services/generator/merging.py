"""Adds an adapter to the weights of the model folder, so that an engine is given whole weights whatever was sent.

Used between the fetch and the load, while the engine still serves: see `staging`. Engine, version spans, parity check
and in-flight updates know nothing of adapters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offbeat.errors import ModelError, OffbeatError, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.chunks import NoRoom
from offbeat.weights.staged import StagedWeights
from services.generator.engines.expected_tensors import ExpectedTensors
from services.generator.engines.staged_tensors import staged_tensors

INDEX = "model.safetensors.index.json"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

Pair = tuple[Tensor, Tensor]


class AdapterMerger:
    """Makes whole weights of an adapter and a model folder. The folder's weights stay on disk, in the page cache."""

    def __init__(self, model_folder: str, dtype: str) -> None:
        self._folder = Path(model_folder)
        self._dtype = getattr(torch, dtype)
        self._expected: ExpectedTensors | None = None
        missing = [file for file in self._files() if not file.is_file()]
        if missing:
            raise ModelError(
                f"{missing[0]}: expected the weights that the adapter is for, found nothing; with learner.lora the "
                "generator needs the whole model folder, as safetensors"
            )

    def merge(self, weights: StagedWeights) -> StagedWeights:
        """The whole weights in a file beside the adapter's, which is removed. Full weights are given back as they are.

        W + (alpha / r) B A is computed in float32 and rounded once. Raises `WeightsError` when the adapter is not of
        this model, `ModelError` when the folder's weights can't be read, `NoRoom` when the disk is full.
        """
        if weights.manifest.kind != checkpoint.WEIGHTS_KIND_ADAPTER:
            return weights
        path = weights.path.with_suffix(".merged")
        try:
            with path.open("wb") as file:
                specs = self._write(weights, file)
        except OffbeatError:
            path.unlink(missing_ok=True)
            raise
        except OSError as error:
            path.unlink(missing_ok=True)
            raise NoRoom(
                f"version {weights.version} can't be merged into {path}: {error}; free space, or set "
                "generator.staging_directory"
            ) from error
        finally:
            weights.discard()
        return StagedWeights(path, weights.manifest, specs)

    def _write(self, weights: StagedWeights, file: BinaryIO) -> list[checkpoint.TensorSpec]:
        pairs, scale = _pairs(weights), _scale(weights.manifest)
        dtype = str(self._dtype).removeprefix("torch.")
        specs: list[checkpoint.TensorSpec] = []
        offset = 0
        for name, tensor in self._base():
            whole = tensor.to(self._dtype)
            if name in pairs:
                whole = _added(whole, *pairs.pop(name), scale, name)
            data = whole.contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(data)
            size = data.nbytes
            specs.append(
                checkpoint.TensorSpec(
                    name=name, dtype=dtype, shape=whole.shape, offset=offset, nbytes=size
                )
            )
            offset += size
        if pairs:
            raise WeightsError(
                f"version {weights.version} adapts {sorted(pairs)[0]}, which {self._folder} does not have: learner and "
                "generator must use the same model folder"
            )
        return specs

    @property
    def merged_bytes(self) -> int:
        """Size of the whole weights, at most."""
        return sum(file.stat().st_size for file in self._files()) * max(
            1, self._dtype.itemsize // 2
        )

    def _files(self) -> list[Path]:
        index = self._folder / INDEX
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [self._folder / name for name in sorted(set(named))]
        return [self._folder / "model.safetensors"]

    def _base(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of everything that the model is made of; what else is in the files is left out."""
        if self._expected is None:
            self._expected = ExpectedTensors.of_folder(str(self._folder))
        for path in self._files():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        if name in self._expected.names:
                            yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{path}: expected the weights that the adapter is for, found: {error}"
                ) from error


def _pairs(weights: StagedWeights) -> dict[str, Pair]:
    """(A, B) by the name of the weight that they belong to. WeightsError when a name is none of an adapter's."""
    found = dict(staged_tensors(weights))
    pairs = {
        name.removeprefix(PREFIX).removesuffix(A) + ".weight": (
            found.pop(name),
            found.pop(name.removesuffix(A) + B),
        )
        for name in list(found)
        if name.startswith(PREFIX) and name.endswith(A) and name.removesuffix(A) + B in found
    }
    if found or not pairs:
        raise WeightsError(
            f"version {weights.version}: expected pairs of {A} and {B}, found {sorted(found)[:3] or 'nothing'}"
        )
    return pairs


def _scale(manifest: checkpoint.Manifest) -> float:
    try:
        config = json.loads(manifest.adapter_config)
        rank, alpha = float(config["r"]), float(config["lora_alpha"])
        return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise WeightsError(
            f"version {manifest.version} is an adapter without a usable configuration ({error!r})"
        ) from error


def _added(weight: Tensor, a: Tensor, b: Tensor, scale: float, name: str) -> Tensor:
    if (b.shape[0], a.shape[1], a.shape[0]) != (*weight.shape, b.shape[1]):
        raise WeightsError(
            f"{name} is {list(weight.shape)}, its adapter {list(b.shape)} times {list(a.shape)}: learner and generator "
            "must use the same model folder"
        )
    update = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
    return update.to(weight.dtype)
