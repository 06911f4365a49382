"""Memory for a plan to fill, and the comparison of what arrived with the trusted copy."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from modelexpress.checkpoint.index import CheckpointIndex, open_index
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.manifest import NO_STORAGE, Manifest, StorageSpec, TensorSpec, normal_stride
from modelexpress.plan import plan_checkpoint
from tests.support.safetensors_writer import Raw

TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def empty_like(tensors: Mapping[str, Raw], fill: int = 0xAA) -> dict[str, torch.Tensor]:
    """One tensor of its own for each, every byte `fill`."""
    made = {name: torch.empty(tensor.shape, dtype=TORCH[tensor.dtype]) for name, tensor in tensors.items()}
    for tensor in made.values():
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).fill_(fill)
    return made


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Where these tensors lie in memory; those that share a storage share it here too."""
    storages: list[StorageSpec] = []
    known: dict[int, int] = {}
    specs = []
    for name, tensor in sorted(tensors.items()):
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        at, offset = NO_STORAGE, 0
        if tensor.numel():
            at, offset = known.setdefault(storage.data_ptr(), len(storages)), tensor.storage_offset() * dtype.itemsize
            if at == len(storages):
                storages.append(StorageSpec(storage.nbytes(), storage.data_ptr(), "cpu"))
        shape = tuple(tensor.shape)
        specs.append(
            TensorSpec(name, at, offset, shape, normal_stride(shape, tensor.stride()), f"{dtype}"[6:], "parameter")
        )
    return Manifest(tuple(storages), tuple(specs))


def load(path: Path, into: Mapping[str, torch.Tensor], *, threads: int = 2) -> CheckpointIndex:
    """The whole way: open, plan, read."""
    index = open_index(path)
    DiskTensors(index, threads=threads).read(plan_checkpoint(index.manifest, manifest_of(into)))
    return index


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor of any dtype."""
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, Raw]) -> None:
    """Names, dtypes, shapes and bytes, and nothing that compares floats."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == TORCH[tensor.dtype], name
        assert tuple(found[name].shape) == tensor.shape, name
        assert bytes_of(found[name]) == tensor.data, name


def untouched(tensors: Iterable[torch.Tensor], fill: int = 0xAA) -> bool:
    """No byte differs from what `empty_like` put there."""
    return all(set(bytes_of(tensor)) <= {fill} for tensor in tensors)
