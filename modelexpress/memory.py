"""Memory by its address, as something that Python can read and write. The caller keeps it alive and in bounds."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_HUGE_PAGE_NBYTES = 2 * 1024 * 1024  # x86-64, and arm64 with pages of 4 KiB; elsewhere the advice has no effect
_ADVISED_NBYTES = 2 * _HUGE_PAGE_NBYTES  # less may hold no whole huge page

_libc = ctypes.CDLL(None, use_errno=True)


def ask_for_huge_pages(address: int, nbytes: int) -> bool:
    """Ask the kernel for huge pages under host memory that nobody touched yet and that will be filled whole.

    The first touch of a page costs more than copying into it: 2.3 GB/s by pages of 4 KiB, 7 to 11 by huge ones. Only
    whole huge pages inside the memory are asked for, so it does not grow. Returns whether it was asked for; small
    memory, or memory whose first page is there already, is left as it is.
    """
    start = -(-address // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    length = (address + nbytes) // _HUGE_PAGE_NBYTES * _HUGE_PAGE_NBYTES - start
    if nbytes < _ADVISED_NBYTES or length <= 0:
        return False
    there = (ctypes.c_ubyte * 1)()
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), there) or there[0] & 1:
        return False
    return not _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


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
