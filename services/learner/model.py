"""Loading and checking of model folders. The trainer, the data set and the learner's start-up use it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
INDEX = "model.safetensors.index.json"
# What of a model folder goes along with an export, beside its configuration.
COMPANION_SUFFIXES = {".json", ".jinja", ".txt", ".model"}


@dataclass(frozen=True)
class ModelInfo:
    """What the configuration of a model folder says. `context`: positions, None when unlimited."""

    folder: Path
    vocabulary: int
    context: int | None
    tied_embeddings: bool


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. ModelError when there is none or it has no end-of-sequence token."""
    from transformers import AutoTokenizer

    _check_folder(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}: expected a tokenizer that transformers loads (tokenizer.json, tokenizer_config.json), "
            f"found none that works: {error}; save the tokenizer into the folder"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{folder}: expected a tokenizer with an end-of-sequence token, found eos_token unset; "
            'set "eos_token" in its tokenizer_config.json, or completions would never end'
        )
    return tokenizer


def check_model(folder: str | Path, *, max_context: int | None = None) -> ModelInfo:
    """Reads a model folder's configuration, not its weights.

    ModelError: the folder, its config.json or its weights are missing, or it is no causal language
    model. ConfigError: `max_context` is more than the model has positions.
    """
    folder = Path(folder)
    config = _load_config(folder)
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ModelError(
            f"{folder}: expected weights ({', '.join(WEIGHT_FILES)}), found none; copy them into the folder"
        )
    text = config.get_text_config()
    info = ModelInfo(
        folder=folder,
        vocabulary=int(text.vocab_size),
        context=getattr(text, "max_position_embeddings", None),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
    )
    if max_context is not None and info.context is not None and max_context > info.context:
        raise ConfigError(
            f"model.max_context is {max_context}, but {folder} has {info.context} positions "
            f"(max_position_embeddings): set model.max_context to at most {info.context}"
        )
    return info


def load_policy(folder: str | Path, *, dtype: str = "float32") -> PreTrainedModel:
    """The causal language model of a folder, on the CPU, dropout 0, in train mode.

    ModelError when it can't be loaded, or when the folder lacks some of its weights.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder = Path(folder)
    config = without_dropout(_load_config(folder))
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"{folder}: expected a causal language model that transformers loads, found: {error}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder}: expected all weights of {type(model).__name__}, found {len(missing)} missing "
            f"(such as {', '.join(missing[:3])}); save the model again with save_pretrained"
        )
    return made_trainable(model)


def made_trainable(model: PreTrainedModel) -> PreTrainedModel:
    """The model in train mode, without dropout, every token's embedding trained. Changed in place."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # torch trains no embedding of the pad token. Where that is the end token too, it would miss its gradient; what
    # only pads gets none anyway, since no loss is taken there.
    model.get_input_embeddings().padding_idx = None
    return model.train()


def shard_name(index: int, count: int) -> str:
    """The file of one of several parts of a model folder's weights."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: dict[str, str], total_bytes: int) -> None:
    """The index of a model folder whose weights are in several files; `files`: file by tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text)


def write_model(tensors: dict[str, Tensor], source: Path, target: Path, dtype: str) -> None:
    """A model folder: the tensors, and the configuration and tokenizer files of `source`."""
    from huggingface_hub import save_torch_state_dict

    write_companions(source, target, dtype)
    save_torch_state_dict(tensors, target, metadata={"format": "pt"})


def write_companions(source: Path, target: Path, dtype: str) -> None:
    """What of a model folder is no weights."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.suffix in COMPANION_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(
            f"expected a model folder at {folder.absolute()}, found "
            f"{'a file' if folder.exists() else 'nothing'}; correct the path, or make it with `offbeat prepare`"
        )


def _load_config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    _check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}: expected a config.json that transformers reads, found: {error}"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{folder}: expected a causal language model, found model_type {config.model_type!r}"
        )
    return config


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with every dropout at 0, changed in place."""
    # Ratios compare two forward passes of one policy; dropout would make them differ by chance.
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        values: dict[str, Any] = part.to_dict()
        for name, value in values.items():
            if name.endswith(("dropout", "pdrop", "drop_rate")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config
