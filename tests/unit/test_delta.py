"""Deltas: what is applied is bit for bit what was encoded, and no damage goes unseen or beyond its range."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import delta
from offbeat.weights.hashing import verify_buffer
from offbeat.weights.manifest import describe

DTYPES = ["bfloat16", "float16", "float32", "float64", "uint8", "int64"]
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "uint8": 1, "int64": 8}
SHAPES = st.one_of(
    st.just(()),
    st.just((0, 3)),
    st.tuples(st.integers(1, 700)),
    st.tuples(st.integers(1, 30), st.integers(1, 31)),
)


@st.composite
def versions(draw: st.DrawFn) -> tuple[checkpoint.Manifest, bytes, bytes]:
    """The target's manifest, and the bytes of base and target."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base, target, tensors = [], [], []
    for index in range(draw(st.integers(1, 6))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        items = int(np.prod(shape, dtype=np.int64))
        old = rng.integers(0, 256, items * ITEM[dtype], np.uint8)
        new = old.copy()
        share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
        view = new.view(f"u{ITEM[dtype]}")
        changed = rng.random(items) < share
        step = draw(st.sampled_from(["one", "any"]))
        noise = rng.integers(0, 256, new.size, np.uint8).view(view.dtype)
        view[changed] += noise[changed] if step == "any" else view.dtype.type(1)
        tensors.append((f"t{index}", dtype, shape, new))
        base.append(old.tobytes())
        target.append(new.tobytes())
    return describe(tensors), b"".join(base), b"".join(target)


def encoded(manifest: checkpoint.Manifest, base: bytes, target: bytes) -> bytes | None:
    views = (delta.tensor_views(memoryview(side), manifest.tensors) for side in (base, target))
    return delta.encode(manifest.tensors, *views)


@settings(deadline=None)
@given(versions())
def test_what_is_applied_is_the_target_bit_for_bit(
    found: tuple[checkpoint.Manifest, bytes, bytes],
) -> None:
    manifest, base, target = found
    difference = encoded(manifest, base, target)
    if difference is None:
        assert base != target  # not worth it, which equal weights never are
        return
    weights = bytearray(base)
    delta.apply(difference, memoryview(weights))
    assert weights == target
    verify_buffer(memoryview(weights), manifest.tensors)
    assert len(difference) <= len(delta.MAGIC) + delta.LARGEST_SHARE * len(target)


@settings(max_examples=200, deadline=None)
@given(versions(), st.data())
def test_damage_is_an_error_or_found_by_the_hashes(
    found: tuple[checkpoint.Manifest, bytes, bytes], data: st.DataObject
) -> None:
    manifest, base, target = found
    difference = encoded(manifest, base, target)
    if difference is None or len(difference) == len(delta.MAGIC):
        return
    damaged = bytearray(difference)
    position = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        damaged[position] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[position:]
    weights = bytearray(base)
    try:
        delta.apply(bytes(damaged), memoryview(weights))
        verify_buffer(memoryview(weights), manifest.tensors)
    except IntegrityError:
        return
    assert weights == target


@settings(deadline=None)
@given(versions(), st.integers(0, 7))
def test_another_base_is_found_by_the_hashes(
    found: tuple[checkpoint.Manifest, bytes, bytes], place: int
) -> None:
    manifest, base, target = found
    difference = encoded(manifest, base, target)
    if difference is None or not base:
        return
    weights = bytearray(base)
    weights[place % len(weights)] ^= 0x10
    delta.apply(difference, memoryview(weights))
    if weights != target:  # unless all bytes of it were sent
        with pytest.raises(IntegrityError, match="does not match its hash"):
            verify_buffer(memoryview(weights), manifest.tensors)


def test_large_tensors_are_cut_and_small_ones_joined() -> None:
    rng = np.random.default_rng(0)
    sizes = [5, 3 * delta.BLOCK_BYTES + 2, 0, 7, 9, delta.BLOCK_BYTES // 2]
    old = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    manifest = describe([(f"t{i}", "uint8", (len(a),), a) for i, a in enumerate(old)])
    views = [memoryview(a) for a in old]
    found = list(delta.blocks(manifest.tensors, views, views))
    assert [len(block.base) for block in found] == [
        5, *[delta.BLOCK_BYTES] * 3, 2, 16, delta.BLOCK_BYTES // 2,
    ]  # fmt: skip
    assert found[0].offset == 0
    assert all(
        block.offset == before.offset + len(before.base) for before, block in pairwise(found)
    )


def test_a_step_in_bfloat16_takes_a_fraction() -> None:
    """0.34 % of the values one unit up or down: what a step at a rate of 1e-6 does to a small model."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 1 << 20, np.uint16)
    new = old.copy()
    places = rng.random(len(new)) < 0.0034
    new[places] += rng.choice(np.array([1, 65535], np.uint16), int(places.sum()))
    manifest = describe([("t", "bfloat16", (len(new),), new)])
    difference = encoded(manifest, old.tobytes(), new.tobytes())
    assert difference is not None
    assert len(difference) < 0.004 * new.nbytes


@pytest.mark.parametrize("record", [(9, 4, 0, 0, 1, 1), (0, 4, 0, 1, 9, 1), (0, 4, 0, 1, 2, 3)])
def test_records_that_make_no_sense(record: tuple[int, ...]) -> None:
    with pytest.raises(IntegrityError):
        delta.apply(delta.MAGIC + delta.RECORD.pack(*record), memoryview(bytearray(10)))


def test_a_payload_that_says_it_is_huge_takes_no_memory() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    header = delta.RECORD.pack(0, 8, len(bomb), 8, delta.DENSE, 1)
    with pytest.raises(IntegrityError, match="expected at most 8"):
        delta.apply(delta.MAGIC + header + bomb, memoryview(bytearray(8)))


@settings(deadline=None)
@given(versions(), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_deltas_of_parts_are_joined_to_one_of_the_whole(
    found: tuple[checkpoint.Manifest, bytes, bytes], owners: list[int]
) -> None:
    manifest, base, target = found
    deltas = []
    for owner in range(3):
        specs = [s for s, of in zip(manifest.tensors, owners, strict=False) if of == owner]
        views = (delta.tensor_views(memoryview(side), specs) for side in (base, target))
        difference = delta.encode(specs, *views, largest_share=float("inf"))
        assert difference is not None
        deltas.append(difference)
    weights = bytearray(base)
    delta.apply(delta.join(deltas, len(base)), memoryview(weights))
    assert weights == target
    if len(deltas[0]) > len(delta.MAGIC):
        with pytest.raises(IntegrityError, match="a record of the delta is for bytes"):
            delta.join([deltas[0], deltas[0]], len(base))
