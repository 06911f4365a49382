"""The weights of a run, made from its seed and written without the product."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tests.support.safetensors_writer import raw, shard_name, write_sharded

SPEC_DTYPES = {"BF16": "bfloat16", "F32": "float32"}
_SHAPES = (("BF16", 1024, 1024), ("F32", 768, 1024), ("BF16", 517, 1024), ("F32", 33), ("BF16", 1536, 1024))
_SHARDS = 3


@dataclass(frozen=True)
class Weights:
    """`spec`: name -> dtype of torch, shape. `digests`: name -> SHA-256 of the bytes."""

    spec: dict[str, tuple[str, tuple[int, ...]]]
    digests: dict[str, str]
    nbytes: int


def write_weights(folder: Path, *, seed: int, mib: int) -> Weights:
    """Shards with an index, in all about `mib` MiB, in tensors of 132 bytes to 3 MiB."""
    tensors = {}
    nbytes = 0
    while nbytes < mib << 20:
        dtype, *shape = _SHAPES[len(tensors) % len(_SHAPES)]
        tensor = raw(str(dtype), *(int(each) for each in shape), seed=seed * 10_000 + len(tensors))
        tensors[f"layer{len(tensors):03}"] = tensor
        nbytes += len(tensor.data)
    names = list(tensors)
    shards = {
        shard_name(at + 1, _SHARDS): {name: tensors[name] for name in names[at::_SHARDS]} for at in range(_SHARDS)
    }
    write_sharded(folder, shards)
    (folder / "config.json").write_text("{}")
    return Weights(
        spec={name: (SPEC_DTYPES[each.dtype], each.shape) for name, each in tensors.items()},
        digests={name: hashlib.sha256(each.data).hexdigest() for name, each in tensors.items()},
        nbytes=nbytes,
    )
