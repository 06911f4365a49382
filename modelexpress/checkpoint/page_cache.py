"""Which bytes of a file the kernel holds in memory already: asked, never guessed.

Three ways to ask, the first that answers counts. `cachestat` (Linux 6.5) counts pages of a range. `mincore` tells them
page by page, of a mapping that nobody touches, and says "all of them" to whoever neither owns the file nor may write
to it, so it is not asked then. `preadv2(RWF_NOWAIT)` of one byte tells one page, and may bring it in.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import random
from collections.abc import Callable, Iterator

import msgspec

_BLOCK_NBYTES = 1024 * 1024  # finer than this no file is cut: a read has a cost of its own, too
_PAGE_NBYTES = mmap.PAGESIZE

# <asm-generic/unistd.h>: the same number wherever we run; alpha alone has another.
_CACHESTAT = 451 if platform.machine() in ("x86_64", "aarch64", "riscv64", "s390x", "ppc64le") else None

_libc = ctypes.CDLL(None, use_errno=True)


class Run(msgspec.Struct, frozen=True):
    """Bytes of a file that are read in one way."""

    offset: int
    nbytes: int
    cached: bool


class _Range(ctypes.Structure):
    """struct cachestat_range."""

    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """struct cachestat: counts of pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


Ask = Callable[[int, int, int], float | None]
"""(descriptor, offset, bytes) to the share of the range's pages that are in memory, 0 to 1; None where it cannot be
told. The descriptor is of a regular file that is open for reading.
"""


def cached_runs(fd: int, offset: int, nbytes: int) -> Iterator[Run]:
    """Cut a range of an open file into runs that are in memory and runs that are not, in order.

    Where both lie within one MiB, the larger share decides. What cannot be told counts as in memory: a buffered read
    is right for every file. The answer may be old when it is used; that costs time and nothing else.
    """
    pending: Run | None = None
    for run in _halved(fd, offset, nbytes):
        if pending is not None and pending.cached == run.cached:
            pending = Run(pending.offset, pending.nbytes + run.nbytes, run.cached)
            continue
        if pending is not None:
            yield pending
        pending = run
    if pending is not None:
        yield pending


def _halved(fd: int, offset: int, nbytes: int) -> Iterator[Run]:
    share = _share(fd, offset, nbytes)
    if share in (0, 1) or nbytes <= _BLOCK_NBYTES:
        yield Run(offset, nbytes, cached=share >= 0.5)
        return
    middle = (offset + nbytes // 2 + _BLOCK_NBYTES // 2) // _BLOCK_NBYTES * _BLOCK_NBYTES
    if not offset < middle < offset + nbytes:
        middle = offset + nbytes // 2
    yield from _halved(fd, offset, middle - offset)
    yield from _halved(fd, middle, offset + nbytes - middle)


def _share(fd: int, offset: int, nbytes: int) -> float:
    for ask in (ask_cachestat, ask_mincore, ask_nowait):
        found = ask(fd, offset, nbytes)
        if found is not None:
            return min(1.0, found)
    return 1.0


def ask_cachestat(fd: int, offset: int, nbytes: int) -> float | None:
    """See `Ask`. None on an older kernel, or where a sandbox or the owner of the file does not allow it."""
    if _CACHESTAT is None or nbytes <= 0:
        return None
    # Whole pages are counted, and the range is widened to them.
    asked, counts = _Range(offset, nbytes), _Counts()
    if _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(fd), ctypes.byref(asked), ctypes.byref(counts), 0):
        return None
    return int(counts.cached) / _pages(offset, nbytes)


def ask_mincore(fd: int, offset: int, nbytes: int) -> float | None:
    """See `Ask`. None for a file that is neither ours nor may be written to."""
    status = os.fstat(fd)
    if nbytes <= 0 or not (status.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK)):
        return None
    start, pages = offset // _PAGE_NBYTES * _PAGE_NBYTES, _pages(offset, nbytes)
    found = (ctypes.c_ubyte * pages)()
    try:
        # Private and writable, so that Python tells its address; not a byte of it is ever looked at.
        mapped = mmap.mmap(fd, min(offset + nbytes, status.st_size) - start, flags=mmap.MAP_PRIVATE, offset=start)
    except (OSError, ValueError, OverflowError):  # a file that cannot be mapped, or was cut
        return None
    with mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), found)
        del first  # a mapping that something looks at cannot be closed
    return None if failed else bytes(found).count(1) / pages


def ask_nowait(fd: int, offset: int, nbytes: int) -> float | None:
    """See `Ask`: 0 or 1, by one page, chosen at random since an earlier question may have brought one in."""
    page = offset + random.randrange(max(1, nbytes))  # noqa: S311 - nothing is guarded by it
    try:
        os.preadv(fd, [bytearray(1)], page, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0.0
    except OSError:
        return None
    return 1.0


def _pages(offset: int, nbytes: int) -> int:
    return -(-(offset + nbytes) // _PAGE_NBYTES) - offset // _PAGE_NBYTES
