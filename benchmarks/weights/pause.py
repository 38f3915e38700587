"""The generator's pause for an in-flight update of SmolLM2-135M, beside the engine's own load of the same tensors.

Two vLLM engines of the same settings: the generator's, with requests running, and a plain `LLM` whose model is
reloaded in place from tensors that are in memory already. One load of each in every round.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.suite.cells import AT_MOST, Row
from benchmarks.suite.measure import ratios
from benchmarks.weights import training
from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import VllmEngine
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.manifest import describe
from offbeat.weights.staged import StagedWeights

CONTEXT, REQUESTS = 512, 8


def measure(scratch: Path, *, rounds: int) -> list[Row]:
    """The rows of the cell."""
    folder = training.model_folder(scratch)
    return asyncio.run(_measure(folder, scratch, rounds))


async def _measure(folder: Path, scratch: Path, rounds: int) -> list[Row]:
    from services.generator.engines import GenerationRequest, create_engine

    settings = VllmEngine(name="vllm", max_num_seqs=REQUESTS, kv_cache_memory_mb=128)
    model = ModelSettings(path=str(folder), dtype="bfloat16", max_context=CONTEXT)
    engine = create_engine(settings, model, threads=1)
    await engine.start()
    bare = await asyncio.to_thread(BareEngine, folder)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    with tempfile.TemporaryDirectory(prefix="offbeat-weights-", dir=memory) as staging:
        staged = [_stage(folder, Path(staging), version) for version in (1, 2)]
        await engine.load_weights(staged[0], 1)
        requests = [
            asyncio.create_task(
                engine.generate(
                    GenerationRequest(
                        f"r{index}", [1, 20 + index], max_tokens=CONTEXT - 8, ignore_eos=True
                    )
                )
            )
            for index in range(REQUESTS)
        ]
        for version in range(2, rounds + 3):
            goal = engine.progress() + 2
            while engine.progress() < goal:
                await asyncio.sleep(0.005)
            weights = staged[version % 2]
            own = await asyncio.to_thread(bare.load, weights)
            report = await engine.load_weights(weights, version)
            if version > 2:  # the first round is to warm up
                note("own", own)
                note("pause", report.pause_seconds)
                note("load", report.load_seconds)
        running = sum(not task.done() for task in requests)
        completions = await asyncio.gather(*requests)
    await engine.stop()
    spans = [span for completion in completions for span in completion.version_spans]
    return [
        Row("the engine's own load in place", found["own"], "s"),
        Row("load in an update", found["load"], "s"),
        Row("pause of an in-flight update", found["pause"], "s"),
        Row(
            "pause ÷ the engine's own load",
            ratios(found["pause"], found["own"]),
            "x",
            (AT_MOST, 1.1),
        ),
        Row(
            "requests that ran over all updates and ended well",
            [float(sum(len(c.token_ids) == CONTEXT - 8 for c in completions))],
            f"of {REQUESTS}",
            note=f"{running} were running after the last update, {len(spans)} version spans",
        ),
    ]


class BareEngine:
    """vLLM's offline engine, in this process: its model is reloaded in place by vLLM's own functions."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model=str(folder),
            dtype="bfloat16",
            max_model_len=CONTEXT,
            max_num_seqs=REQUESTS,
            kv_cache_memory_bytes=128 * 1024**2,
            enforce_eager=True,
        )

    def load(self, weights: StagedWeights) -> float:
        """Seconds of one load from tensors in memory."""
        import torch

        from services.generator.engines.staged_tensors import staged_tensors

        tensors = [(name, tensor.clone()) for name, tensor in staged_tensors(weights)]
        worker = self._llm.llm_engine.model_executor.driver_worker.worker
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        runner = worker.model_runner
        loaded = runner.get_model()
        started = time.perf_counter()
        with torch.inference_mode():
            initialize_layerwise_reload(loaded)
            loaded.load_weights(iter(tensors))
            finalize_layerwise_reload(loaded, worker.model_config)
        return time.perf_counter() - started


def _stage(folder: Path, staging: Path, version: int) -> StagedWeights:
    """The model folder's weights as a receiver has them."""
    import torch
    from safetensors.torch import load_file

    tensors = []
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            raw = tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy()
            tensors.append((name, "bfloat16", tuple(tensor.shape), raw))
    manifest: checkpoint.Manifest = describe(tensors)
    manifest.version = version
    path = staging / f"{version}.weights"
    with path.open("wb") as file:
        for *_, raw in tensors:
            file.write(raw)
    return StagedWeights(path, manifest)
