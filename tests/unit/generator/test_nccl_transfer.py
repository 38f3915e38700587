"""The port of vLLM's NCCL transfer: vLLM's own sender against a stub engine; what NCCL would carry is handed over."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import VllmEngine
from offbeat.errors import ConfigError
from offbeat.weights.manifest import describe
from offbeat.weights.staged import StagedWeights

pytest.importorskip("vllm")
from vllm.distributed.weight_transfer import nccl_engine

from services.generator.engines.nccl_transfer import NcclTransfer
from services.generator.engines.vllm_engine import VllmAsyncEngine


class StubEngine:
    """The engine's four calls. It receives as vLLM's workers do: at the same time as the sender sends."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.joined: list[dict[str, Any]] = []
        self.expected: dict[str, Any] = {}
        self.received: dict[str, torch.Tensor] = {}
        self.arrived = asyncio.Event()
        self.fails = False

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append("init")
        self.joined.append(request.init_info)

    async def start_weight_update(self) -> None:
        self.calls.append("start")
        self.received.clear()
        self.arrived.clear()

    async def update_weights(self, request: Any) -> None:
        self.expected = request.update_info
        if self.fails:
            raise RuntimeError("a worker failed")
        await self.arrived.wait()
        self.calls.append("update")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")


@pytest.fixture
async def stub(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    """Its NCCL group hands each tensor over in this process."""
    engine, loop = StubEngine(), asyncio.get_running_loop()

    class Group:
        def destroy(self) -> None:
            engine.calls.append("destroy")

    def broadcast(sender: Any, source: Any, meta: Any) -> None:
        for name, tensor in sender._checked_iter(source, meta):
            engine.received[name] = tensor.clone()
        loop.call_soon_threadsafe(engine.arrived.set)

    def endpoint(info: Any) -> Group:
        return Group()

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", endpoint)
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_broadcast", broadcast)
    return engine


def staged(folder: Path, version: int) -> StagedWeights:
    rng = np.random.default_rng(version)
    tensors = [
        ("embed", "bfloat16", (5, 3), rng.integers(0, 2**16, (5, 3), np.uint16)),
        ("scale", "float32", (), np.array(version, np.float32)),
        ("empty", "float16", (0, 2), np.empty((0, 2), np.float16)),
    ]
    manifest = describe(tensors)
    manifest.version = version
    path = folder / f"{version}.weights"
    path.write_bytes(b"".join(tensor.tobytes() for *_, tensor in tensors))
    return StagedWeights(path, manifest)


def transfer_to(engine: StubEngine) -> NcclTransfer:
    return NcclTransfer(
        engine, workers=8, device=torch.device("cpu"), endpoint=lambda: ("10.0.0.1", 4711)
    )


async def test_every_version_reaches_the_workers_under_its_number(
    stub: StubEngine, tmp_path: Path
) -> None:
    transfer = transfer_to(stub)
    for version in (3, 4):
        weights = staged(tmp_path, version)
        await transfer.load(weights, version)
        data = weights.path.read_bytes()
        for spec in weights.tensors:
            raw = stub.received[spec.name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == data[spec.offset : spec.offset + spec.nbytes]
            assert list(stub.received[spec.name].shape) == list(spec.shape)
        assert stub.expected["names"] == ["embed", "scale", "empty"]
        assert stub.expected["dtype_names"] == ["bfloat16", "float32", "float16"]
    transfer.close()
    assert stub.calls == [
        "init", "start", "update", "finish 3", "start", "update", "finish 4", "destroy",
    ]  # fmt: skip
    assert stub.joined[0]["world_size"] == 9
    assert stub.joined[0]["rank_offset"] == 1
    assert (stub.joined[0]["master_address"], stub.joined[0]["master_port"]) == ("10.0.0.1", 4711)


async def test_a_failed_load_is_an_error_and_the_group_is_made_anew(
    stub: StubEngine, tmp_path: Path
) -> None:
    transfer = transfer_to(stub)
    stub.fails = True
    with pytest.raises(RuntimeError, match="a worker failed"):
        await transfer.load(staged(tmp_path, 1), 1)
    stub.fails = False
    await transfer.load(staged(tmp_path, 2), 2)
    assert stub.calls == ["init", "start", "destroy", "init", "start", "update", "finish 2"]


def test_without_a_gpu_it_is_refused() -> None:
    assert VllmEngine(name="vllm").weight_transfer == "file"
    settings = VllmEngine(name="vllm", weight_transfer="nccl")
    with pytest.raises(ConfigError, match="there is no GPU here: use file"):
        VllmAsyncEngine(settings, ModelSettings(path="unused", max_context=8))
