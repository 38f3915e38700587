"""Models whose tensors transformers renames when it loads their files: versions have the files' names."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import TransformersEngine, VllmEngine
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.manifest import describe
from offbeat.weights.staged import StagedWeights
from services.generator.engines import create_engine
from tests.harness import paper_fixtures
from tests.harness.tiny_models import reference_logprobs

SEQUENCES = [[1, 5, 9, 13, 17, 21], [7, 8]]
ENGINES = [
    TransformersEngine(name="transformers", max_num_seqs=8),
    VllmEngine(name="vllm", max_num_seqs=8, kv_cache_memory_mb=64),
]


def staged(folder: Path, work: Path) -> StagedWeights:
    """The tensors of a model folder's file, as a receiver has them after a fetch."""
    tensors = [
        (name, "float32", tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in load_file(folder / "model.safetensors").items()
    ]
    manifest: checkpoint.Manifest = describe(tensors)
    manifest.version = 1
    path = work / "v1.bin"
    path.write_bytes(b"".join(data for *_, data in tensors))
    return StagedWeights(path, manifest)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [ENGINES[0], pytest.param(ENGINES[1], marks=pytest.mark.slow)],
    ids=lambda settings: settings.name,
)
async def test_a_version_of_pythia_is_loaded(
    settings: TransformersEngine | VllmEngine, tmp_path: Path
) -> None:
    paper_fixtures.pythia(tmp_path / "policy", seed=1)
    other = paper_fixtures.pythia(tmp_path / "other", seed=2)
    assert "embed_out.weight" in load_file(tmp_path / "other" / "model.safetensors")
    model = ModelSettings(path=str(tmp_path / "policy"), dtype="float32", max_context=64)
    engine = create_engine(settings, model, threads=1)
    await engine.start()
    try:
        await engine.load_weights(staged(tmp_path / "other", tmp_path), 1)
        found = await engine.score_tokens(SEQUENCES)
    finally:
        await engine.stop()
    expected = reference_logprobs(other, SEQUENCES)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-3)
