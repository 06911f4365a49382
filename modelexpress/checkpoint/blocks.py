"""Memory for tensors that are handed out one after the other and mostly dropped soon.

The first touch of a page costs more than copying into it (2.3 GB/s against 9 on one core), and malloc gives
every block above 32 MiB back to the kernel as soon as it is freed. So large blocks are kept a while and
used again: 1.2 to 3 GB/s for 64 MiB tensors that a consumer copies.
"""

from __future__ import annotations

import mmap
import weakref

import torch

_SMALL_NBYTES = 4 * 1024 * 1024  # malloc reuses its own memory up to 32 MiB, and is quicker for small blocks
_HUGE_PAGE_NBYTES = 2 * 1024 * 1024


class Blocks:
    """Makes tensors with memory of their own, and reuses a block when nothing refers to it any more.

    A tensor's storage owns a lease on its block, and every view, alias or numpy array of the tensor keeps
    the storage. The block comes back when the lease is collected, never earlier: a tensor that the
    consumer keeps keeps its block for ever. All memory is anonymous and private.

    `spare_nbytes` bounds what is kept for reuse. `empty` must be called from one thread at a time; tensors
    may be dropped in any.
    """

    def __init__(self, spare_nbytes: int) -> None:
        self._limit = spare_nbytes
        self._spare: list[mmap.mmap] = []  # append and pop are atomic, and a finalizer must take no lock

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """A contiguous tensor of its own on the host, with any bytes in it."""
        if nbytes < _SMALL_NBYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        block = self._take(nbytes)
        lease = memoryview(block)[:nbytes]
        weakref.finalize(lease, self._spare.append, block).atexit = False
        storage = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]  # stubs lack it

    def close(self) -> None:
        """Give back what is spare. Tensors that were handed out stay as they are."""
        self._limit = 0
        self._trim(0)

    def _take(self, nbytes: int) -> mmap.mmap:
        for block in tuple(self._spare):
            # Not much larger than needed: the consumer may keep the tensor, and would keep the rest with it.
            if nbytes <= len(block) <= nbytes + max(nbytes // 8, _HUGE_PAGE_NBYTES):
                self._spare.remove(block)
                return block
        self._trim(nbytes)
        rounded = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
        block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _trim(self, wanted: int) -> None:
        """Drop the oldest spare blocks until `wanted` more bytes would still be within the limit."""
        while self._spare and sum(map(len, tuple(self._spare))) + wanted > self._limit:
            self._spare.pop(0)
