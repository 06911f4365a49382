"""What weights are: which ones (WeightsIdentity) and where their bytes lie (Manifest).

Storage first: a manifest lists storages, then the tensors that look into them. Ties, views and strided
tensors need no special case, and each storage byte travels once. It holds addresses and byte counts,
never a tensor, so it can be sent, stored and compared. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal

import msgspec

from modelexpress.errors import ConfigError, ManifestMismatch

# Names are torch's own, without the `torch.` prefix. These are the types that safetensors 0.8 and torch
# share, plus complex128, which only memory can hold. Packed sub-byte types count whole bytes:
# one float4_e2m1fn_x2 element is one byte that holds two values.
DTYPE_NBYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex64": 8,
    "complex128": 16,
}

# One checksum covers at most this much. Small enough to stay near the cache while it is checked right
# after its copy, large enough that 100 GB of weights need only 6,000 checksums.
PIECE_NBYTES = 16 * 1024 * 1024

NO_STORAGE = -1  # the storage of a tensor without elements

MAX_STORAGE_NBYTES = 1 << 48  # more than any machine maps; keeps sums far below 2**63
_MAX_DIMENSIONS = 64  # torch's own limit; also keeps the product of sizes cheap
_DEVICE = re.compile(r"cpu|file|cuda(:[0-9]{1,4})?")


class WeightsIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights these are: two engines with equal identities hold interchangeable bytes.

    Every field that changes the bytes or their layout after post-processing is here, and each must be
    given: a rank or a size that defaults to something would match weights it should not.

    `model` may be empty when `revision` is a content digest, because the digest alone says which bytes.
    `extra` holds what only one engine knows (attention back end, kv-cache dtype ...), as sorted pairs.
    """

    model: str
    revision: str
    engine: str
    engine_version: str
    dtype: str
    quantization: str
    role: Literal["target", "draft"]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    ep_rank: int
    ep_size: int
    dp_rank: int
    dp_size: int
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("revision", "engine", "engine_version", "dtype", "quantization"):
            if not getattr(self, name):
                raise ConfigError(f"identity field {name} is empty; give its value, or 'none' where there is none")
        for axis in ("tp", "pp", "ep", "dp"):
            at, of = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= at < of:
                raise ConfigError(f"identity has {axis}_rank {at} of {axis}_size {of}; need 0 <= rank < size")
        msgspec.structs.force_setattr(self, "extra", tuple(sorted(self.extra)))

    @property
    def key(self) -> str:
        """Hex SHA-256 of the canonical JSON of all fields: 64 characters, equal on every machine."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    @property
    def content_key(self) -> str:
        """Hex SHA-256 of model and revision alone: which raw checkpoint, whatever is made of it."""
        return content_key(self.model, self.revision)


def content_key(model: str, revision: str) -> str:
    """What a raw checkpoint is found by. `model` is empty where `revision` is a content digest."""
    return hashlib.sha256(msgspec.json.encode(["checkpoint", model, revision])).hexdigest()


class StorageSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One block of memory (or one shard file): `address` is 0 for a file."""

    nbytes: int
    address: int
    device: str


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: `offset` in bytes from the start of its storage, `stride` in elements.

    A dimension of size 1 has stride 1 here, whatever torch says, since it moves nothing.
    """

    name: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    kind: Literal["parameter", "buffer", "attribute"]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, gaps between strided elements included."""
        if 0 in self.shape:
            return 0
        last: int = sum(map(mul, self.shape, self.stride)) - sum(self.stride)  # every (size - 1) * step
        return (last + 1) * DTYPE_NBYTES[self.dtype]

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill their bytes exactly: contiguous up to the order of dimensions."""
        if self.is_contiguous:  # nearly always, and quicker to see
            return True
        step = 1
        for stride, size in sorted(
            (stride, size) for stride, size in zip(self.stride, self.shape, strict=True) if size > 1
        ):
            if stride != step:
                return False
            step *= size
        return True

    @property
    def is_contiguous(self) -> bool:
        return self.stride == contiguous_stride(self.shape)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of tensors that overlap, as one run: usually one tensor, or one tie."""

    storage: int
    offset: int
    nbytes: int
    names: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Every storage and tensor of one model. Tensors are sorted by name; names are unique.

    `scalars` are the Python floats and small host arrays on the model's modules, as text. They do not
    travel: a plan compares them, because a float derived from a weight would be wrong on the target.
    """

    storages: tuple[StorageSpec, ...]
    tensors: tuple[TensorSpec, ...]
    scalars: tuple[tuple[str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that travel: each byte under a tensor once, however many tensors look at it."""
        return sum(span.nbytes for span in self.spans())

    def spans(self) -> tuple[Span, ...]:
        """Maximal runs of overlapping tensors, by storage and offset. Tensors that only touch stay apart."""
        spans: list[Span] = []
        placed = sorted((t.storage, t.offset, -t.nbytes, t.name) for t in self.tensors if t.storage != NO_STORAGE)
        names: list[str] = []
        at, start, end = NO_STORAGE, 0, 0
        for storage, offset, negative_nbytes, name in placed:
            if storage == at and offset < end:
                names.append(name)
                end = max(end, offset - negative_nbytes)
                continue
            if names:
                spans.append(Span(at, start, end - start, tuple(names)))
            names = [name]
            at, start, end = storage, offset, offset - negative_nbytes
        if names:
            spans.append(Span(at, start, end - start, tuple(names)))
        return tuple(spans)

    @property
    def layout_digest(self) -> str:
        """Hex SHA-256 of everything but addresses and devices: equal where a plan would succeed trivially."""
        layout = (tuple(s.nbytes for s in self.storages), self.tensors, self.scalars)
        return hashlib.sha256(msgspec.msgpack.encode(layout)).hexdigest()

    def validate(self) -> None:
        """Check a manifest that came from outside: every tensor lies inside its storage.

        Raises:
            ManifestMismatch: names the first tensor or storage that is impossible.
        """
        for at, storage in enumerate(self.storages):
            if not (0 < storage.nbytes <= MAX_STORAGE_NBYTES and 0 <= storage.address < 1 << 63):
                raise ManifestMismatch(f"storage {at} has {storage.nbytes} bytes at {storage.address:#x}: impossible")
            if _DEVICE.fullmatch(storage.device) is None:
                raise ManifestMismatch(
                    f"storage {at} is on device {storage.device!r:.60}; it must be cpu, cuda:N or file"
                )
        for before, after in pairwise(self.tensors):
            if before.name >= after.name:
                raise ManifestMismatch(f"tensor names are not unique and sorted at {after.name!r}")
        for tensor in self.tensors:
            reason = _impossible(tensor, self.storages)
            if reason:
                raise ManifestMismatch(f"tensor {tensor.name!r} is impossible: {reason}")

    def raw_spans(self) -> tuple[Span, ...]:
        """The spans of raw tensors of a checkpoint: each tensor contiguous and in a span of its own.

        A target's tensors are paired with them by name alone, so their bytes must be as many as a contiguous tensor
        of that shape has.

        Raises:
            ManifestMismatch: names the first tensor that is not.
        """
        for tensor in self.tensors:
            if not tensor.is_contiguous:
                raise ManifestMismatch(
                    f"raw tensor {tensor.name!r} has strides {list(tensor.stride)} for shape {list(tensor.shape)}; "
                    "a checkpoint's tensors are contiguous"
                )
        spans = self.spans()
        for span in spans:
            if len(span.names) > 1:
                raise ManifestMismatch(f"raw tensors {span.names[0]!r} and {span.names[1]!r} lie over each other")
        return spans


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major stride in elements, 1 where the dimension has one element; all 1 for an empty tensor."""
    steps = tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1]
    return normal_stride(shape, steps) if shape else ()


def normal_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The stride without the numbers that mean nothing, so that equal layouts compare equal."""
    if 0 in shape:
        return (1,) * len(shape)
    if 1 not in shape:
        return tuple(stride)
    return tuple(1 if size == 1 else step for size, step in zip(shape, stride, strict=True))


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What one checksum covers: at most PIECE_NBYTES of one span. `span` is the span's index."""

    span: int
    storage: int
    offset: int
    nbytes: int


def cut(spans: Iterable[Span]) -> Iterator[Piece]:
    """Cut every span into pieces, in order. Both ends of a transfer cut alike, so piece n is piece n."""
    for index, span in enumerate(spans):
        for start in range(0, span.nbytes, PIECE_NBYTES):
            yield Piece(index, span.storage, span.offset + start, min(PIECE_NBYTES, span.nbytes - start))


def pieces(manifest: Manifest) -> Iterator[Piece]:
    """What the checksums of a manifest cover, in their order."""
    return cut(manifest.spans())


def batches(tensors: Iterable[TensorSpec], nbytes: int) -> Iterator[list[TensorSpec]]:
    """Neighbours, as many as fit into `nbytes` together; a larger tensor stays alone."""
    batch: list[TensorSpec] = []
    filled = 0
    for tensor in tensors:
        if batch and filled + tensor.nbytes > nbytes:
            yield batch
            batch, filled = [], 0
        batch.append(tensor)
        filled += tensor.nbytes
    if batch:
        yield batch


def _impossible(tensor: TensorSpec, storages: tuple[StorageSpec, ...]) -> str | None:
    if tensor.dtype not in DTYPE_NBYTES:
        return f"unknown dtype {tensor.dtype!r}"
    if len(tensor.shape) > _MAX_DIMENSIONS:
        return f"{len(tensor.shape):,} dimensions, and torch has at most {_MAX_DIMENSIONS}"
    if len(tensor.shape) != len(tensor.stride):
        return f"{len(tensor.shape)} sizes and {len(tensor.stride)} strides"
    if min((*tensor.shape, *tensor.stride, tensor.offset)) < 0:
        return "a negative size, stride or offset"
    if math.prod([size or 1 for size in tensor.shape]) >= 1 << 60 or max((*tensor.stride, tensor.offset)) >= 1 << 63:
        return "sizes that overflow"  # torch cannot make it, even where it has no elements
    if tensor.storage == NO_STORAGE:
        return None if 0 in tensor.shape else "it has elements and no storage"
    if not 0 <= tensor.storage < len(storages):
        return f"storage {tensor.storage} of {len(storages)}"
    end, limit = tensor.offset + tensor.nbytes, storages[tensor.storage].nbytes
    if 0 in tensor.shape or end > limit:
        return f"it ends at byte {end} of a storage of {limit}"
    return None
