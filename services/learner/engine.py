"""The DeepSpeed engine: built from settings, and the few things that differ between ZeRO stages.

The trainer drives it; `state` reads and writes the optimizer through it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.config.learner import LearnerSettings
from offbeat.errors import OffbeatError

MOMENTS = ("exp_avg", "exp_avg_sq")


def import_deepspeed() -> Any:
    """DeepSpeed, told beforehand what it would otherwise guess, compile, or print."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # DeepSpeed's ZeRO-3 calls collectives that torch renamed: one warning per call otherwise.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # A CPU build spends up to a minute on compiling this; gloo does the same work.
    __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Engine:
    """A policy under training. Gradients are *summed* over ranks and micro-batches: a loss brings its normaliser."""

    def __init__(
        self, scorer: nn.Module, settings: LearnerSettings, dtype: str, device: torch.device
    ) -> None:
        self.device = device
        self.stage = int(settings.zero_stage)
        self._max_norm = settings.optimizer.max_grad_norm or float("inf")
        self._deepspeed = import_deepspeed()
        scorer.to(device)
        parameters = [p for p in scorer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            _decay_groups(parameters, settings.optimizer.weight_decay),
            lr=settings.optimizer.lr,
            betas=settings.optimizer.betas,
            eps=settings.optimizer.eps,
        )
        self._engine, *_ = self._deepspeed.initialize(
            model=scorer,
            model_parameters=parameters,
            optimizer=optimizer,
            config=_config(settings, dtype),
            dist_init_required=False,
        )
        self._world = self._engine.world_size

    @property
    def scorer(self) -> Any:
        """The scorer that it was built with, for passes without gradient."""
        return self._engine.module

    @property
    def adam(self) -> torch.optim.Optimizer:
        """The AdamW that does the work, whatever DeepSpeed has wrapped around it."""
        return getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)

    def score(self, *arguments: Any) -> tuple[Tensor, ...]:
        """What the scorer returns, with gradient."""
        outputs: tuple[Tensor, ...] = self._engine(*arguments)
        return outputs

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of this rank's part of the loss; `last`: of this update."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; the world's size makes a sum of it.
        self._engine.backward(loss * self._world)

    def step(self, learning_rate: float) -> float:
        """One optimizer update. Returns the gradient's norm before clipping.

        OffbeatError when the gradient is not finite; the weights are unchanged then.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._clip() if self._plain else None
        if norm is None or torch.isfinite(torch.tensor(norm)):
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm()) if norm is None else norm
        if not torch.isfinite(torch.tensor(norm)):
            raise OffbeatError(
                f"expected a finite gradient, found norm {norm}: the update is left out and training "
                "stops; lower learner.optimizer.lr, or look for extreme rewards or log-probs"
            )
        return norm

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters by their names in the model, tied ones once."""
        return ((n, p) for n, p in self.scorer.model.named_parameters() if p.requires_grad)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What `parameters` gives, and a value head, which is trained and saved but is no part of the model."""
        yield from self.parameters()
        head = getattr(self.scorer, "value_head", None)
        if head is not None:
            yield "value_head.weight", head.weight

    def gathered(self, parameter: nn.Parameter, *, write: bool = False) -> Any:
        """Context in which the whole parameter is there; with `write` rank 0's changes go to all ranks."""
        zero = self._deepspeed.zero
        modifier = 0 if write else None
        return zero.GatheredParameters([parameter], modifier_rank=modifier, enabled=self.stage == 3)

    def master(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """The whole float32 master copy of a parameter, or one of Adam's moments. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self._plain:
            return parameter.detach() if moment is None else self.adam.state[parameter][moment]
        if moment is None:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, moment)

    def set_master(self, parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
        """Writes this rank's part of the float32 master copy, or of a moment. Every rank passes the whole value."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if self._plain:
            target = parameter if moment is None else self.adam.state[parameter][moment]
            target.detach().copy_(value)
        elif moment is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, moment)

    @property
    def adam_step(self) -> int:
        """Adam's own count of updates, which its bias correction uses; 0 before the first one."""
        steps = {int(state["step"]) for state in self.adam.state.values() if "step" in state}
        return max(steps, default=0)

    def restore_adam(self, step: int) -> None:
        """Gives Adam moments of zero and a count, so that `set_master` has where to write; 0: no state at all."""
        wrapper = self._engine.optimizer
        self.adam.state.clear()
        # ZeRO-3 hands Adam one part of its shard at a time, so Adam alone does not know all of them.
        parts = getattr(wrapper, "fp32_partitioned_groups_flat", None)
        for part in parts or [p for group in self.adam.param_groups for p in group["params"]]:
            if step:
                self.adam.state[part] = {"step": torch.tensor(float(step))} | {
                    moment: torch.zeros_like(part) for moment in MOMENTS
                }
        if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
            wrapper._hp_optimizer_states_linked = False
            if step:
                wrapper._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        """Drops hooks and buffers."""
        self._engine.destroy()

    @property
    def _plain(self) -> bool:
        """Whether DeepSpeed left AdamW as it is: no shards, no master copies."""
        return self._engine.optimizer is self.adam

    def _clip(self) -> float:
        parameters = [p for _, p in self.trained()]
        return float(nn.utils.clip_grad_norm_(parameters, self._max_norm))


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms and biases."""
    decayed = [p for p in parameters if p.ndim >= 2]
    plain = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if not weight_decay:
        groups = [{"params": parameters, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _config(settings: LearnerSettings, dtype: str) -> dict[str, Any]:
    stage = int(settings.zero_stage)
    plain = stage == 0 and dtype == "float32"
    config: dict[str, Any] = {
        # The trainer cuts micro-batches itself, a different number in each update.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Without shards or master copies the trainer clips itself: DeepSpeed would not tell the norm.
        "gradient_clipping": 0.0 if plain else settings.optimizer.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        if stage <= 1:
            # Stage 1 is DeepSpeed's only optimizer with float32 master weights that also adds up
            # gradients in float32; on one rank it is stage 0.
            config["zero_optimization"] = {"stage": 1}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
