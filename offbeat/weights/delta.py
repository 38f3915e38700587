"""Lossless differences between two versions of the weights: `encode` one, `apply` it in place.

Used by publishers and by the checkpoint service to send less, and by whoever receives that. In
bfloat16 about 99 % of the values do not change in a step of reinforcement learning.

A delta is ``OBDELTA1`` and then records, ascending and disjoint; ranges that no record names did
not change. A record is a header (`RECORD`, little-endian: offset of the range, its bytes, bytes of
the payload, changed items, encoding, bytes of an item) and a payload:

- 1, raw: the new bytes of the range.
- 2, sparse: zstd of the gaps and then the differences of the changed items. A gap is the number of
  unchanged items before a changed one, as bytes of 255 and then one below 255 that sum to it. A
  difference is new minus old as integers, zigzag coded, in byte planes: lowest bytes first.
- 3, dense: zstd of the differences of all items of the range, in byte planes.

Ranges are blocks of at most `BLOCK_BYTES`, of tensors with items of one size. For each block the
smallest of the three is taken. A delta says nothing about tensors: that the result is right is
known from the hashes of the manifest, which the caller checks.
"""

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import zstandard

from offbeat.errors import IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.manifest import ITEM_BYTES

MAGIC = b"OBDELTA1"
RECORD = struct.Struct("<QIIIBB")
RAW, SPARSE, DENSE = 1, 2, 3
BLOCK_BYTES = 2 * 1024**2
JOIN_BYTES = 64 * 1024
"""Smaller tensors share a block. Copying larger ones for that takes more time than it saves."""
ZSTD_LEVEL = 1
ESCAPE = 255
LARGEST_SHARE = 0.5
"""A delta of more than this share of the weights is not worth its work: they are sent whole."""
WORKERS = max(1, min(4, os.cpu_count() or 1))

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_local = threading.local()

Array = np.ndarray


@dataclass(frozen=True)
class Block:
    """Bytes of both versions from `offset` on (uint8, of equal length), and the size of an item."""

    offset: int
    item: int
    base: Array
    target: Array


def same_layout(
    base: Sequence[checkpoint.TensorSpec], target: Sequence[checkpoint.TensorSpec]
) -> bool:
    """Whether a delta between the two can be made: the same tensors at the same offsets."""
    return [(s.name, s.dtype, tuple(s.shape), s.offset) for s in base] == [
        (s.name, s.dtype, tuple(s.shape), s.offset) for s in target
    ]


def tensor_views(data: memoryview, tensors: Sequence[checkpoint.TensorSpec]) -> list[memoryview]:
    """The bytes of each tensor of a version that lies in one piece."""
    return [data[spec.offset : spec.offset + spec.nbytes] for spec in tensors]


def blocks(
    tensors: Sequence[checkpoint.TensorSpec],
    base: Sequence[memoryview],
    target: Sequence[memoryview],
) -> Iterator[Block]:
    """Both versions in blocks. Small neighbours share one, large tensors are cut, nothing else is copied."""
    run: list[tuple[Array, Array]] = []
    start = size = item = 0

    def joined() -> Iterator[Block]:
        if run:
            yield Block(start, item, *(np.concatenate(side) for side in zip(*run, strict=True)))
            run.clear()

    for spec, old, new in zip(tensors, base, target, strict=True):
        if not spec.nbytes:
            continue
        pair = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
        if spec.nbytes >= JOIN_BYTES:
            yield from joined()
            for at in range(0, spec.nbytes, BLOCK_BYTES):
                part = slice(at, at + BLOCK_BYTES)
                yield Block(spec.offset + at, ITEM_BYTES[spec.dtype], pair[0][part], pair[1][part])
            continue
        apart = ITEM_BYTES[spec.dtype] != item or spec.offset != start + size
        if run and (apart or size + spec.nbytes > BLOCK_BYTES):
            yield from joined()
        if not run:
            start, size, item = spec.offset, 0, ITEM_BYTES[spec.dtype]
        run.append(pair)
        size += spec.nbytes
    yield from joined()


def encode(
    tensors: Sequence[checkpoint.TensorSpec],
    base: Sequence[memoryview],
    target: Sequence[memoryview],
    *,
    largest_share: float = LARGEST_SHARE,
    workers: int = WORKERS,
) -> bytes | None:
    """The delta from `base` to `target`, the bytes of each tensor; None when it is not worth it.

    The tensors may be some of a version: offsets are those of the whole. Blocking, in `workers` threads: about 1 GB/s
    of weights on a core, as long as little changed.
    """
    limit = largest_share * sum(spec.nbytes for spec in tensors)
    records, total = [MAGIC], 0
    with ThreadPoolExecutor(workers, thread_name_prefix="delta") as pool:
        # In portions, so that a hopeless delta is given up before all of it was made.
        for portion in _portions(blocks(tensors, base, target), 8 * workers):
            for record in pool.map(_encode_block, portion):
                records.append(record)
                total += len(record)
            if total > limit:
                return None
    return b"".join(records)


def apply(delta: bytes | memoryview, weights: memoryview, *, workers: int = WORKERS) -> None:
    """Turns the base's bytes in `weights` into the target's, in place. Blocking.

    Raises `IntegrityError` when `delta` is malformed; `weights` may be half changed then.
    """
    records = list(_records(memoryview(delta), len(weights)))
    target = np.frombuffer(weights, np.uint8)
    with ThreadPoolExecutor(workers, thread_name_prefix="delta") as pool:
        for _ in pool.map(lambda record: _apply_record(record, target), records):
            pass


def join(deltas: Sequence[bytes], total: int) -> bytes:
    """One delta of several that are for different tensors of the same `total` bytes of weights.

    Raises `IntegrityError` when one is malformed, or two change the same bytes.
    """
    found = [record for delta in deltas for record in _records(memoryview(delta), total)]
    joined: list[bytes | memoryview] = [MAGIC]
    for record in sorted(found, key=lambda record: record.offset):
        joined += [record.header, record.payload]
    data = b"".join(joined)
    for _ in _records(memoryview(data), total):
        pass  # that no two overlap is checked on the way
    return data


# ---- blocks


def _portions(found: Iterator[Block], count: int) -> Iterator[list[Block]]:
    portion: list[Block] = []
    for block in found:
        portion.append(block)
        if len(portion) == count:
            yield portion
            portion = []
    yield portion


def _encode_block(block: Block) -> bytes:
    """The record of a block, or nothing when it did not change."""
    changed = _changed_words(block)
    if not len(changed) and block.base[-8:].tobytes() == block.target[-8:].tobytes():
        return b""
    size = len(block.target)
    encoding, count, payload = RAW, 0, b""
    if len(changed) * 8 <= size // 2:
        positions, differences = _changes(block, changed)
        if not len(positions):
            return b""
        payload = _compress(_gaps(positions) + _planes(differences))
        encoding, count = SPARSE, len(positions)
    if not payload or len(payload) > size // 8:
        base, target = _items(block.base, block.item), _items(block.target, block.item)
        dense = _compress(_planes(_zigzag(target - base)))
        if not payload or len(dense) < len(payload):
            encoding, count, payload = DENSE, len(base), dense
    if len(payload) >= size:
        encoding, count, payload = RAW, 0, block.target.tobytes()
    return RECORD.pack(block.offset, size, len(payload), count, encoding, block.item) + payload


def _changed_words(block: Block) -> Array:
    """Indices of the 8-byte words that differ; what follows the last whole word is not looked at."""
    whole = len(block.base) // 8 * 8
    base, target = block.base[:whole].view(np.uint64), block.target[:whole].view(np.uint64)
    differ = base != target
    # Eight at a time: hardly any of these groups has a change, and looking at each item takes longer than comparing.
    grouped = len(differ) // 8 * 8
    groups = differ[:grouped].view(np.uint64)
    hit = np.flatnonzero(groups != 0)
    inside = np.flatnonzero(groups[hit].view(np.bool_))
    rest = np.flatnonzero(differ[grouped:]) + grouped
    return np.concatenate([hit[inside >> 3] * 8 + (inside & 7), rest])


def _changes(block: Block, words: Array) -> tuple[Array, Array]:
    """Positions of the changed items, and their differences, zigzag coded."""
    whole = len(block.base) // 8 * 8
    per_word = 8 // block.item
    base = _items(block.base[:whole].view(np.uint64)[words], block.item)
    target = _items(block.target[:whole].view(np.uint64)[words], block.item)
    found = np.flatnonzero(base != target)
    positions = words[found // per_word] * per_word + found % per_word
    differences = target[found] - base[found]
    rest, rest_target = (_items(side[whole:], block.item) for side in (block.base, block.target))
    tail = np.flatnonzero(rest != rest_target)
    if len(tail):
        positions = np.concatenate([positions, tail + whole // block.item])
        differences = np.concatenate([differences, rest_target[tail] - rest[tail]])
    return positions, _zigzag(differences)


def _items(data: Array, item: int) -> Array:
    return data.view(_UNSIGNED[item])


def _zigzag(differences: Array) -> Array:
    """Small differences of either sign as small numbers: 0, -1, 1, -2 … become 0, 1, 2, 3 …"""
    one = differences.dtype.type(1)
    sign = differences >> differences.dtype.type(differences.dtype.itemsize * 8 - 1)
    coded: Array = (differences << one) ^ (~sign + one)
    return coded


def _unzigzag(coded: Array) -> Array:
    one = coded.dtype.type(1)
    differences: Array = (coded >> one) ^ (~(coded & one) + one)
    return differences


def _planes(items: Array) -> bytes:
    return items.view(np.uint8).reshape(-1, items.dtype.itemsize).T.tobytes()


def _from_planes(data: Array, item: int) -> Array:
    return np.ascontiguousarray(data.reshape(item, -1).T).reshape(-1).view(_UNSIGNED[item])


def _gaps(positions: Array) -> bytes:
    gaps = (np.diff(positions, prepend=-1) - 1).astype(np.uint32)
    escapes = gaps // ESCAPE
    ends = np.cumsum(escapes + np.uint32(1), dtype=np.int64)
    coded = np.full(int(ends[-1]), ESCAPE, np.uint8)
    coded[ends - 1] = gaps - escapes * np.uint32(ESCAPE)
    return coded.tobytes()


def _compress(data: bytes) -> bytes:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    compressed: bytes = _local.compressor.compress(data)
    return compressed


def _decompress(data: memoryview, largest: int) -> Array:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= largest:
            raise IntegrityError(f"a payload has {size} bytes; expected at most {largest}")
        return np.frombuffer(_local.decompressor.decompress(data), np.uint8)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a payload of the delta is damaged: {error}") from None


# ---- records


@dataclass(frozen=True)
class _Record:
    offset: int
    size: int
    count: int
    encoding: int
    item: int
    payload: memoryview

    @property
    def header(self) -> bytes:
        """The bytes before the payload."""
        length = len(self.payload)
        return RECORD.pack(self.offset, self.size, length, self.count, self.encoding, self.item)


def _records(delta: memoryview, total: int) -> Iterator[_Record]:
    """The records, checked against the size of the weights."""
    if delta[: len(MAGIC)] != MAGIC:
        raise IntegrityError(f"the delta does not begin with {MAGIC.decode()}")
    at, end = len(MAGIC), 0
    while at < len(delta):
        if len(delta) - at < RECORD.size:
            raise IntegrityError("the delta ends inside the header of a record")
        offset, size, length, count, encoding, item = RECORD.unpack_from(delta, at)
        at += RECORD.size
        if offset < end or offset + size > total or item not in _UNSIGNED or size % item:
            raise IntegrityError(
                f"a record of the delta is for bytes {offset} to {offset + size}, items of {item}; "
                f"expected a range within {end} to {total}, items of 1, 2, 4 or 8 bytes"
            )
        if len(delta) - at < length:
            raise IntegrityError("the delta ends inside the payload of a record")
        yield _Record(offset, size, count, encoding, item, delta[at : at + length])
        at += length
        end = offset + size


def _apply_record(record: _Record, weights: Array) -> None:
    part = weights[record.offset : record.offset + record.size]
    if record.encoding == RAW:
        if len(record.payload) != record.size:
            raise IntegrityError(f"{len(record.payload)} raw bytes for {record.size}")
        part[:] = np.frombuffer(record.payload, np.uint8)
        return
    items = part.view(_UNSIGNED[record.item])
    if record.encoding == DENSE:
        data = _decompress(record.payload, record.size)
        if len(data) != record.size:
            raise IntegrityError(f"{len(data)} bytes of differences for {record.size}")
        items += _unzigzag(_from_planes(data, record.item))
    elif record.encoding == SPARSE:
        positions, coded = _sparse(record, len(items))
        items[positions] += _unzigzag(coded)
    else:
        raise IntegrityError(f"a record of the delta has the unknown encoding {record.encoding}")


def _sparse(record: _Record, items: int) -> tuple[Array, Array]:
    """Positions and zigzag-coded differences of a sparse record."""
    bulk = record.count * record.item
    data = _decompress(record.payload, bulk + record.count + items // ESCAPE)
    gaps = data[: max(0, len(data) - bulk)]
    ends = np.flatnonzero(gaps != ESCAPE)
    if not record.count or len(ends) != record.count or ends[-1] != len(gaps) - 1:
        raise IntegrityError(f"{len(ends)} gaps for {record.count} changed items")
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(record.count)
    if positions[-1] >= items:
        raise IntegrityError(f"a change of item {positions[-1]} in a range of {items} items")
    return positions, _from_planes(data[len(gaps) :], record.item)
