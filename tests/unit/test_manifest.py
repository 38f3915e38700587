"""Manifests, hashes and chunks: what is described, and that no damage goes unseen."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import IntegrityError, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights import manifest as manifests
from offbeat.weights.chunks import NoRoom, WeightsWriter, chunks, read_batch
from offbeat.weights.frames import read_chunk
from offbeat.weights.hashing import TensorVerifier, hash_of, verify_file

TENSORS = [
    ("embed", "float32", (3, 2), np.arange(6, dtype=np.float32)),
    ("scale", "float16", (), np.array(1.5, dtype=np.float16)),
    ("empty", "bfloat16", (0, 4), b""),
    ("head", "bfloat16", (2, 3), bytes(range(12))),
    ("last_empty", "int64", (0,), np.empty(0, dtype=np.int64)),
]
DATA = b"".join(bytes(manifests.as_bytes(buffer)) for *_, buffer in TENSORS)


@pytest.fixture
def manifest() -> checkpoint.Manifest:
    described = manifests.describe(TENSORS)
    described.run_id, described.version, described.term = "run", 3, 1
    described.parity.sequences.add(token_ids=[1, 2], logprobs=[-0.5])
    manifests.seal(described)
    return described


def test_tensors_stand_one_after_the_other(manifest: checkpoint.Manifest) -> None:
    assert [(t.offset, t.nbytes) for t in manifest.tensors] == [
        (0, 24), (24, 2), (26, 0), (26, 12), (38, 0),
    ]  # fmt: skip
    assert [tuple(t.shape) for t in manifest.tensors] == [shape for _, _, shape, _ in TENSORS]
    assert manifest.total_bytes == len(DATA) == 38
    assert manifest.tensors[3].hash == hash_of(bytes(range(12)))
    manifests.check_sealed(manifest)


def test_equal_weights_have_equal_digests_whatever_their_order() -> None:
    assert (
        manifests.describe(TENSORS).weights_digest
        == manifests.describe(reversed(TENSORS)).weights_digest
    )


@pytest.mark.parametrize(
    "other",
    [
        ("heaD", "bfloat16", (2, 3), bytes(range(12))),
        ("head", "float16", (2, 3), bytes(range(12))),
        ("head", "bfloat16", (3, 2), bytes(range(12))),
        ("head", "bfloat16", (6,), bytes(range(12))),
        ("head", "bfloat16", (2, 3), bytes(range(1, 13))),
    ],
)
def test_different_weights_have_different_digests(other: tuple) -> None:
    changed = [other if tensor[0] == "head" else tensor for tensor in TENSORS]
    assert manifests.describe(TENSORS).weights_digest != manifests.describe(changed).weights_digest


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (("w", "float32", (3,), bytes(8)), "takes 12 bytes, found 8"),
        (("w", "float31", (2,), bytes(8)), "unknown dtype 'float31'"),
        (("", "float32", (2,), bytes(8)), "has no name"),
        (("embed", "float32", (2,), bytes(8)), "two tensors have the name embed"),
        (("w", "float32", (2, 2), np.zeros((4, 4), np.float32)[:2, :2]), "not contiguous"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(tensor: tuple, text: str) -> None:
    with pytest.raises(WeightsError, match=text):
        manifests.describe([*TENSORS, tensor])


def _set(**fields: object) -> Callable[[checkpoint.Manifest], None]:
    return lambda manifest: [setattr(manifest, *item) for item in fields.items()] and None


@pytest.mark.parametrize(
    "change",
    [
        _set(total_bytes=39),
        _set(weights_digest=bytes(32)),
        lambda m: m.ClearField("tensors"),
        lambda m: m.tensors.pop(),
        lambda m: setattr(m.tensors[3], "offset", 27),
        lambda m: setattr(m.tensors[3], "nbytes", 11),
        lambda m: setattr(m.tensors[3], "hash", b"short"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    manifest: checkpoint.Manifest, change: Callable[[checkpoint.Manifest], None]
) -> None:
    change(manifest)
    with pytest.raises(WeightsError):
        manifests.check(manifest)
    with pytest.raises(IntegrityError):
        manifests.check_sealed(manifest)


def test_every_flipped_bit_of_a_manifest_is_seen(manifest: checkpoint.Manifest) -> None:
    data = manifest.SerializeToString()
    accepted = 0
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = checkpoint.Manifest.FromString(bytes(damaged))
            manifests.check_sealed(found)
        except (DecodeError, IntegrityError):
            continue
        accepted += 1
        assert found == manifest  # The same content in other bytes is no damage.
    assert accepted < len(data)


def test_fields_from_the_future_are_part_of_the_digest(manifest: checkpoint.Manifest) -> None:
    field_100 = b"\xa2\x06\x03abc"
    newer = checkpoint.Manifest.FromString(manifest.SerializeToString() + field_100)
    with pytest.raises(IntegrityError):
        manifests.check_sealed(newer)
    manifests.seal(newer)
    manifests.check_sealed(checkpoint.Manifest.FromString(newer.SerializeToString()))


@given(st.lists(st.integers(1, 20), max_size=20))
def test_hashes_are_checked_however_the_bytes_are_cut(sizes: list[int]) -> None:
    verifier = TensorVerifier(manifests.describe(TENSORS).tensors)
    rest = DATA
    for size in sizes:
        verifier.feed(rest[:size])
        rest = rest[size:]
    verifier.feed(rest)
    verifier.finish()


@given(st.integers(0, len(DATA) * 8 - 1))
def test_a_flipped_bit_names_its_tensor(bit: int) -> None:
    described = manifests.describe(TENSORS)
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    hit = next(t.name for t in described.tensors if t.offset <= bit // 8 < t.offset + t.nbytes)
    with pytest.raises(IntegrityError, match=f"tensor {hit} does not match"):
        TensorVerifier(described.tensors).feed(damaged)


def test_missing_and_surplus_bytes_are_seen(manifest: checkpoint.Manifest, tmp_path: Path) -> None:
    verifier = TensorVerifier(manifest.tensors)
    verifier.feed(DATA[:-1])
    with pytest.raises(IntegrityError, match="end inside tensor head: expected 12, found 11"):
        verifier.finish()
    with pytest.raises(IntegrityError, match="1 bytes follow the last tensor"):
        TensorVerifier(manifest.tensors).feed(DATA + b"x")
    for content, text in ((DATA[:-1], "37 bytes"), (DATA + b"x", "39 bytes")):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(IntegrityError, match=text):
            verify_file(tmp_path / "file", manifest)


@given(st.lists(st.binary(max_size=50)), st.integers(1, 40))
def test_chunks_are_the_bytes_of_the_buffers(buffers: list[bytes], size: int) -> None:
    pieces = list(chunks([memoryview(buffer) for buffer in buffers], size))
    assert b"".join(pieces) == b"".join(buffers)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(pieces)


async def test_a_written_file_reads_back(manifest: checkpoint.Manifest, tmp_path: Path) -> None:
    writer = await WeightsWriter.create(tmp_path / "file", manifest)
    for byte in DATA:
        await writer.add(bytes([byte]))
    await writer.finish()
    verify_file(tmp_path / "file", manifest)
    found = [read_chunk(message) for _, message in read_batch(tmp_path / "file", 5, len(DATA))]
    assert found[0] is not None
    assert found[0].offset == 5
    assert b"".join(chunk.data for chunk in found if chunk is not None) == DATA[5:]
    with pytest.raises(IntegrityError, match="ends at byte 38"):
        read_batch(tmp_path / "file", 5, len(DATA) + 1)


async def test_many_tiny_pieces_are_written(tmp_path: Path) -> None:
    data = bytes(range(250)) * 20
    described = manifests.describe([("w", "uint8", (5000,), data)])
    writer = await WeightsWriter.create(tmp_path / "file", described)
    for index in range(5000):
        await writer.add(data[index : index + 1])
    await writer.finish()
    assert (tmp_path / "file").read_bytes() == data


async def test_a_full_disk_is_said_before_the_first_byte(tmp_path: Path) -> None:
    described = checkpoint.Manifest(total_bytes=2**60)
    with pytest.raises(NoRoom, match=f"no room for {2**60} bytes of weights in {tmp_path}"):
        await WeightsWriter.create(tmp_path / "file", described)
    assert not list(tmp_path.iterdir())


# ---- parts


@pytest.mark.parametrize("owners", [[0, 1, 0, 1, 0], [1, 1, 0, 0, 1], [0, 0, 0, 0, 1]])
def test_parts_are_joined_to_the_whole(manifest: checkpoint.Manifest, owners: list[int]) -> None:
    parts = []
    for owner in (0, 1):
        places = [place for place, of in enumerate(owners) if of == owner]
        offsets = [manifest.tensors[place].offset for place in places]
        parts.append(manifests.describe_part([TENSORS[p] for p in places], offsets, 38))
    joined = manifests.join(parts)
    assert sorted(t.name for t in joined.tensors) == sorted(t.name for t in manifest.tensors)
    assert joined.weights_digest == manifest.weights_digest
    assert [t.offset for t in joined.tensors] == [0, 24, 26, 26, 38]
    with pytest.raises(WeightsError):
        manifests.join([parts[0], parts[0]])


def test_tensors_of_a_part_may_not_overlap_or_lie_outside() -> None:
    for offsets in ([0, 23], [24, 0], [0, 37]):
        with pytest.raises(WeightsError, match="expected it between bytes"):
            manifests.describe_part(TENSORS[:2], offsets, 38)
