"""(h) Beside TRL's OnlineDPO with transformers' generate: the same model, prompts, lengths, reward, loss and optimizer.

Each side runs a few blocks of steps in turns, each block a process of its own on the same cores; the first steps of a
block, which warm up, do not count. Offbeat runs as its users run it: `offbeat run` with vLLM on the CPU, max_lag 1. TRL
generates with its own defaults. Both end a completion at the end-of-sequence token.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.suite.cells import AT_LEAST, CellSpec, Row
from benchmarks.suite.fixtures import merged, prompts_file, recipe_tree, smollm2, tiny_model
from benchmarks.suite.options import Options
from benchmarks.suite.runs import run

TOKENS, K = 24, 2
WARM_UP = 3


def cells(options: Options) -> list[CellSpec]:
    """Both models."""

    def tiny() -> list[Row]:
        return measure(tiny_model(options.scratch), options, prompts=32, steps=24, target=2.5)

    def real() -> list[Row]:
        return measure(smollm2(options), options, prompts=8, steps=8, target=1.3)

    return [CellSpec("h", "2M", tiny), CellSpec("h", "SmolLM2-135M", real)]


def measure(model: Path, options: Options, *, prompts: int, steps: int, target: float) -> list[Row]:
    """Seconds a step of both, and how many times as fast Offbeat is, block by block."""
    steps = 8 if options.quick else steps
    found: dict[str, list[float]] = {"trl": [], "offbeat": [], "synchronous": []}
    spread: list[float] = []
    for _ in range(options.rounds(2)):
        found["trl"].append(statistics.median(_trl(model, options, prompts, 6)))
        ours = _offbeat(model, options, prompts, steps, max_lag=1)
        found["offbeat"].append(statistics.mean(ours))
        spread += ours
        found["synchronous"].append(
            statistics.mean(_offbeat(model, options, prompts, steps, max_lag=0))
        )
    pairs = list(zip(found["trl"], found["offbeat"], strict=True))
    return [
        Row("TRL ÷ Offbeat", [trl / ours for trl, ours in pairs], "x", (AT_LEAST, target)),
        Row("TRL, a step", found["trl"], "s", note=f"{prompts} prompts × {K} × {TOKENS} tokens"),
        Row("Offbeat at max_lag 1, a step", found["offbeat"], "s"),
        Row("Offbeat at max_lag 0, a step", found["synchronous"], "s"),
        Row("single steps of Offbeat", spread, "s"),
    ]


def _offbeat(
    model: Path, options: Options, prompts: int, steps: int, *, max_lag: int
) -> list[float]:
    tree = merged(
        recipe_tree(model, options, prompts=1000),
        {
            "schedule": {"steps": steps, "prompts_per_step": prompts, "max_lag": max_lag},
            "sampling": {"k": K, "max_tokens": TOKENS},
            "generator.engine.max_num_seqs": prompts * K,
        },
    )
    name = f"peers-{model.name}-{max_lag}"
    return run(tree, options.scratch, name=name).step_seconds(skip=WARM_UP)


def _trl(model: Path, options: Options, prompts: int, steps: int) -> list[float]:
    """Seconds of each step of a block."""
    told = {
        "model": str(model),
        "prompts": str(prompts_file(options.scratch, 1000)),
        "batch": prompts,
        "steps": steps,
        "folder": str(options.scratch / "trl"),
        "cpu": options.gpu_share is None,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(options.cores))}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suite.peers", json.dumps(told)],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"TRL failed; its output ends so:\n{done.stderr[-3000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds[WARM_UP:]


def train_with_trl(told: dict[str, Any]) -> list[float]:
    """One block in this process; seconds of each step."""
    import time

    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    from benchmarks.suite.rewards import letters

    class Clock(TrainerCallback):
        """Notes when each step ends."""

        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(told["model"], padding_side="left")
    tokenizer.chat_template = None
    trainer = OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(told["model"], dtype="float32"),
        reward_funcs=letters,
        args=OnlineDPOConfig(
            output_dir=told["folder"],
            per_device_train_batch_size=told["batch"],
            max_steps=told["steps"],
            max_new_tokens=TOKENS,
            temperature=1.0,
            beta=0.1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            use_cpu=told["cpu"],
            bf16=False,
            save_strategy="no",
            logging_steps=1000,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=load_dataset("json", data_files=told["prompts"], split="train"),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    clock.ends = [time.perf_counter()]
    trainer.train()
    return [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


if __name__ == "__main__":
    print(json.dumps(train_with_trl(json.loads(sys.argv[1]))))
