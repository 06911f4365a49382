"""The header of one safetensors file: bytes in, checked entries out. Pure; opens nothing.

Accepts what the reference library (safetensors 0.8) accepts, and never more; a test compares the two. It
is stricter where a file could be understood in two ways or no torch tensor can hold it: duplicate names,
white space before the first brace, entries written as lists, sizes of 2**63 and more, and the 6-bit floats.
"""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec

from modelexpress.checkpoint.strict_json import NotStrictJson, parse_object
from modelexpress.errors import CheckpointError

LENGTH_NBYTES = 8  # a little-endian unsigned integer in front of the header: the header's length
MAX_HEADER_NBYTES = 100_000_000  # the reference library's own limit

# safetensors' names of types, and ours (modelexpress.manifest.DTYPE_NBYTES).
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
}

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_NO_TORCH_TYPE = ("F6_E2M3", "F6_E3M2")
_MAX_EXTRA_DEPTH = 32  # of values under keys that we do not know; the library stops at 128

# How files start that are often found under a name ending in .safetensors.
_IMPOSTORS = (
    (b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull` in the clone, or download the file again"),
    (b"<", "an HTML or XML page, so the download failed: get the file again, and check the address and the token"),
    (b"PK\x03\x04", "a zip archive as torch.save writes it: loading it can run code; convert it to safetensors"),
    (b"\x80\x02", "a pickle: loading it can run code; convert it to safetensors"),
    (b"GGUF", "a GGUF file: convert it to safetensors"),
    (b"\x1f\x8b", "a gzip archive: unpack it"),
)


_MAX_DIMENSIONS = 64  # torch's own limit; also keeps the product of sizes cheap


class Entry(msgspec.Struct, frozen=True):
    """One tensor of one file: `begin` and `end` in bytes from the start of the data. dtype by our name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_nbytes(start: bytes, file_nbytes: int, shown: str) -> int:
    """The header's length, from the first bytes of the file (64 are enough to say what else it may be).

    Raises:
        CheckpointError: no safetensors file starts like this, or the file ends inside its header.
    """
    if file_nbytes < LENGTH_NBYTES:
        raise CheckpointError(f"{shown}: not a safetensors file: {file_nbytes} bytes, and its header's length takes 8")
    nbytes = int.from_bytes(start[:LENGTH_NBYTES], "little")
    if nbytes > MAX_HEADER_NBYTES:
        # Only here: a valid file may well start with "<", which is a length of 60.
        for magic, what in _IMPOSTORS:
            if start.lstrip().startswith(magic):
                raise CheckpointError(f"{shown}: not a safetensors file ({file_nbytes:,} bytes) but {what}")
        raise CheckpointError(
            f"{shown}: not a safetensors file: it starts with {start[:16]!r}, which as a header length is {nbytes:,} "
            f"(at most {MAX_HEADER_NBYTES:,}); an unfinished or failed download?"
        )
    if LENGTH_NBYTES + nbytes > file_nbytes:
        raise CheckpointError(
            f"{shown}: cut short inside its header: expected at least {LENGTH_NBYTES + nbytes:,} bytes, "
            f"found {file_nbytes:,}"
        )
    return nbytes


def parse_header(header: bytes, data_nbytes: int, shown: str) -> tuple[Entry, ...]:
    """The tensors that `header` describes, in file order.

    Args:
        data_nbytes: what follows the header in the file; the tensors must cover it exactly.
        shown: the file's name in messages.

    Raises:
        CheckpointError: names file, tensor and reason, with the numbers.
    """
    try:
        described = parse_object(header)
    except NotStrictJson as exc:
        raise CheckpointError(f"{shown}: its header cannot be read: {exc}") from exc
    _check_metadata(described.pop("__metadata__", None), shown)
    entries = [_entry(name, info, shown) for name, info in described.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_cover(entries, data_nbytes, LENGTH_NBYTES + len(header), shown)
    return tuple(entries)


def _check_metadata(metadata: object, shown: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{shown}: __metadata__ in its header is not a map from text to text")


def _entry(name: str, info: object, shown: str) -> Entry:
    try:
        return _checked_entry(name, info)
    except ValueError as exc:
        raise CheckpointError(f"{shown}: tensor {name!r}: {exc}") from None


def _checked_entry(name: str, info: object) -> Entry:
    if not isinstance(info, dict):
        raise ValueError("described by something else than an object")  # noqa: TRY004 - see _entry
    for key in info.keys() - {"dtype", "shape", "data_offsets"}:
        _check_extra(key, info[key])
    dtype, shape = _dtype(info.get("dtype")), _sizes("shape", info.get("shape"))
    offsets = _sizes("data_offsets", info.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {list(offsets)} are not [begin, end] with begin <= end")
    begin, end = offsets
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"shape has {len(shape):,} dimensions, and torch has at most {_MAX_DIMENSIONS}")
    if math.prod(size or 1 for size in shape) >= 1 << 60:
        raise ValueError(f"shape {list(shape)} overflows")
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8:
        raise ValueError(f"shape {list(shape)} of {dtype} does not fill whole bytes")
    if bits // 8 != end - begin:
        raise ValueError(
            f"shape {list(shape)} of {dtype} needs {bits // 8:,} bytes, its range [{begin}, {end}) has {end - begin:,}"
        )
    return Entry(name, DTYPES[dtype], _in_memory(dtype, shape), begin, end)


def _dtype(value: object) -> str:
    if value in _NO_TORCH_TYPE:
        raise ValueError(f"dtype {value} has no torch type; convert the tensor to F8 or BF16")
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"unknown dtype {value!r}; known are {', '.join(sorted(DTYPES))}")
    return value


def _sizes(what: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        raise ValueError(f"{what} {value!r:.200} is not a list of whole numbers from 0 to 2**63 - 1")
    return tuple(value)


def _in_memory(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that torch gives it: a file counts single 4-bit values, torch counts bytes of two."""
    if dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise ValueError(f"shape {list(shape)} of F4: the last size must be even, two values make a byte")
    return (*shape[:-1], shape[-1] // 2)


def _check_extra(key: str, value: object, depth: int = 0) -> None:
    """A key that we do not know is ignored, as the library does, where the library can read its value."""
    if depth > _MAX_EXTRA_DEPTH:
        raise ValueError(f"the value of {key!r} is nested too deeply")
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _check_extra(key, each, depth + 1)
    elif isinstance(value, int | float) and not abs(value) < 1e300:
        raise ValueError(f"the value of {key!r} holds a number out of range")


def _check_cover(entries: list[Entry], data_nbytes: int, data_offset: int, shown: str) -> None:
    """No hole, no overlap, no byte too few or too many."""
    nothing = Entry("", "", (), 0, 0)
    for before, entry in pairwise([nothing, *entries]):
        if entry.begin < before.end:
            raise CheckpointError(
                f"{shown}: tensor {entry.name!r}: its bytes [{entry.begin}, {entry.end}) overlap those of tensor "
                f"{before.name!r}, [{before.begin}, {before.end})"
            )
        if entry.begin > before.end:
            raise CheckpointError(
                f"{shown}: tensor {entry.name!r}: it begins at byte {entry.begin} of the data, but what comes before "
                f"ends at {before.end}: {entry.begin - before.end:,} bytes belong to no tensor"
            )
    end = entries[-1].end if entries else 0
    if end == data_nbytes:
        return
    expected, found = data_offset + end, data_offset + data_nbytes
    what = "cut short" if found < expected else "longer than its header says"
    last = f"; its last tensor is {entries[-1].name!r}" if entries else "; it describes no tensor"
    raise CheckpointError(f"{shown}: {what}: expected {expected:,} bytes, found {found:,}{last}")
