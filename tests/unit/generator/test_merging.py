"""Adapters that can't be merged are refused with a reason, and leave nothing behind; other weights pass as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.errors import ModelError, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.manifest import describe
from offbeat.weights.staged import StagedWeights
from services.generator.engines.staged_tensors import staged_tensors
from services.generator.merging import AdapterMerger
from tests.harness.tiny_models import make_tiny_model, stage

NAME = "base_model.model.model.layers.0.mlp.up_proj"
CONFIG = json.dumps({"r": 2, "lora_alpha": 3})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("base") / "model"
    model = make_tiny_model(folder, tied=True)
    model.save_pretrained(folder)
    return folder, model


def adapter(folder: Path, *, config: str = CONFIG, **tensors: torch.Tensor) -> StagedWeights:
    """An adapter of these tensors; in their names, two underscores stand for a dot."""
    entries = [
        (f"{NAME}.{name.replace('__', '.')}", "float32", list(t.shape), t.numpy().tobytes())
        for name, t in tensors.items()
    ]
    manifest = describe(entries)
    manifest.version, manifest.kind = 7, checkpoint.WEIGHTS_KIND_ADAPTER
    manifest.adapter_config = config
    path = folder / "v7.bin"
    path.write_bytes(b"".join(data for *_, data in entries))
    return StagedWeights(path, manifest)


def test_only_the_adapted_weight_changes_by_scale_times_b_a(base: Any, tmp_path: Path) -> None:
    folder, model = base
    a, b = torch.randn(2, 64), torch.randn(128, 2)
    sent = adapter(tmp_path, lora_A__weight=a, lora_B__weight=b)
    merged = AdapterMerger(str(folder), "float32").merge(sent)
    assert merged.manifest is sent.manifest, "what is confirmed is what was sent"
    found = dict(staged_tensors(merged))
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(found.pop(name), expected.pop(name).detach() + 1.5 * b @ a)
    assert all(torch.equal(found[n], expected[n]) for n in found)


def test_bfloat16_is_rounded_once(base: Any, tmp_path: Path) -> None:
    folder, model = base
    a, b = torch.randn(2, 64), torch.randn(128, 2)
    merged = AdapterMerger(str(folder), "bfloat16").merge(
        adapter(tmp_path, lora_A__weight=a, lora_B__weight=b)
    )
    name = "model.layers.0.mlp.up_proj.weight"
    weight = dict(model.named_parameters())[name].detach().bfloat16().float()
    assert torch.equal(dict(staged_tensors(merged))[name], (weight + 1.5 * b @ a).bfloat16())


def test_full_weights_pass(base: Any, tmp_path: Path) -> None:
    folder, model = base
    sent = stage(model, tmp_path, 3)
    assert AdapterMerger(str(folder), "float32").merge(sent) is sent


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_A__weight": torch.ones(2, 64)}, "expected pairs"),
        ({"lora_A__weight": torch.ones(2, 32), "lora_B__weight": torch.ones(128, 2)}, "same model"),
        (
            {
                "x__lora_A__weight": torch.ones(2, 64),
                "x__lora_B__weight": torch.ones(128, 2),
            },
            "which .* does not have",
        ),
        (
            {
                "config": "{}",
                "lora_A__weight": torch.ones(2, 64),
                "lora_B__weight": torch.ones(128, 2),
            },
            "without a usable configuration",
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(
    base: Any, tmp_path: Path, given: Any, message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        AdapterMerger(str(base[0]), "float32").merge(adapter(tmp_path, **given))
    assert not list(tmp_path.iterdir())


def test_a_folder_without_weights_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="needs the whole model folder"):
        AdapterMerger(str(tmp_path), "float32")
