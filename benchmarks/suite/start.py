"""(f) Seconds from `offbeat run` to the first completion and the first step, and (g) what each service keeps in memory.

The bare start: vLLM and a DeepSpeed loop on the same model, begun at the same moment as two processes, which is what no
system on top of them can do without. What Offbeat takes beyond that is its own share: the command line, Redis, the
checkpoint service, the first version's way into the engine, the cohort's way to the learner.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.suite.cells import AT_MOST, CellSpec, Row
from benchmarks.suite.fixtures import merged, recipe_tree, tiny_model
from benchmarks.suite.options import Options
from benchmarks.suite.runs import members, run, service_of

PROMPTS, K, TOKENS = 32, 2, 24
MIB = 1024**2


def cells(options: Options) -> list[CellSpec]:
    """The start, and the memory, with the model of 2 million parameters."""
    return [
        CellSpec("f", "2M", lambda: measure_start(options)),
        CellSpec("g", "2M", lambda: measure_memory(options)),
    ]


def recipe(options: Options, steps: int) -> dict[str, Any]:
    """A short run with vLLM and DeepSpeed."""
    changes = {
        "schedule": {"steps": steps, "prompts_per_step": PROMPTS, "max_lag": 1},
        "sampling": {"k": K, "max_tokens": TOKENS},
    }
    model = tiny_model(options.scratch)
    return merged(recipe_tree(model, options, prompts=1000), changes)


def measure_start(options: Options) -> list[Row]:
    """Seconds, round by round."""
    found: dict[str, list[float]] = {"token": [], "step": [], "bare token": [], "bare step": []}
    for _ in range(options.rounds(3)):
        token, step = _bare_start(options)
        found["bare token"].append(token)
        found["bare step"].append(step)
        result = run(recipe(options, 2), options.scratch, name="start")
        found["token"].append(_first_completion(result.folder) - result.started)
        found["step"].append(result.ends()[0] - result.started)

    def own(what: str) -> list[float]:
        pairs = zip(found[what], found[f"bare {what}"], strict=True)
        return [ours - bare for ours, bare in pairs]

    return [
        Row("to the first completion", found["token"], "s"),
        Row("bare vLLM and DeepSpeed", found["bare token"], "s"),
        Row("own share, first completion", own("token"), "s", (AT_MOST, 2.0)),
        Row("to the first step's end", found["step"], "s"),
        Row("bare, first step's end", found["bare step"], "s"),
        Row("own share, first step", own("step"), "s", (AT_MOST, 2.0)),
    ]


def _first_completion(folder: Path) -> float:
    """When the engine began its first completion, seconds since 1970."""
    [file] = (folder / "activity").glob("generator.*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return min(float(line["start"]) for line in lines if line.get("state") == "generate")


def _bare_start(options: Options) -> tuple[float, float]:
    """Seconds to a first token of bare vLLM, and to the end of a first step on what it has generated."""
    folder = options.scratch / "start"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.yaml"
    tree = merged(recipe(options, 1), {"run.id": "start", "learner.threads": 1})
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.time()
    log = (folder / "bare.log").open("wb")
    children = [
        subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.suite.{module}", str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )
        for module in ("bare_engine", "start")
    ]  # fmt: skip
    try:
        engine, learner = children
        _line(engine)
        token = time.time() - began
        prompts = [[3 + index] * 16 for index in range(PROMPTS)]
        _tell(engine, {"prompts": prompts, "k": K, "tokens": TOKENS, "first": 0})
        _line(learner)
        _line(engine)
        _tell(learner, {})
        _line(learner)
        return token, time.time() - began
    finally:
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            child.wait()
        log.close()


def _tell(child: "subprocess.Popen[str]", told: dict[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(told) + "\n")
    child.stdin.flush()


def _line(child: "subprocess.Popen[str]") -> None:
    """Waits for the next line of JSON; vLLM and DeepSpeed may print others."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            return
    raise RuntimeError("a bare process ended early; see start/bare.log")


def bare_learner(recipe_file: str) -> None:
    """The process of the bare loop: says that it is ready, then makes one step for each line that it is sent."""
    from benchmarks.suite.learner import BareLoop, made_groups
    from offbeat.config import load_recipe
    from services.learner.batching import StepBatch
    from services.learner.distributed import device_of, join
    from services.learner.losses import build_loss
    from services.learner.scoring import Passes

    settings = load_recipe(recipe_file)
    join(0, 1, None)
    loss = build_loss(settings.learner.loss, corrections=[], max_tokens=TOKENS)
    batch = StepBatch(made_groups(PROMPTS, TOKENS, vocabulary=256), loss.units)
    loop = BareLoop(settings, batch, Passes(settings, rank=0, world=1, device=device_of(0)))
    print(json.dumps({"ready": 1}), flush=True)
    while sys.stdin.readline():
        loop.step()
        print(json.dumps({"done": 1}), flush=True)


def measure_memory(options: Options) -> list[Row]:
    """Largest memory of each service during a run: its own pages, and its part of shared ones."""
    largest: dict[str, float] = {}

    def watch(process: psutil.Process) -> None:
        now: dict[str, float] = {}
        for member in members(process):
            try:
                name, size = service_of(member), member.memory_full_info().pss
            except psutil.Error:
                continue
            now[name] = now.get(name, 0.0) + size
        for name, size in now.items():
            largest[name] = max(size, largest.get(name, 0.0))

    run(recipe(options, 20), options.scratch, name="memory", watch=watch)
    return [Row(name, [size / MIB], "MiB") for name, size in sorted(largest.items())]


if __name__ == "__main__":
    bare_learner(sys.argv[1])
