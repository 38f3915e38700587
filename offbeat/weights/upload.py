"""Publishing: sends a version to the checkpoint service, in full or as a delta. The client's `publish`."""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from offbeat.errors import WeightsError
from offbeat.failpoints import failpoint
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.chunks import chunks
from offbeat.weights.connection import SERVICE, Connection
from offbeat.weights.frames import write_chunk
from offbeat.weights.hashing import hash_of
from offbeat.weights.incoming import DELTA, RAW
from offbeat.weights.manifest import Buffer, as_bytes, check, check_part
from offbeat.weights.retry import Retry

log = logging.getLogger(__name__)

REFUSED_DELTA = {
    grpc.StatusCode.NOT_FOUND,  # the service does not have the base any more
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.INVALID_ARGUMENT,  # it takes no deltas
}
"""Answers to a publish of a delta after which everything is published."""


@dataclass(frozen=True)
class PublishBase:
    """A version that the publisher has published, and still has the bytes of."""

    manifest: checkpoint.Manifest
    """Of the whole version."""
    buffers: Sequence[Buffer]
    tensors: Sequence[checkpoint.TensorSpec] | None = None
    """What the buffers are of, when they are a part of the version."""


@dataclass(frozen=True)
class Shard:
    """Which part of a version a publisher sends: number `index` of `count`."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


class Uploader:
    """Publishes versions of one run."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection = connection
        self._run_id = run_id

    async def publish(
        self,
        manifest: checkpoint.Manifest,
        buffers: Sequence[Buffer],
        *,
        base: PublishBase | None = None,
        shard: Shard = WHOLE,
        deadline_seconds: float,
    ) -> checkpoint.PublishResponse:
        """Publishes the tensors that `manifest.describe` described, from the same buffers.

        A `shard` is what `manifest.describe_part` described; all shards of a version go under one publish id, and
        each of their calls is answered once the version is there. The caller has set term, parent, step and so on;
        the run, and a publish id when there is none, are filled in. With a `base` only the difference is sent where
        the service can use it. A broken publish is made again, under the same id, until the deadline. The buffers
        must not change meanwhile.
        """
        complete = checkpoint.Manifest()
        complete.CopyFrom(manifest)
        complete.run_id = self._run_id
        complete.publish_id = manifest.publish_id or uuid.uuid4().hex
        whole = shard.count == 1
        check(complete) if whole else check_part(complete)
        views = [as_bytes(buffer) for buffer in buffers]
        sizes = [len(view) for view in views]
        if sizes != [spec.nbytes for spec in complete.tensors]:
            raise WeightsError("the buffers are not those that the manifest describes")
        header = checkpoint.PublishHeader(
            manifest=complete, shard_index=shard.index, shard_count=shard.count, encoding=RAW
        )
        retry = Retry(
            f"Publish of step {manifest.step}", self._connection.address, deadline_seconds
        )
        if base is not None:
            difference = await asyncio.to_thread(_difference, base, complete, views, whole)
            if difference is not None:
                reply = await self._publish_delta(header, base, difference, retry)
                if reply is not None:
                    return reply
        reply = await self._publish_stream(header, views, retry)
        self._connection.counts.add("full", sum(sizes))
        return reply

    async def _publish_delta(
        self,
        header: checkpoint.PublishHeader,
        base: PublishBase,
        difference: bytes,
        retry: Retry,
    ) -> checkpoint.PublishResponse | None:
        """None when the service can't use the delta."""
        of_delta = checkpoint.PublishHeader()
        of_delta.CopyFrom(header)
        of_delta.encoding, of_delta.base_version = DELTA, base.manifest.version
        of_delta.transfer_bytes = len(difference)
        of_delta.transfer_hash = hash_of(difference)
        try:
            reply = await self._publish_stream(
                of_delta, [memoryview(difference)], retry, refusals=REFUSED_DELTA
            )
        except grpc.aio.AioRpcError as error:
            self._connection.counts.fallbacks[f"publish_{error.code().name.lower()}"] += 1
            log.warning("the delta was refused (%s); publishing in full", error.details())
            return None
        self._connection.counts.add("delta", len(difference))
        return reply

    async def _publish_stream(
        self,
        header: checkpoint.PublishHeader,
        views: Sequence[memoryview],
        retry: Retry,
        *,
        refusals: set[grpc.StatusCode] | frozenset[grpc.StatusCode] = frozenset(),
    ) -> checkpoint.PublishResponse:
        """Sends a publish until it is answered; raises `AioRpcError` for a status of `refusals`."""
        corrupted = False
        while True:
            call: Any = self._connection.channel.stream_unary(
                f"/{SERVICE}/Publish",
                response_deserializer=checkpoint.PublishResponse.FromString,
            )
            try:
                reply: checkpoint.PublishResponse = await call(
                    _publish_messages(header, views), timeout=retry.left()
                )
                return reply
            except grpc.aio.AioRpcError as error:
                if error.code() in refusals:
                    raise
                if error.code() == grpc.StatusCode.DATA_LOSS and not corrupted:
                    corrupted = True
                    log.warning("%s; publishing again", error.details())
                    continue
                await retry.after(error)


def _difference(
    base: PublishBase, manifest: checkpoint.Manifest, views: Sequence[memoryview], whole: bool
) -> bytes | None:
    before = base.manifest.tensors if base.tensors is None else base.tensors
    if not delta.same_layout(before, manifest.tensors):
        return None
    # The parts of a version come all as deltas or none, and no publisher knows how large the others' are.
    share = delta.LARGEST_SHARE if whole else math.inf
    old = [as_bytes(buffer) for buffer in base.buffers]
    return delta.encode(manifest.tensors, old, views, largest_share=share)


async def _publish_messages(
    header: checkpoint.PublishHeader, views: Sequence[memoryview]
) -> AsyncIterator[bytes]:
    yield checkpoint.PublishRequest(header=header).SerializeToString()
    offset = 0
    for data in chunks(views):
        yield write_chunk(offset, data)
        offset += len(data)
        failpoint("publish.sending")
