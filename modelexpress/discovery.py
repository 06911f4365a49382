"""Finds every tensor that a module holds, wherever it hangs, and says what it found as a Manifest.

Parameters and buffers are only part of a served model: engines keep derived tensors as plain attributes,
in containers, on quantisation objects, on parameters, in closures and hooks. A fast path that misses one serves
wrong tokens, so what cannot be carried is refused by name, and Python values are compared.
"""

from __future__ import annotations

import array
import functools
import hashlib
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, mul
from typing import Any, Literal, NamedTuple

import msgspec
import torch
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

# torch's own bookkeeping on a module: `_parameters` and the like are read through torch.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_HOOKS = tuple(sorted(name for name in _MODULE_INTERNALS if name.endswith(("_hooks", "_hooks_with_kwargs"))))
_LEAVES = (str, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size)
_LONG = 16  # a container of more numbers than this is compared as a whole
_NUMBERS = (bool, int, float, complex)
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_NBYTES if hasattr(torch, name)}
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_KEYS = (str, int, float, bool, type(None), torch.dtype, torch.device)


class FoundTensor(msgspec.Struct, frozen=True, eq=False):
    """One tensor under one name. The same memory may be found under several names.

    `registered`: the parameters or buffers of its module, where another may take its place, and its key there.
    """

    name: str
    tensor: torch.Tensor
    kind: Kind
    persistent: bool
    registered: tuple[dict[str, Any], str] | None = None


@dataclass(frozen=True, slots=True)
class Discovery:
    """All that was found, in a deterministic order. `scalars`: numbers and small host arrays, as text."""

    tensors: tuple[FoundTensor, ...]
    scalars: tuple[tuple[str, str], ...]


def discover(module: nn.Module, *, foreign: tuple[type, ...] = ()) -> Discovery:
    """Every tensor and every Python number reachable from `module`.

    Objects of the types `foreign` belong to the engine and not to the model; what they hold is left alone.

    Raises:
        NotAvailable: names what holds weights in a way that cannot be followed: a set, which has no order, an
            opaque object of torch, two things under one name, or a graph too large to be a model.
    """
    return _Walk(module, foreign).run()


def persistent_tensors(module: nn.Module) -> tuple[FoundTensor, ...]:
    """What a checkpoint must cover: parameters and persistent buffers, each name of a tie.

    Raises:
        NotAvailable: the model saves more than that by code of its own, as a quantised layer does.
    """
    found = tuple(each for each in _registered(_paths(module)) if each.persistent)
    own = sorted(module.state_dict(keep_vars=True).keys() - {each.name for each in found})
    if own:
        shown = ", ".join(own[:5])
        raise NotAvailable(
            f"the model saves {len(own)} values that are no parameters or buffers ({shown}); use its own"
        )
    return found


def manifest_of(
    found: tuple[FoundTensor, ...], scalars: tuple[tuple[str, str], ...] = (), *, meta: bool = False
) -> Manifest:
    """Describe tensors by the storages they look into. The caller keeps them alive and in place.

    Storages that overlap in memory, as two views of one foreign array do, count as one. With `meta`, tensors on
    the meta device are described too, as a layout: their addresses tell them apart and mean nothing.

    Raises:
        NotAvailable: names a tensor without real memory (meta, freed, sparse, a wrapper subclass), one that
            reaches beyond its storage, or one of a dtype that cannot travel.
    """
    ordered = sorted(found, key=attrgetter("name"))
    places = [_place(each, meta=meta) for each in ordered]
    homes: dict[tuple[str, int], StorageSpec] = {}
    for place in places:
        if place is not None and (place.home not in homes or homes[place.home].nbytes < place.storage_nbytes):
            homes[place.home] = StorageSpec(place.storage_nbytes, place.home[1], place.home[0])
    _merge(homes)
    numbers: dict[StorageSpec, int] = {}
    tensors: list[TensorSpec] = []
    for each, place in zip(ordered, places, strict=True):
        number, offset = NO_STORAGE, 0
        if place is not None:
            storage = homes[place.home]
            number = numbers.setdefault(storage, len(numbers))
            offset = place.offset + place.home[1] - storage.address
        tensor = each.tensor
        shape = tuple(tensor.shape)
        stride = normal_stride(shape, tensor.stride())
        tensors.append(TensorSpec(each.name, number, offset, shape, stride, dtype_name(tensor), each.kind))
    return Manifest(tuple(numbers), tuple(tensors), scalars)


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name for the dtype without the prefix, as manifests spell it: "bfloat16"."""
    return _DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


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


def slots_of(value: object) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """The `__slots__` of an object, by name: attributes that its `__dict__` does not show."""
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__")
        if not slots:
            continue
        for name in (slots,) if isinstance(slots, str) else slots:
            member = cls.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                yield name, member


class _Place(NamedTuple):
    """Where a tensor begins: `offset` bytes into the storage at `home`, a device and an address there."""

    home: tuple[str, int]
    offset: int
    storage_nbytes: int


def _place(found: FoundTensor, *, meta: bool) -> _Place | None:
    """None for a tensor without elements, which lies nowhere."""
    tensor = found.tensor
    try:
        _refuse_unsupported(found.name, tensor, meta=meta)
        if not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        # Nothing lies on the meta device: a number tells the storages there apart.
        device, address = ("meta", storage._cdata) if tensor.is_meta else (str(tensor.device), storage.data_ptr())
        itemsize, stride = tensor.element_size(), tensor.stride()
        offset = int(tensor.storage_offset()) * itemsize
        last = sum(map(mul, tensor.shape, stride)) - sum(stride)
        end, storage_nbytes = offset + (last + 1) * itemsize, storage.nbytes()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as exc:
        raise NotAvailable(f"tensor {found.name!r}: torch cannot say where it lies: {exc}") from exc
    if address == 0 or end > storage_nbytes:
        raise NotAvailable(
            f"tensor {found.name!r}: it needs {end:,} bytes of a storage that has {storage_nbytes:,} at {address:#x}; "
            "its memory was freed, shrunk, or never there"
        )
    return _Place((device, address), offset, storage_nbytes)


def _merge(homes: dict[tuple[str, int], StorageSpec]) -> None:
    """Make storages that overlap in memory one, to which the (device, address) of each then leads."""
    group: list[tuple[str, int]] = []
    end = 0
    for home in sorted(home for home in homes if home[0] != "meta"):
        if group and (home[0] != group[0][0] or home[1] >= end):
            group, end = [], 0
        group.append(home)
        end = max(end, home[1] + homes[home].nbytes)
        if len(group) > 1:
            device, start = group[0]
            homes.update(dict.fromkeys(group, StorageSpec(end - start, start, device)))


def _refuse_unsupported(name: str, tensor: torch.Tensor, *, meta: bool) -> None:
    reason = None
    if tensor.is_meta and not meta:
        reason = "it is on the meta device and has no memory; build the model on a real device"
    elif type(tensor) not in _PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor):
        reason = f"a {type(tensor).__name__} is not one block of memory"
    elif tensor.layout != torch.strided:
        reason = f"a {type(tensor).__name__} with layout {tensor.layout} is not one block of memory"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "it is a conjugate or negative view; call resolve_conj() or resolve_neg()"
    elif dtype_name(tensor) not in DTYPE_NBYTES:
        reason = f"dtype {dtype_name(tensor)} cannot travel"
    if reason:
        raise NotAvailable(f"tensor {name!r}: {reason}")


def _registered(paths: Iterable[tuple[str, nn.Module]]) -> Iterator[FoundTensor]:
    for prefix, each in paths:
        parameters, buffers, transient = each._parameters, each._buffers, each._non_persistent_buffers_set
        for name, parameter in parameters.items():
            if parameter is not None:
                yield FoundTensor(prefix + name, parameter, "parameter", True, (parameters, name))
        for name, buffer in buffers.items():
            if buffer is not None:
                yield FoundTensor(prefix + name, buffer, "buffer", name not in transient, (buffers, name))


def _paths(module: nn.Module, prefix: str = "", above: frozenset[int] = frozenset()) -> Iterator[tuple[str, nn.Module]]:
    """Every path to every submodule, shared ones under each of their names; paths end with a dot.

    Raises:
        NotAvailable: a module contains itself, so its paths have no end.
    """
    if id(module) in above:
        raise NotAvailable(f"module {prefix.rstrip('.')!r} contains itself; its tensors have no end of names")
    yield prefix, module
    if module._modules:
        above = above | {id(module)}
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{prefix}{name}.", above)


class _Walk:
    """One walk over a module: registered tensors first, then everything that hangs beside them."""

    def __init__(self, module: nn.Module, foreign: tuple[type, ...]) -> None:
        self._leaves = (*_LEAVES, *foreign)
        paths = tuple(_paths(module))
        self._modules = {id(each): (prefix, each) for prefix, each in reversed(paths)}  # each under its first path
        self._found = {each.name: each for each in _registered(paths)}
        self._scalars: dict[str, str] = {}
        self._seen = set(self._modules)

    def run(self) -> Discovery:
        for name, each in list(self._found.items()):
            if attributes := vars(each.tensor):
                self._walk(f"{name}.", attributes.items())
        for prefix, module in reversed(self._modules.values()):
            self._walk_module(prefix, module)
        return Discovery(tuple(self._found.values()), tuple(sorted(self._scalars.items())))

    def _walk_module(self, dot: str, module: nn.Module) -> None:
        self._walk(dot, [each for each in _attributes(module) if each[0] not in _MODULE_INTERNALS])
        attributes = vars(module)
        for kind in _HOOKS:
            # By position: torch numbers hooks over the whole process, so ids differ between two of them.
            if hooks := attributes.get(kind):
                named = ((f"{kind}[{at}]", hook) for at, hook in enumerate(list(hooks.values())) if callable(hook))
                self._walk(dot, named)

    def _walk(self, dot: str, attributes: Iterable[tuple[str, object]]) -> None:
        for name, value in attributes:
            if type(value) in _NUMBERS:  # most of what hangs on a module: spared the walk
                self._add_scalar(dot + name, repr(value))
            elif not isinstance(value, self._leaves):
                for path, each in _graph(dot + name, value, self._seen, self._leaves):
                    self._add(path, each)

    def _add(self, path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(FoundTensor(path, value, "attribute", False))
        elif isinstance(value, nn.Module):
            for inner in _registered(_paths(value)):
                self._add_tensor(msgspec.structs.replace(inner, name=f"{path}.{inner.name}", persistent=False))
            fresh = [(name, each) for name, each in value.named_modules() if id(each) not in self._seen or not name]
            self._seen.update(id(each) for _, each in fresh)
            for name, each in fresh:
                self._walk_module(f"{path}.{name}." if name else f"{path}.", each)
        else:
            self._add_scalar(path, _scalar_text(value))

    def _add_scalar(self, path: str, text: str) -> None:
        if self._scalars.setdefault(path, text) != text:
            raise NotAvailable(f"two values hang on the model under one name, {path!r}")

    def _add_tensor(self, found: FoundTensor) -> None:
        if self._found.setdefault(found.name, found).tensor is not found.tensor:
            raise NotAvailable(f"two tensors hang on the model under one name, {found.name!r}")


def _graph(
    path: str, value: object, seen: set[int], leaves: tuple[type, ...] = _LEAVES
) -> Iterator[tuple[str, object]]:
    """Tensors, modules, numbers and arrays reachable from `value` with their paths; never through a module.

    Tensors and numbers are yielded under every path that reaches them; other objects are visited once.
    """
    pending = [(path, value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, (torch.Tensor, *_NUMBERS)) or _is_array(value):
            yield path, value
            continue
        if isinstance(value, leaves) or id(value) in seen:
            continue
        if isinstance(value, torch.ScriptObject):
            raise NotAvailable(f"{path!r} is an opaque {type(value).__name__} of torch, which may hold weights")
        seen.add(id(value))
        if len(seen) > _MOST_OBJECTS:
            raise NotAvailable(f"more than {_MOST_OBJECTS:,} objects hang on the model, last seen at {path!r}")
        if isinstance(value, nn.Module):
            yield path, value
            continue
        pending.extend(reversed(list(_children(path, value, seen))))


def _children(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """What one object refers to, by name. Properties are never called; weak references are not followed."""
    if isinstance(value, (dict, types.MappingProxyType)):
        for at, (key, each) in enumerate(list(value.items())):
            yield f"{path}[{repr(key) if isinstance(key, _KEYS) else f'#{at}'}]", each
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{path}[{at}]", each) for at, each in enumerate(list(value)))
    elif isinstance(value, (set, frozenset)):
        if any(isinstance(each, (torch.Tensor, nn.Module)) for member in value for _, each in _graph("", member, seen)):
            raise NotAvailable(f"{path!r} is a set that holds tensors, and a set has no order; use a list")
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield f"{path}.__self__", value.__self__
        yield f"{path}.__func__", getattr(value, "__func__", None)
    elif isinstance(value, types.FunctionType):
        yield from _function(path, value)
    yield from ((f"{path}.{name}", each) for name, each in _attributes(value))


def _function(path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function keeps: defaults and closure. Globals belong to its module, and not to the model."""
    yield f"{path}.__defaults__", function.__defaults__
    yield f"{path}.__kwdefaults__", function.__kwdefaults__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}.<closure>.{name}", cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue


def _attributes(value: object) -> list[tuple[str, object]]:
    attributes = getattr(value, "__dict__", None)
    found = list(attributes.items()) if isinstance(attributes, dict) else []
    for name, member in slots_of(value):
        with suppress(AttributeError):  # a slot that was never set
            found.append((name, member.__get__(value)))
    return found


def _is_array(value: object) -> bool:
    """Bytes, an array, or a long table of numbers: compared as a whole, not number by number."""
    if isinstance(value, (bytes, bytearray, array.array)):
        return True
    if type(value) in (list, tuple, dict) and len(value) > _LONG:  # type: ignore[arg-type]  # type() does not narrow
        members = value.values() if isinstance(value, dict) else value
        return all(type(each) in _NUMBERS for each in members)  # type: ignore[attr-defined]  # nor here
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _scalar_text(value: object) -> str:
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, (bytes, bytearray)):
        data = bytes(value)
    else:
        data = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
    return f"{type(value).__name__} {getattr(value, 'shape', len(data))} sha256:{hashlib.sha256(data).hexdigest()[:16]}"
