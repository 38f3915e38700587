"""Staged weights to vLLM's workers by vLLM's own NCCL transfer, not by a file that each worker reads. Off by default.

UNTESTED ON GPUS: written against vLLM 0.32's documented trainer side (`TrainerWeightTransferEngine`, `WeightSource`,
`VLLMWeightSyncClient`) and tried with a stub in the place of NCCL. The generator takes the trainer's part: it reads
the staged file once, and NCCL broadcasts it over the cluster's own network, so workers on other hosts need not see
the file. Used by `vllm_engine` when `generator.engine.weight_transfer` is nccl.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from offbeat.weights.staged import StagedWeights
from services.generator.engines.staged_tensors import staged_tensors

BACKEND = "nccl"


class StagedSource(WeightSource):
    """The tensors of the staged weights that were set last, each copied to the sending GPU as it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.weights: StagedWeights | None = None

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each tensor, in the order of the file."""
        assert self.weights is not None
        return [
            ParamMeta(spec.name, getattr(torch, spec.dtype), tuple(int(n) for n in spec.shape))
            for spec in self.weights.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.weights is not None
        for name, tensor in staged_tensors(self.weights):
            yield name, tensor.to(self._device)


class EngineClient:
    """vLLM's engine as its transfer sees it: four calls from threads, which the engine's event loop serves."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._loop = loop
        self.version = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The workers join the NCCL group."""
        self._call(
            self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        )

    def start_weight_update(self) -> None:
        """The layers get ready to be loaded."""
        self._call(self._llm.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The workers receive what is being sent."""
        self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The layers are ready, and tokens get the version from now on."""
        self._call(self._llm.finish_weight_update(weight_version=weight_version or self.version))

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class NcclTransfer:
    """Sends staged weights to all workers of an engine. The NCCL group is made at the first load, and kept."""

    def __init__(
        self,
        llm: Any,
        *,
        workers: int,
        device: torch.device,
        endpoint: Callable[[], tuple[str, int]],
    ) -> None:
        """`workers`: of all tensor- and data-parallel ranks. `endpoint`: host and free port where they meet."""
        self._workers = workers
        self._endpoint = endpoint
        self._source = StagedSource(device)
        self._client = EngineClient(llm, asyncio.get_running_loop())
        self._sender: Any = None

    async def load(self, weights: StagedWeights, version: int) -> None:
        """Loads a version into the paused engine. Raises what vLLM raises; the group is made anew after that."""
        self._client.version = str(version)
        self._source.weights = weights
        try:
            await asyncio.to_thread(self._send)
        except Exception:
            self.close()
            raise
        finally:
            self._source.weights = None

    def close(self) -> None:
        """Ends the group."""
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.shutdown()

    def _send(self) -> None:
        if self._sender is None:
            host, port = self._endpoint()
            info = NCCLTrainerInitInfo(host, port, 1 + self._workers, rank=0)
            self._sender = WeightTransferTrainerFactory.trainer_init(
                info, client=self._client, source=self._source
            )
        self._sender.send_weights()


def free_endpoint() -> tuple[str, int]:
    """An address of this host that workers on other hosts reach, and a free port."""
    from vllm.utils.network_utils import get_ip, get_open_port

    return get_ip(), get_open_port()
