"""Which kind of memory a model needs of a memory service: that of the device on which it lies."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from modelexpress.errors import NotAvailable
from modelexpress.gms.cuda import CudaMemory
from modelexpress.gms.memory import HostMemory, MemoryBackend

if TYPE_CHECKING:
    from torch import nn


def memory_backend(device: str) -> MemoryBackend:
    """Memory of one device as torch names it: "cpu" or "cuda:N".

    Raises:
        NotAvailable: there is no such kind of memory.
        GmsError: cuda-bindings or the NVIDIA driver is not installed, or there is no such device.
    """
    if device == "cpu":
        return HostMemory()
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or not ordinal.isdecimal():
        raise NotAvailable(f"a memory service keeps memory of cpu or of cuda:N, and not of {device!r}")
    return CudaMemory(int(ordinal))


def device_of(module: nn.Module) -> str:
    """The device on which a model's parameters and buffers lie, beside the host and the meta device; else "cpu".

    What of a model lies on another device than the rest is refused by name when it is bound or published.

    Raises:
        NotAvailable: they lie on several such devices; names them.
    """
    found = {str(each.device) for each in chain(module.parameters(), module.buffers())} - {"cpu", "meta"}
    if len(found) > 1:
        raise NotAvailable(
            f"the model lies on {', '.join(sorted(found))}; a memory service keeps memory of one device, so load each "
            "part by itself"
        )
    return found.pop() if found else "cpu"
