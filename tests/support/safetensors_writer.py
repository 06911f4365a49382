"""Writes safetensors files byte by byte, good ones and broken ones. Knows nothing of the product or the library.

A file is an 8-byte little-endian header length, the header exactly as given, and the data.
"""

import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class Raw:
    """One tensor as a file holds it: the trusted copy that tests compare with."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def raw(dtype: str, *shape: int, seed: int = 0) -> Raw:
    """A tensor of random bytes: NaN payloads, -0.0 and subnormals included."""
    nbytes = SIZES[dtype]
    for size in shape:
        nbytes *= size
    return Raw(dtype, shape, random.Random(f"{dtype}{shape}{seed}").randbytes(nbytes))


def write_raw(path: Path, header: bytes | str, data: bytes = b"", *, length: int | None = None) -> Path:
    """Header and data as they are, and a header length that may lie."""
    header = header.encode() if isinstance(header, str) else header
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, object]:
    """One value of a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def header_of(tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of tensors that lie one after the other, unpadded."""
    described: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in tensors.items():
        described[name] = entry(tensor.dtype, tensor.shape, begin, begin + len(tensor.data))
        begin += len(tensor.data)
    return json.dumps(described, separators=(",", ":")).encode()


def write_file(path: Path, tensors: Mapping[str, Raw], *, header_nbytes: int | None = None) -> Path:
    """A good file, its tensors in the order given; `header_nbytes` pads the header with spaces to a length."""
    header = header_of(tensors)
    return write_raw(path, header.ljust(header_nbytes or 0), b"".join(tensor.data for tensor in tensors.values()))


def write_sharded(
    folder: Path, shards: Mapping[str, Mapping[str, Raw]], *, index: Mapping[str, str] | None = None
) -> Path:
    """A folder of shards with an index, which names every tensor where it is unless `index` is given."""
    for name, tensors in shards.items():
        write_file(folder / name, tensors)
    found = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    write_index(folder, found if index is None else index)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, object]) -> Path:
    """model.safetensors.index.json with exactly this map."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}))
    return path


def three_shards(folder: Path) -> dict[str, Raw]:
    """A sharded checkpoint of seven tensors in three files; returns the trusted copy of all of them."""
    names = ("embed", "layer.0.a", "layer.0.b", "layer.1.a", "layer.1.b", "norm", "head")
    tensors = {name: raw("BF16", 65, 33, seed=at) for at, name in enumerate(names)}
    places = (names[:3], names[3:5], names[5:])
    shards = {shard_name(at + 1, 3): {name: tensors[name] for name in place} for at, place in enumerate(places)}
    write_sharded(folder, shards)
    return tensors


def shard_name(number: int, total: int) -> str:
    """The usual name of a shard."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"
