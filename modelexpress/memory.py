"""Memory by its address, as something that Python can read and write. The caller keeps it alive and in bounds."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of this process's host memory."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def readable_at(address: int, nbytes: int, device: str) -> memoryview:
    """The bytes at an address for the CPU to read: host memory as it is, device memory as a copy."""
    if device == "cpu":
        return memory_at(address, nbytes)
    host = device_memory_at(address, nbytes, device).cpu()
    view = (ctypes.c_char * nbytes).from_address(host.data_ptr())
    view.keep = host  # type: ignore[attr-defined]  # an array is an object like any other
    return memoryview(view).cast("B")


def device_memory_at(address: int, nbytes: int, device: str, *, keep: object = None) -> torch.Tensor:
    """A uint8 tensor over device memory, without a copy; its storage keeps `keep`.

    Needs a GPU; only tests/gpu can run it.
    """
    import torch  # here, so that the command line can read checksums without waiting for torch

    return torch.as_tensor(_DeviceBytes(address, nbytes, keep), device=device)


class _DeviceBytes:
    """Presents device memory to torch by the CUDA array interface, version 3."""

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
