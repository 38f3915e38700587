"""Tiny models, weights staged from them, and what `transformers` says about them. For tests of engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.manifest import describe
from offbeat.weights.staged import StagedWeights

VOCAB = 128


def _save_tokenizer(folder: Path) -> None:
    """One character per token, so that stop strings can span tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {chr(ord("a") + i - 3): i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def make_tiny_model(folder: Path, *, tied: bool) -> Any:
    """A Llama with random weights, large enough that sampling is not uniform; only its config is saved."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1 if tied else 2)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    _save_tokenizer(folder)
    return model


def perturb(model: Any, seed: int) -> None:
    """Moves every parameter by a few per cent: about what the parity check must see."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.1 * parameter.std())


def tensors_of(model: Any, *, skip: str = "") -> list[tuple[str, str, Sequence[int], bytes]]:
    """The model's tensors as a publisher describes them; `skip` leaves one out."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    tensors.pop(skip, None)
    return [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape), t.numpy().tobytes())
        for name, t in tensors.items()
    ]


def stage_adapter(peft_model: Any, folder: Path, version: int) -> StagedWeights:
    """The adapter of a PEFT model as a receiver has it after a fetch."""
    import json

    from peft import get_peft_model_state_dict

    tensors = [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape), t.detach().numpy().tobytes())
        for name, t in get_peft_model_state_dict(peft_model).items()
    ]
    manifest: checkpoint.Manifest = describe(tensors)
    manifest.version = version
    manifest.kind = checkpoint.WEIGHTS_KIND_ADAPTER
    manifest.adapter_config = json.dumps(peft_model.peft_config["default"].to_dict(), default=list)
    path = folder / f"v{version}.bin"
    path.write_bytes(b"".join(data for *_, data in tensors))
    return StagedWeights(path, manifest)


def stage(model: Any, folder: Path, version: int, *, skip: str = "") -> StagedWeights:
    """The model's weights as a receiver has them after a fetch."""
    tensors = tensors_of(model, skip=skip)
    manifest: checkpoint.Manifest = describe(tensors)
    manifest.version = version
    path = folder / f"v{version}.bin"
    path.write_bytes(b"".join(data for *_, data in tensors))
    return StagedWeights(path, manifest)


def reference_logprobs(
    model: Any, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0
) -> list[list[float]]:
    """log-probs of tokens 1 .. n-1 of each sequence, one at a time, without padding."""
    import torch

    scores = []
    for tokens in sequences:
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, :-1] / temperature
        scores.append(torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return scores
