"""The part of the vLLM engine that runs inside vLLM's own processes: loads staged weights, and dies with the generator.

vLLM imports this module in every worker, since `WorkerExtension` is named as `worker_extension_cls`; importing it
registers the weight-transfer backend `offbeat`. Used by `vllm_engine`.
"""

import contextlib
import logging
import os
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from services.generator.engines.staged_tensors import TensorEntry, mapped_tensors

BACKEND = "offbeat"
GENERATOR_PID = "OFFBEAT_GENERATOR_PID"
"""Environment variable by which vLLM's processes know the process that they belong to."""


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """A file of staged weights: its path, and (name, dtype, shape, offset) of each tensor in it."""

    path: str
    tensors: list[TensorEntry]


class StagedWeightTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Feeds the tensors of a staged file to the model's own loader, under their Hugging Face names."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    _unfinished = False

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """No connection is needed: the weights are a file on this host."""

    def start_weight_update(self) -> None:
        """Puts the layers back into the form in which a checkpoint is loaded."""
        if self._unfinished:
            # An update failed half-way. Layers that got a part of their weights would count it
            # towards the next update.
            finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = True
        # `load_weights` alone would fail on a CPU, where the weights were repacked and emptied.
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Loads every tensor. Raises `ValueError` when the model has parameters that the file lacks."""
        expected = _checkpoint_parameters(self.model, self.model_config.hf_text_config)
        loaded = self.model.load_weights(mapped_tensors(update_info.path, update_info.tensors))
        # Of a layer without weights vLLM only warns, and goes on with the old ones.
        missing = expected - loaded if loaded is not None else set()
        if missing:
            raise ValueError(
                f"the staged weights lack {len(missing)} parameters of the model, such as "
                f"{sorted(missing)[:3]}: were they published by a model of another architecture?"
            )

    def finish_weight_update(self) -> None:
        """Puts the layers into the form that the kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # With tied embeddings the head is no layer of its own to the reload, so it would keep
            # its packed copy of the old weights, silently.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        self._unfinished = False

    def shutdown(self) -> None:
        """Nothing is held between updates."""


class WorkerExtension:
    """Adds nothing to the worker; naming it makes vLLM import this module in each worker."""


def _checkpoint_parameters(model: torch.nn.Module, config: Any) -> set[str]:
    """The names of all parameters that a load must fill."""
    names = {name for name, _ in model.named_parameters()}
    if getattr(config, "tie_word_embeddings", False):
        names = {name for name in names if not name.endswith("lm_head.weight")}
    return names


def _die_with_generator() -> None:
    """Starts a thread that kills this process once the generator is gone, and the engine core above it.

    vLLM ends its processes when the generator ends in order; after SIGKILL of the generator nobody
    would. (Linux's parent-death signal is of no use: it fires when the thread ends that started
    the process.)
    """
    generator = int(os.environ.get(GENERATOR_PID, 0))
    if generator in (0, os.getpid()):
        return
    try:
        watched = os.pidfd_open(generator)
        # With several workers the engine core stands between, and does not import this module.
        parent = os.getppid()
        core = os.pidfd_open(parent) if parent != generator else None
    except ProcessLookupError:
        os._exit(1)

    def wait_and_die() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        if core is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_die, name="die-with-generator", daemon=True).start()


# It warns, at each update, of layers that have no weights of their own; that none is missing is checked
# before an update begins.
logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine(BACKEND, StagedWeightTransferEngine)
_die_with_generator()
