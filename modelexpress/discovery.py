"""Finds every tensor that a module holds, wherever it hangs, and says what it found as a Manifest.

Parameters and buffers are only part of a served model: engines keep derived tensors as plain attributes,
in containers, on quantisation objects, on parameters, in closures. A fast path that misses one serves wrong
tokens, so what cannot be carried is refused by name.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from modelexpress.errors import CheckpointError, NotAvailable
from modelexpress.manifest import (
    DTYPE_NBYTES,
    NO_STORAGE,
    Manifest,
    StorageSpec,
    TensorSpec,
    normal_stride,
)

Kind = Literal["parameter", "buffer", "attribute"]

# Far above any model seen (a 671 B mixture of experts has some 200,000 objects); a graph beyond it is not a
# model but something that a module points to by accident, like a whole engine.
_MOST_OBJECTS = 2_000_000

# torch's own bookkeeping on a module: `_parameters` and the like are read through torch, hooks hold no weights.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_LEAVES = (str, bytes, bool, int, complex, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """One tensor under one name. The same memory may be found under several names."""

    name: str
    tensor: torch.Tensor
    kind: Kind
    persistent: bool


@dataclass(frozen=True, slots=True)
class Discovery:
    """All that was found, in a deterministic order. `scalars`: floats and small host arrays on modules, as text."""

    tensors: tuple[FoundTensor, ...]
    scalars: tuple[tuple[str, str], ...]


def discover(module: nn.Module) -> Discovery:
    """Every tensor reachable from `module`.

    Raises:
        NotAvailable: names a tensor in a set, which has no order, or a graph too large to be a model.
    """
    return _Walk(module).run()


def persistent_tensors(module: nn.Module) -> tuple[FoundTensor, ...]:
    """What a checkpoint must cover: parameters and persistent buffers, each name of a tie."""
    return tuple(found for found in _registered(module) if found.persistent)


def manifest_of(found: tuple[FoundTensor, ...], scalars: tuple[tuple[str, str], ...] = ()) -> Manifest:
    """Describe tensors by the storages they look into. The caller keeps them alive and in place.

    Raises:
        NotAvailable: names a tensor without real memory (meta, sparse, a wrapper subclass), or of a dtype
            that cannot travel.
    """
    index_of: dict[tuple[str, int], int] = {}
    storages: list[StorageSpec] = []
    tensors: list[TensorSpec] = []
    for each in sorted(found, key=lambda found: found.name):
        tensor = each.tensor
        _refuse_unsupported(each.name, tensor)
        shape, at, offset = tuple(tensor.shape), NO_STORAGE, 0
        if tensor.numel():
            storage = tensor.untyped_storage()
            device = str(tensor.device)
            at = index_of.setdefault((device, storage.data_ptr()), len(storages))
            if at == len(storages):
                storages.append(StorageSpec(storage.nbytes(), storage.data_ptr(), device))
            offset = int(tensor.storage_offset()) * tensor.element_size()
        tensors.append(
            TensorSpec(
                each.name, at, offset, shape, normal_stride(shape, tensor.stride()), dtype_name(tensor), each.kind
            )
        )
    return Manifest(tuple(storages), tuple(tensors), scalars)


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name for the dtype without the prefix, as manifests spell it: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The dtype of a described tensor.

    Raises:
        CheckpointError: this torch does not have it; names the tensor.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"tensor {spec.name!r} is {spec.dtype}, which torch {torch.__version__} does not have; install a newer one"
        )
    return dtype


def holds_tensors(value: object, *, besides: nn.Module) -> bool:
    """Whether a value keeps a tensor or a module alive, other than through `besides`."""
    return any(isinstance(each, (torch.Tensor, nn.Module)) for _, each in _graph("", value, {id(besides)}))


def _refuse_unsupported(name: str, tensor: torch.Tensor) -> None:
    reason = None
    if tensor.is_meta:
        reason = "it is on the meta device and has no memory; build the model on a real device"
    elif is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        reason = f"a {type(tensor).__name__} with layout {tensor.layout} is not one block of memory"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "it is a conjugate or negative view; call resolve_conj() or resolve_neg()"
    elif dtype_name(tensor) not in DTYPE_NBYTES:
        reason = f"dtype {dtype_name(tensor)} cannot travel"
    if reason:
        raise NotAvailable(f"tensor {name!r}: {reason}")


def _registered(module: nn.Module) -> Iterator[FoundTensor]:
    for prefix, each in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in each._parameters.items():
            if parameter is not None:
                yield FoundTensor(dot + name, parameter, "parameter", persistent=True)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                persistent = name not in each._non_persistent_buffers_set
                yield FoundTensor(dot + name, buffer, "buffer", persistent)


class _Walk:
    """One walk over a module: registered tensors first, then everything that hangs beside them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found = {each.name: each for each in _registered(module)}
        self._scalars: dict[str, str] = {}
        self._seen = {id(each) for each in module.modules()}

    def run(self) -> Discovery:
        for name, each in list(self._found.items()):
            self._walk_attributes(f"{name}.", vars(each.tensor))
        for prefix, each in self._module.named_modules():
            self._walk_module(f"{prefix}." if prefix else "", each)
        return Discovery(tuple(self._found.values()), tuple(sorted(self._scalars.items())))

    def _walk_module(self, dot: str, module: nn.Module) -> None:
        own = {name: value for name, value in vars(module).items() if name not in _MODULE_INTERNALS}
        for name, value in own.items():
            text = _scalar_text(value)
            if text is not None:
                self._scalars[dot + name] = text
        self._walk_attributes(dot, own)

    def _walk_attributes(self, dot: str, attributes: Mapping[str, object]) -> None:
        for name, value in attributes.items():
            for path, each in _graph(dot + name, value, self._seen):
                self._add(path, each)

    def _add(self, path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._found.setdefault(path, FoundTensor(path, value, "attribute", persistent=False))
        elif isinstance(value, nn.Module):
            for inner in _registered(value):
                name = f"{path}.{inner.name}"
                self._found.setdefault(name, FoundTensor(name, inner.tensor, inner.kind, persistent=False))
            fresh = [(name, each) for name, each in value.named_modules() if id(each) not in self._seen or not name]
            self._seen.update(id(each) for _, each in fresh)
            for name, each in fresh:
                self._walk_module(f"{path}.{name}." if name else f"{path}.", each)


def _graph(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Tensors and modules reachable from `value` with their paths; never twice, never through a module.

    Tensors are yielded under every path that reaches them (each may be a tie); other objects are visited once.
    """
    pending = [(path, value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        if isinstance(value, (*_LEAVES, float)) or id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > _MOST_OBJECTS:
            raise NotAvailable(f"more than {_MOST_OBJECTS:,} objects hang on the model, last seen at {path!r}")
        if isinstance(value, nn.Module):
            yield path, value
            continue
        pending.extend(reversed(list(_children(path, value))))


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    """What one object refers to, by name. Properties are never called; weak references are not followed."""
    if isinstance(value, Mapping):
        if isinstance(value, (dict, types.MappingProxyType)):
            yield from ((f"{path}[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{path}[{at}]", each) for at, each in enumerate(list(value)))
    elif isinstance(value, (set, frozenset)):
        if any(isinstance(each, torch.Tensor) for each in value):
            raise NotAvailable(f"{path!r} is a set of tensors, which has no order; use a list")
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", each) for name, each in (("args", value.args), ("keywords", value.keywords)))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _closure(path, value)
    elif hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        yield from ((f"{path}.{name}", each) for name, each in _attributes(value))


def _closure(path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.<closure>.{name}", cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = cls.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # a slot that was never set
                    continue


def _scalar_text(value: object) -> str | None:
    if isinstance(value, float):
        return repr(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return f"{type(value).__name__} {getattr(value, 'shape', ())} {xxhash.xxh3_64_hexdigest(value.tobytes())}"
    return None
