"""The connection of a client to the checkpoint service, and what went over it. Used by the client's parts."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from offbeat import rpc
from offbeat.v1 import checkpoint_pb2 as checkpoint

log = logging.getLogger(__name__)

SERVICE = checkpoint.DESCRIPTOR.services_by_name["CheckpointService"].full_name


@dataclass
class TransferCounts:
    """What a client has transferred since its start."""

    transfers: Counter[str] = field(default_factory=Counter)
    """Complete transfers by encoding: full, delta, mapped."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of weights on the wire, by encoding."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Deltas and mapped files that something came in between of, by reason; a full transfer followed."""
    damaged_chunks: int = 0

    def add(self, kind: str, nbytes: int) -> None:
        """Counts a complete transfer."""
        self.transfers[kind] += 1
        self.bytes[kind] += nbytes


class Connection:
    """Channels to one or more addresses, HOST:PORT, that serve the same versions; one is in use."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        self._channels = [rpc.connect(address) for address in self._addresses]
        self._current = 0
        self.counts = TransferCounts()

    @property
    def address(self) -> str:
        """HOST:PORT of the service in use."""
        return self._addresses[self._current]

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel in use."""
        return self._channels[self._current]

    def turn(self, error: grpc.aio.AioRpcError) -> None:
        """Goes over to the next address when the one in use is away."""
        if error.code() == grpc.StatusCode.UNAVAILABLE and len(self._addresses) > 1:
            self._current = (self._current + 1) % len(self._addresses)
            log.warning("%s; going over to %s", error.details(), self.address)

    async def close(self) -> None:
        """Closes the channels; calls under way are cancelled."""
        for channel in self._channels:
            await channel.close()
