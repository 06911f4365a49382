"""Memory by its address, as something that Python can read and write. The caller keeps it alive and in bounds."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of this process's host memory."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def device_memory_at(address: int, nbytes: int, device: str) -> torch.Tensor:
    """A uint8 tensor over device memory, without a copy. Needs a GPU; only tests/gpu can run it."""
    import torch  # here, so that the command line can read checksums without waiting for torch

    return torch.as_tensor(_DeviceBytes(address, nbytes), device=device)


class _DeviceBytes:
    """Presents device memory to torch by the CUDA array interface, version 3."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
