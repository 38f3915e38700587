"""LoRA (arXiv 2106.09685): a frozen policy with small trained matrices beside its linear layers, through PEFT.

The trainer uses `add_adapter`; exports use `merged` and `write_adapter`. The reference is the policy as it was at the
start, and costs no second model: the layers without their adapter, or with a frozen copy of the adapter that the run
started from.

An adapter leaves this module under the names of PEFT's own files, so that what is published is what PEFT loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat.config.learner import LoraSettings
from offbeat.errors import ModelError
from services.learner.model import load_policy

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

TRAINED = "default"
START = "start"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Variants of LoRA whose weights are not W + (alpha / r) B A, for which everything here is made.
UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)


class Adapter:
    """The trained adapter of a policy. `model` is the policy itself, with LoRA layers in it."""

    def __init__(self, peft: PeftModel, *, base: str) -> None:
        self._peft = peft
        self._has_start = START in peft.peft_config
        self.model: nn.Module = peft.get_base_model()
        self.config_json = _config_json(peft.peft_config[TRAINED], base)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within, the model computes what the policy was at the start. For passes without gradient."""
        layers = self._peft.base_model
        if self._has_start:
            layers.set_adapter(START, inference_mode=True)
        else:
            layers.disable_adapter_layers()
        try:
            yield
        finally:
            if self._has_start:
                layers.set_adapter(TRAINED)
            else:
                layers.enable_adapter_layers()


def saved_name(parameter: str) -> str:
    """The name in an adapter file of a parameter of `Adapter.model`."""
    return f"base_model.model.{parameter.replace(f'.{TRAINED}.', '.')}"


def add_adapter(
    model: nn.Module, settings: LoraSettings, *, seed: int, base: str, with_start: bool
) -> Adapter:
    """Freezes the model and puts an adapter into it: a new one, which changes nothing yet, or the settings' folder.

    `base`: the model's folder, noted in the adapter's configuration. `with_start`: the reference will be asked for.
    Raises `ModelError` when the folder holds no adapter of this model, or the layers can't take one.
    """
    import peft

    if settings.adapter is not None:
        made = _start_from(model, Path(settings.adapter), with_start=with_start)
    else:
        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.scale,
            target_modules=settings.modules,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # every rank draws the same
            try:
                made = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
            except ValueError as error:
                raise ModelError(f"learner.lora: {base} can't take an adapter: {error}") from error
    _check_layers(made, base)
    return Adapter(made, base=base)


def merged(
    folder: str | Path, config_json: str, tensors: dict[str, Tensor], dtype: str
) -> dict[str, Tensor]:
    """The tensors of the model folder with the adapter added to them, computed in float32, in `dtype`."""
    import peft

    model = load_policy(folder, dtype=dtype).float()
    config = _parse(config_json)
    made = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    found = peft.set_peft_model_state_dict(made, {n: t.float() for n, t in tensors.items()})
    if found.unexpected_keys:
        raise ModelError(f"{folder} has no place for {found.unexpected_keys[:3]} of the adapter")
    whole = made.merge_and_unload().to(getattr(torch, dtype))
    once = dict(whole.named_parameters())
    twice = {n for n, _ in whole.named_parameters(remove_duplicate=False)} - once.keys()
    return {name: tensor for name, tensor in whole.state_dict().items() if name not in twice}


def write_adapter(tensors: dict[str, Tensor], config_json: str, target: Path) -> None:
    """A folder that PEFT and vLLM load as an adapter. OSError when it can't be written."""
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    (target / CONFIG_FILE).write_text(config_json, encoding="utf-8")


def read_config(folder: Path) -> LoraConfig:
    """The configuration of an adapter folder. ModelError when it is none, or of a kind that can't be merged."""
    try:
        text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"learner.lora.adapter: expected a PEFT adapter with {CONFIG_FILE} in {folder}, found: {error}"
        ) from error
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"{folder}: expected {WEIGHTS_FILE}, found none; save it as safetensors")
    config = _parse(text)
    used = [name for name in UNSUPPORTED if getattr(config, name, None)]
    if config.bias != "none":
        used.append("bias")
    if used:
        raise ModelError(
            f"{folder}/{CONFIG_FILE} uses {', '.join(used)}; only plain LoRA is trained here: W + (alpha / r) B A"
        )
    return config


def _parse(config_json: str) -> LoraConfig:
    from peft import LoraConfig

    try:
        tree = json.loads(config_json)
        if tree.get("peft_type") != "LORA":
            raise ValueError(f"peft_type is {tree.get('peft_type')!r}, expected 'LORA'")
        return LoraConfig.from_peft_type(**tree)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"not the configuration of a LoRA adapter: {error}") from error


def _start_from(model: nn.Module, folder: Path, *, with_start: bool) -> PeftModel:
    import peft
    from safetensors import safe_open

    config = read_config(folder)
    # Ratios compare two forward passes of one policy; dropout would make them differ by chance.
    config.lora_dropout = 0.0
    config.inference_mode = False
    options: dict[str, Any] = {"autocast_adapter_dtype": False, "config": config}
    try:
        made = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True, **options)
        if with_start:
            made.load_adapter(str(folder), START, autocast_adapter_dtype=False)
            made.base_model.set_adapter(TRAINED)
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise ModelError(f"{folder}: expected an adapter of the policy, found: {error}") from error
    wanted = {saved_name(n) for n, p in made.get_base_model().named_parameters() if p.requires_grad}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        found = set(file.keys())
    if wanted != found:
        raise ModelError(
            f"{folder}: expected an adapter of the policy, found {sorted(wanted - found)[:3]} missing and "
            f"{sorted(found - wanted)[:3]} unknown; was it trained from another model?"
        )
    return made


def _check_layers(peft: PeftModel, base: str) -> None:
    """Every adapted layer must be a linear one with weights of its own: tied ones would change another layer too."""
    from peft.tuners.lora import LoraLayer

    tied = {id(p) for p in _shared(peft.get_base_model())}
    for name, module in peft.get_base_model().named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer = module.get_base_layer()
        if type(layer) is not nn.Linear or id(layer.weight) in tied:
            raise ModelError(
                f"learner.lora.target_modules: {name} of {base} is {type(layer).__name__} or shares its weights; "
                "name linear layers with weights of their own, or say all-linear"
            )


def _shared(model: nn.Module) -> list[nn.Parameter]:
    seen: dict[int, int] = {}
    every = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for parameter in every:
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return [parameter for parameter in every if seen[id(parameter)] > 1]


def _config_json(config: LoraConfig, base: str) -> str:
    """As PEFT writes it, in an order that is the same in every process."""
    tree = config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    plain = {
        name: sorted(value) if isinstance(value, set) else value for name, value in tree.items()
    }
    return json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n"
