"""Chunks of weights as messages on the wire, written and read by hand, without needless copies.

`PublishRequest` and `FetchResponse` have the same wire form for a chunk, so one pair of functions
serves both; generated stubs understand what is written here, and the other way round. Protobuf's
own classes copy each chunk two or three times more, and refuse memoryviews.
"""

from typing import NamedTuple

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from offbeat.errors import IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint

# Tags: field number * 8 + wire type (0 varint, 1 eight bytes, 2 length-delimited).
PART_CHUNK = 0x12
OFFSET = 0x08
DATA = 0x12
CHECKSUM = 0x19


class DamagedChunk(IntegrityError):
    """The bytes of a chunk do not match its checksum: it is asked for again."""


class Chunk(NamedTuple):
    """A chunk that was read; `data` is a view of the message."""

    offset: int
    data: memoryview
    checksum: int

    def check(self) -> None:
        """Raises `DamagedChunk` when the bytes changed on the way. A checksum of 0 was not computed."""
        if self.checksum and xxh3_64_intdigest(self.data) != self.checksum:
            raise DamagedChunk(f"the chunk at byte {self.offset} does not match its checksum")


def write_chunk(offset: int, data: bytes | memoryview) -> bytes:
    """The message of a chunk, with its checksum. The bytes are copied once."""
    head = b"".join(
        (
            bytes((OFFSET,)),
            _varint(offset),
            bytes((CHECKSUM,)),
            xxh3_64_intdigest(data).to_bytes(8, "little"),
            bytes((DATA,)),
            _varint(len(data)),
        )
    )
    return b"".join((bytes((PART_CHUNK,)), _varint(len(head) + len(data)), head, data))


def read_chunk(message: bytes) -> Chunk | None:
    """The chunk in a message; None when the message has no chunk. Nothing is copied.

    Raises `DecodeError` when the message is malformed.
    """
    view = memoryview(message)
    if not message or message[0] != PART_CHUNK:
        return None
    length, at = _read_varint(view, 1)
    if at + length != len(view):
        return _read_any(message)
    offset, data, checksum = 0, view[:0], 0
    while at < len(view):
        tag = view[at]
        at += 1
        if tag == OFFSET:
            offset, at = _read_varint(view, at)
        elif tag == DATA:
            length, at = _read_varint(view, at)
            data = view[at : at + length]
            at += length
        elif tag == CHECKSUM:
            checksum = int.from_bytes(view[at : at + 8], "little")
            at += 8
        else:
            return _read_any(message)
    if at != len(view):
        raise DecodeError("a chunk ends in the midst of a field")
    return Chunk(offset, data, checksum)


def _read_any(message: bytes) -> Chunk | None:
    """Protobuf's own reader, for messages with fields that are not known here."""
    request = checkpoint.PublishRequest.FromString(message)
    if request.WhichOneof("part") != "chunk":
        return None
    chunk = request.chunk
    return Chunk(chunk.offset, memoryview(chunk.data), chunk.checksum)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    while at < len(view) and shift < 64:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a chunk ends in the midst of a number, or the number is too large")
