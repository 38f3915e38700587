"""A tiny policy, recipes and recorded groups for tests of the trainer, and ranks as processes.

`python -m tests.harness.training RANK WORLD RENDEZVOUS` is one rank; see `Ranks`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.config import Recipe
from services.learner.batching import Group, Sample

VOCABULARY = 48
CONTEXT = 64


def make_policy(folder: Path, *, tied: bool = True, seed: int = 0, **sizes: int) -> Path:
    """A Llama with random weights, saved with save_pretrained; `sizes`: of its configuration, tiny where not given."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tiny = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    config = LlamaConfig(
        **(tiny | sizes),
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def make_recipe(policy: Path, *, loss: dict[str, Any], **learner: Any) -> Recipe:
    """A recipe that trains the policy; `learner`: further settings of the learner, and dtype."""
    dtype = learner.pop("dtype", "float32")
    return Recipe.model_validate(
        {
            "model": {"path": str(policy), "dtype": dtype, "max_context": CONTEXT},
            "data": {"train": {"kind": "jsonl", "path": "unused.jsonl"}},
            "sampling": {"k": 4, "max_tokens": 24, "temperature": 0.8},
            "schedule": {"steps": 8, "prompts_per_step": 6},
            "learner": {"loss": loss, "optimizer": {"lr": 1e-3}, **learner},
            "reward": {"functions": [{"name": "exact_match"}]},
        }
    )


def recorded_groups(step: int, *, count: int = 6, k: int = 4) -> list[Group]:
    """Groups of unequal lengths, some of them with a loss mask, some with equal rewards."""
    generator = np.random.default_rng(step)
    groups = []
    for place in range(count):
        prompt = generator.integers(3, VOCABULARY, generator.integers(1, 20)).astype(np.int32)
        samples = []
        for index in range(k):
            length = int(generator.integers(1, 24))
            reward = 1.0 if place == 1 else float(generator.integers(0, 3))
            mask = generator.random(length) < 0.7 if index == 2 else None
            samples.append(
                Sample(
                    token_ids=generator.integers(2, VOCABULARY, length).astype(np.int32),
                    behaviour_logprobs=(-3.5 - generator.random(length)).astype(np.float32),
                    reward=reward,
                    has_eos=bool(generator.integers(0, 2)),
                    lag=int(generator.integers(0, 2)),
                    loss_mask=mask,
                )
            )
        groups.append(Group(step * count + place, prompt, tuple(samples)))
    return groups


def run_job(
    job: dict[str, Any], rank: int = 0, world: int = 1, rendezvous: str | None = None
) -> Any:
    """What a rank does: load, some steps, save. Returns a snapshot and the metrics of the last step."""
    from services.learner.part_publisher import PartPublisher
    from services.learner.trainer import Trainer

    recipe = Recipe.model_validate(job["recipe"])
    trainer = Trainer(recipe, rank=rank, world=world, rendezvous=rendezvous)
    parts = PartPublisher(recipe, rank).__enter__() if job.get("publish") else None
    try:
        if job.get("load"):
            trainer.load(Path(job["load"]))
        metrics: dict[str, float] = {}
        for step in job["steps"]:
            groups = recorded_groups(step, count=job.get("count", 6)) if rank == 0 else []
            metrics = trainer.train_step(groups)
            if parts is not None:
                metrics |= _publish_part(trainer, parts, rank, step)
        if job.get("save"):
            trainer.save(Path(job["save"]))
        if job.get("export"):
            trainer.export(Path(job["export"]))
        snapshot = trainer.snapshot([[5, 6, 7], [8, 9]] if rank == 0 else [])
        if job.get("gather"):
            trainer._shards = None
            del snapshot
            with watched_memory(trainer) as memory:
                snapshot = trainer.snapshot()
            metrics |= {f"whole_{name}": value for name, value in memory.items()}
        return snapshot, metrics
    finally:
        if parts is not None:
            parts.__exit__(None, None, None)
        trainer.close()


def _publish_part(trainer: Any, parts: Any, rank: int, step: int) -> dict[str, float]:
    """Publishes a rank's part of a snapshot and waits for it; what it took of memory."""
    from services.learner.part_publisher import PartOrder

    with watched_memory(trainer) as memory:
        snapshot = trainer.snapshot()
    held = sum(tensor.nbytes for tensor in snapshot.tensors.values())
    parts.publish(snapshot, PartOrder(term=1, step=step, publish_id=f"1-{step}"))
    parts._publishing.result()
    return memory | {"held": held}


@contextlib.contextmanager
def watched_memory(trainer: Any) -> Iterator[dict[str, float]]:
    """Within: `gathered`, the most bytes of parameters gathered at once; `grown`, how far the process grew at most."""
    found = {"gathered": 0.0, "grown": 0.0}
    original, live = trainer._engine.gathered, [0]

    @contextlib.contextmanager
    def counted(parameter: Any, **how: bool) -> Iterator[None]:
        size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        live[0] += size
        found["gathered"] = max(found["gathered"], live[0])
        with original(parameter, **how):
            yield
        live[0] -= size

    trainer._engine.gathered = counted
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what was freed goes back to the system, and is not filled again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    try:
        yield found
    finally:
        trainer._engine.gathered = original
        found["grown"] = _status("VmHWM") - before


def _status(field: str) -> float:
    """Bytes that the system counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Ranks:
    """Ranks of a learner as processes, which do one job after another; made once, as they start slowly."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder = folder
        self._jobs = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._ranks = []
        for rank in range(world):
            command = [sys.executable, "-m", "tests.harness.training"]
            with (folder / f"rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*command, str(rank), str(world), f"file://{folder}/meet"],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            self._ranks.append(process)

    def run(self, recipe: Recipe, **job: Any) -> tuple[dict[str, Any], dict[str, float]]:
        """`run_job` on all ranks; returns the weights, and the metrics of rank 0's last step."""
        weights, metrics = self.run_all(recipe, **job)
        return weights, metrics[0]

    def run_all(self, recipe: Recipe, **job: Any) -> tuple[dict[str, Any], list[dict[str, float]]]:
        """The same with the metrics of each rank."""
        from safetensors.torch import load_file

        out = self._folder / str(self._jobs)
        out.mkdir()
        self._jobs += 1
        payload = {"recipe": recipe.model_dump(), "out": str(out), **job}
        (out / "job.json").write_text(json.dumps(payload, default=str))
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{out}/job.json\n".encode())
            process.stdin.flush()
        for process in self._ranks:
            assert process.stdout is not None
            if process.stdout.readline() != b"done\n":
                raise AssertionError(f"a rank failed:\n{self._logs()}")
        weights: dict[str, Any] = {}
        metrics = []
        for rank in range(len(self._ranks)):
            weights |= load_file(out / f"weights{rank}.safetensors")
            metrics.append(json.loads((out / f"metrics{rank}.json").read_text()))
        return weights, metrics

    def close(self) -> None:
        """Ends the processes."""
        for process in self._ranks:
            process.kill()
            process.communicate()

    def _logs(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self._folder.glob("*.log")))


def _serve(rank: int, world: int, rendezvous: str) -> None:
    """The life of a rank: reads paths of jobs, does them, says so on what was standard output."""
    from safetensors.torch import save_file

    # Libraries print; the answers go out on a descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(Path(line.strip()).read_text())
        snapshot, metrics = run_job(job, rank, world, rendezvous)
        out = Path(job["out"])
        save_file(snapshot.tensors, out / f"weights{rank}.safetensors")
        (out / f"metrics{rank}.json").write_text(json.dumps(metrics))
        answers.write(b"done\n")


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
