"""The digest of every tensor that hangs on a model. Knows nothing of the product.

A tensor counts wherever it hangs: parameters and buffers, persistent or not, plain attributes of modules (MLA's w_kc
and w_vc), in lists, tuples, dicts and sets, and on SGLang's own helper objects (quantisation methods).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import nn

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of dtype, shape and elements in row-major order, by name.

    Tied parameters and modules are there under each of their names; a helper object that several modules share is
    there under the first. Strides and storages do not count.

    Raises:
        ValueError: a tensor has no data (device meta).
    """
    return {name: _digest(name, tensor) for name, tensor in named_tensors(model)}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything described above."""
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        yield from _of_module(prefix, module, seen)


def _of_module(prefix: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    dot = f"{prefix}." if prefix else ""
    for registered in (module._parameters, module._buffers):
        for name, tensor in registered.items():
            if tensor is not None:
                yield f"{dot}{name}", tensor
    for name, value in vars(module).items():
        if name not in _REGISTRIES:
            yield from _of_value(f"{dot}{name}", value, seen)


def _of_value(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif not isinstance(value, nn.Module) and id(value) not in seen:
        for inner_name, inner in _inside(value):
            seen.add(id(value))
            yield from _of_value(f"{name}{inner_name}", inner, seen)


def _inside(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | range):
        yield from ((f"[{at}]", inner) for at, inner in enumerate(value))
    elif _is_helper(value):
        yield from ((f".{key}", inner) for key, inner in vars(value).items())


def _is_helper(value: object) -> bool:
    """An instance of a class of SGLang's; communication groups have tensors, but they are not the model's."""
    where = type(value).__module__
    return (
        where.startswith("sglang.") and not where.startswith("sglang.srt.distributed.") and hasattr(value, "__dict__")
    )


def _digest(name: str, tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} has no data: it is on device meta")
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
