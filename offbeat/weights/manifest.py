"""Manifests: what the bytes of a version mean, and how they are known to be the right ones.

Publishers call `describe`, the checkpoint service `check` and `seal`, receivers `check_sealed`. Where several
publishers send a version together, each describes its part with `describe_part`, and the service puts them together
with `join`.

Two digests, both BLAKE3-256:

- `weights_digest`: of ``offbeat.weights.v1`` and then of each tensor, sorted by name: name, dtype,
  number of extents, extents, hash. Texts and the hash are preceded by their length; numbers are
  64-bit little-endian. It depends on neither the order of the tensors nor who published them.
- `digest`: of the manifest's protobuf encoding without the field `digest`, fields in the order of
  their numbers (what every protobuf library writes; a manifest has no maps). Fields that this
  version doesn't know are kept and come last, and new fields get the next free numbers, so old
  readers compute the same digest for newer manifests.
"""

import math
import struct
from collections.abc import Iterable, Sequence

from offbeat.errors import IntegrityError, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.hashing import FAST_HASH_BYTES, HASH_BYTES, fast_hash_of, hash_of

Buffer = bytes | bytearray | memoryview

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element, by dtype."""


def as_bytes(buffer: Buffer) -> memoryview:
    """A view of the buffer's bytes; nothing is copied. It must be contiguous."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise WeightsError("a tensor's buffer is not contiguous: make it so before publishing")
    return view.cast("B")


def describe(tensors: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> checkpoint.Manifest:
    """A manifest of these tensors (name, dtype, shape, buffer), in this order.

    Fills in `tensors`, `total_bytes` and `weights_digest`; the rest is the publisher's. Raises
    `WeightsError` when a buffer does not fit its dtype and shape.
    """
    manifest = checkpoint.Manifest()
    offset = 0
    for name, dtype, shape, buffer in tensors:
        spec = _described(name, dtype, shape, buffer)
        spec.offset = offset
        manifest.tensors.append(spec)
        offset += spec.nbytes
    manifest.total_bytes = offset
    manifest.weights_digest = weights_digest(manifest.tensors)
    check(manifest)
    return manifest


def _described(
    name: str, dtype: str, shape: Sequence[int], buffer: Buffer
) -> checkpoint.TensorSpec:
    data = as_bytes(buffer)
    return checkpoint.TensorSpec(
        name=name,
        dtype=dtype,
        shape=shape,
        nbytes=len(data),
        hash=hash_of(data),
        fast_hash=fast_hash_of(data),
    )


def describe_part(
    tensors: Iterable[tuple[str, str, Sequence[int], Buffer]],
    offsets: Sequence[int],
    total_bytes: int,
) -> checkpoint.Manifest:
    """A manifest of some tensors of a version, which stand at these offsets among its `total_bytes`.

    Its `weights_digest` is of these tensors alone. Raises `WeightsError` as `describe` does, and when tensors overlap.
    """
    manifest = checkpoint.Manifest(total_bytes=total_bytes)
    for tensor, offset in zip(tensors, offsets, strict=True):
        spec = _described(*tensor)
        spec.offset = offset
        manifest.tensors.append(spec)
    manifest.weights_digest = weights_digest(manifest.tensors)
    check_part(manifest)
    return manifest


def join(parts: Sequence[checkpoint.Manifest]) -> checkpoint.Manifest:
    """The manifest of the version that the parts make up: the first one's, with the tensors of all of them.

    Raises `WeightsError` when they leave a gap, overlap, or don't belong together.
    """
    joined = checkpoint.Manifest()
    joined.CopyFrom(parts[0])
    del joined.tensors[:]
    specs = [spec for part in parts for spec in part.tensors]
    # Tensors without elements stand where the next one begins.
    joined.tensors.extend(sorted(specs, key=lambda spec: (spec.offset, spec.nbytes > 0)))
    joined.weights_digest = weights_digest(joined.tensors)
    check(joined)
    return joined


def weights_digest(tensors: Iterable[checkpoint.TensorSpec]) -> bytes:
    """The digest of the weights; see above for what goes into it."""
    parts = [b"offbeat.weights.v1"]
    for spec in sorted(tensors, key=lambda spec: spec.name):
        for text in (spec.name.encode(), spec.dtype.encode()):
            parts += (struct.pack("<Q", len(text)), text)
        parts.append(struct.pack(f"<{1 + len(spec.shape)}Q", len(spec.shape), *spec.shape))
        parts += (struct.pack("<Q", len(spec.hash)), spec.hash)
    return hash_of(b"".join(parts))


def digest(manifest: checkpoint.Manifest) -> bytes:
    """The digest of the manifest itself; see above for what goes into it."""
    bare = checkpoint.Manifest()
    bare.CopyFrom(manifest)
    bare.ClearField("digest")
    return hash_of(bare.SerializeToString(deterministic=True))


def seal(manifest: checkpoint.Manifest) -> None:
    """Sets `digest`. Nothing may be changed afterwards."""
    manifest.digest = digest(manifest)


def check(manifest: checkpoint.Manifest) -> None:
    """Raises `WeightsError` when the manifest contradicts itself."""
    offset = 0
    for spec in manifest.tensors:
        _check_tensor(spec)
        if spec.offset != offset:
            raise WeightsError(f"tensor {spec.name}: expected offset {offset}, found {spec.offset}")
        offset += spec.nbytes
    if not manifest.tensors:
        raise WeightsError("the manifest names no tensor; expected at least one")
    if manifest.total_bytes != offset:
        raise WeightsError(
            f"total_bytes is {manifest.total_bytes}, but the tensors have {offset} bytes"
        )
    _check_names_and_digest(manifest)


def check_part(manifest: checkpoint.Manifest) -> None:
    """The same for a part of a version, whose tensors may leave gaps between them, but not overlap."""
    end = 0
    for spec in manifest.tensors:
        _check_tensor(spec)
        if not end <= spec.offset <= manifest.total_bytes - spec.nbytes:
            raise WeightsError(
                f"tensor {spec.name}: expected it between bytes {end} and {manifest.total_bytes}, "
                f"found it at bytes {spec.offset} to {spec.offset + spec.nbytes}"
            )
        end = spec.offset + spec.nbytes
    _check_names_and_digest(manifest)


def _check_names_and_digest(manifest: checkpoint.Manifest) -> None:
    names = set()
    for spec in manifest.tensors:
        if spec.name in names:
            raise WeightsError(f"two tensors have the name {spec.name}; names must differ")
        names.add(spec.name)
    if manifest.weights_digest != weights_digest(manifest.tensors):
        raise WeightsError("weights_digest is not the digest of the tensors: use `describe`")


def check_sealed(manifest: checkpoint.Manifest) -> None:
    """Raises `IntegrityError` when the manifest is not the one that was sealed."""
    if manifest.digest != digest(manifest):
        raise IntegrityError(
            f"the manifest of version {manifest.version} does not match its own digest"
        )
    try:
        check(manifest)
    except WeightsError as error:
        raise IntegrityError(f"the manifest of version {manifest.version}: {error}") from error


def _check_tensor(spec: checkpoint.TensorSpec) -> None:
    if not spec.name:
        raise WeightsError(f"the tensor at byte {spec.offset} has no name")
    if spec.dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise WeightsError(f"tensor {spec.name}: unknown dtype {spec.dtype!r}; known: {known}")
    expected = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
    if spec.nbytes != expected:
        raise WeightsError(
            f"tensor {spec.name}: {spec.dtype} {list(spec.shape)} takes {expected} bytes, "
            f"found {spec.nbytes}"
        )
    if len(spec.fast_hash) not in {0, FAST_HASH_BYTES}:
        raise WeightsError(
            f"tensor {spec.name}: expected a fast hash of {FAST_HASH_BYTES} bytes or none, "
            f"found {len(spec.fast_hash)}"
        )
    if len(spec.hash) != HASH_BYTES:
        raise WeightsError(
            f"tensor {spec.name}: expected a hash of {HASH_BYTES} bytes, found {len(spec.hash)}"
        )
