"""Memory that outlives the process that filled it: the MemoryBackend contract, and HostMemory.

A service allocates segments and keeps them; clients get descriptors. What the kernel enforces is the point:
once a segment is sealed, no process can change, shrink or grow it, and a client that writes to its mapping
gets a private copy of the page.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexpress.errors import GmsError
from modelexpress.memory import memory_at

if TYPE_CHECKING:
    import torch

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
# <linux/memfd.h>; Python 3.11 has no name for it. A host with vm.memfd_noexec=2 refuses memfds without it.
_MFD_NOEXEC_SEAL = 0x8
_CGROUP = Path("/sys/fs/cgroup")
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

# What an allocation leaves to the rest of the machine: the service must not be what runs it out of memory.
_HEADROOM_NBYTES = 64 * 1024 * 1024


class MemoryBackend(ABC):
    """One kind of memory, on the service's side and on the client's.

    `device` is "cpu" or "cuda:N". A segment takes memory in multiples of `granularity` bytes. Descriptors belong to
    the caller, who closes them.
    """

    device: str
    granularity: int

    def bind_thread(self) -> None:  # noqa: B027 - there is nothing to bind to on the host
        """A thread of ours is bound to its device before it touches it. Safe to call again."""

    def device_id(self) -> str:
        """Which device this is, by more than its ordinal where it has more: two that are equal are one device."""
        return self.device

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Service: a descriptor of a new segment, its memory reserved and not only promised.

        Raises:
            GmsError: there is not enough memory; states need and free.
        """

    @abstractmethod
    def seal(self, fd: int, nbytes: int) -> None:
        """Service: nobody changes the segment from here on. Safe to call twice.

        Raises:
            GmsError: somebody still maps it writable, or it has not all of its `nbytes` any more.
        """

    @abstractmethod
    def fill(self, fd: int, parts: Sequence[tuple[int, int, int]]) -> None:
        """Client: copy (address, offset in the segment, bytes) parts of this process's memory into a segment."""

    @abstractmethod
    def map(self, fd: int, nbytes: int, *, writable: bool = False) -> Mapping:
        """Client: the segment's bytes at an address; writing there never reaches the segment.

        With `writable` it does, until `Mapping.freeze`.
        """

    @abstractmethod
    def is_sealed(self, fd: int, nbytes: int) -> bool:
        """Client: whether a received descriptor is a segment of this size that nobody can change any more."""


class Mapping(ABC):
    """A segment as one process sees it. It can let go of the memory and keep the address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @abstractmethod
    def release(self) -> None:
        """Let go of the memory and keep the address range reserved. What was written privately is lost."""

    @abstractmethod
    def restore(self, fd: int) -> None:
        """Map a segment of the same size at the same address again.

        Raises:
            GmsError: the kernel gave another address, or none.
        """

    @abstractmethod
    def freeze(self, fd: int) -> None:
        """Make of a mapping for writing what a reader has, at the same address and with the same bytes.

        Raises:
            GmsError: it could not be; the mapping is what it was.
        """

    @abstractmethod
    def is_as_sealed(self) -> bool:
        """Whether this process sees the segment's own bytes everywhere, having written nothing of its own."""

    @abstractmethod
    def lease(self) -> Any:  # noqa: ANN401 - anything can own memory - each kind of memory has its own
        """A new object over all the bytes; `tensor` makes tensors that keep it. The mapping does not."""

    @abstractmethod
    def tensor(self, lease: Any, offset: int, nbytes: int) -> torch.Tensor:  # noqa: ANN401 - anything can own memory
        """A uint8 tensor over some of the bytes, whose storage begins there and keeps the lease."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and address. Safe to call twice."""


class HostMemory(MemoryBackend):
    """Sealed memfds. A page costs memory once, however many processes map it, until one of them writes to it."""

    device = "cpu"
    granularity = mmap.PAGESIZE

    def allocate(self, nbytes: int) -> int:
        try:
            free = max(0, free_host_bytes() - _HEADROOM_NBYTES)
            if nbytes > free:
                raise GmsError(f"a segment of {nbytes:,} bytes does not fit in {free:,} bytes of free host memory")
            fd = _memfd()
        except OSError as exc:  # too many open files
            raise GmsError(f"a segment of {nbytes:,} bytes could not be made: {exc.strerror}") from exc
        try:
            _ask_for_huge_pages(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            # The writer gets what was counted and no more. It could still shrink it; `seal` looks.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        except BaseException as exc:
            os.close(fd)
            if not isinstance(exc, OSError):
                raise
            raise GmsError(
                f"a segment of {nbytes:,} bytes could not be reserved ({exc.strerror}); {free:,} free"
            ) from exc
        return fd

    def seal(self, fd: int, nbytes: int) -> None:
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as exc:
            why = "somebody still maps it writable" if exc.errno == errno.EBUSY else exc.strerror
            raise GmsError(f"a segment of {nbytes:,} bytes cannot be sealed: {why}") from exc
        found = os.fstat(fd)
        # A writer that cut the segment or punched holes into it would leave the readers a SIGBUS.
        kept = min(found.st_size, found.st_blocks * _BLOCK_NBYTES)
        if found.st_size != nbytes or kept < nbytes:
            raise GmsError(f"the writer gave back memory of its segment: {kept:,} of {nbytes:,} bytes are left")

    def fill(self, fd: int, parts: Sequence[tuple[int, int, int]]) -> None:
        try:
            for address, offset, nbytes in parts:
                view = memory_at(address, nbytes)
                while view:
                    written = os.pwrite(fd, view, offset)
                    view, offset = view[written:], offset + written
        except OSError as exc:
            raise GmsError(f"a segment cannot be written: {exc.strerror}; has the service let go of it?") from exc

    def map(self, fd: int, nbytes: int, *, writable: bool = False) -> Mapping:
        return _HostMapping(_map(None, nbytes, fd, shared=writable), nbytes)

    def is_sealed(self, fd: int, nbytes: int) -> bool:
        try:
            return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS and os.fstat(fd).st_size == nbytes
        except OSError:
            return False


def _ask_for_huge_pages(fd: int, nbytes: int) -> None:
    """Where the kernel gives huge pages to those who ask ("advise"), ask, and reserve what it gives.

    It gives them to a page fault in a mapping that was advised, and never to fallocate. Readers need not ask: they
    map what is there, and the kernel aligns their mappings. What cannot be had is left to fallocate.
    """
    with suppress(OSError, GmsError):
        if "[advise]" in _SHMEM_HUGE.read_text():
            os.ftruncate(fd, nbytes)
            address = _map(None, nbytes, fd, shared=True)
            for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
                _LIBC.madvise(address, nbytes, advice)
            _LIBC.munmap(address, nbytes)


def return_freed_memory() -> None:
    """Hand what this process freed back to the machine. glibc keeps freed blocks of up to 32 MiB once it saw such."""
    with suppress(AttributeError):  # another C library, which does not keep them
        _LIBC.malloc_trim(0)


def free_host_bytes() -> int:
    """What can still be allocated: the machine's available memory, or what the tightest memory cgroup leaves."""
    limits = [_meminfo_available(), *(_left_in(folder) for folder in _own_cgroups())]
    return max(0, min(limit for limit in limits if limit is not None))


def _own_cgroups() -> list[Path]:
    """The folders of this process's memory cgroup and of those around it, of either version."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = _CGROUP / "memory" if controllers else _CGROUP
            own = root / path.lstrip("/")
            # In a container the path may be the host's; its own cgroup then is what is mounted as the root.
            folders += [each for each in (own, *own.parents) if each.is_relative_to(root)]
    return folders


def _left_in(folder: Path) -> int | None:
    """What this memory cgroup leaves; None when it limits nothing. Its page cache counts as free: it makes way."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        # No such file, or "max": nothing to respect.
        with suppress(OSError, ValueError):
            allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return allowed - used + sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return None


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise GmsError("/proc/meminfo does not say MemAvailable")


def _memfd() -> int:
    try:
        return os.memfd_create("modelexpress", _MFD_FLAGS | _MFD_NOEXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return os.memfd_create("modelexpress", _MFD_FLAGS)  # before Linux 6.3


class _HostMapping(Mapping):
    def release(self) -> None:
        # Inaccessible and without memory; replaces the old mapping in one step, so that nothing else gets the address.
        _map(self._open_address(), self.nbytes, None)

    def restore(self, fd: int) -> None:
        _map(self._open_address(), self.nbytes, fd)

    def freeze(self, fd: int) -> None:
        self.restore(fd)

    def _open_address(self) -> int:
        if not self.address:  # MAP_FIXED at address 0 is no error for root
            raise GmsError("this mapping of a segment is closed")
        return self.address

    def is_as_sealed(self) -> bool:
        return _private_kib(self._open_address(), self.nbytes) == 0

    def lease(self) -> Any:  # noqa: ANN401 - anything can own memory - each kind of memory has its own
        return (ctypes.c_char * self.nbytes).from_address(self.address)

    def tensor(self, lease: Any, offset: int, nbytes: int) -> torch.Tensor:  # noqa: ANN401 - anything can own memory
        import torch  # here, so that a service that only keeps memory starts without it

        return torch.frombuffer(lease, dtype=torch.uint8, offset=offset, count=nbytes)

    def close(self) -> None:
        if self.address:
            _LIBC.munmap(self.address, self.nbytes)
            self.address = 0


def _private_kib(address: int, nbytes: int) -> int | None:
    """Pages of this range that were written here, and so copied: smaps of proc(5). None where it does not say."""
    total, inside = None, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first.endswith(":"):
            if inside and first == "Anonymous:":
                total = (total or 0) + int(rest.split()[0])
        else:
            start, _, end = first.partition("-")
            inside = int(start, 16) < address + nbytes and int(end, 16) > address
    return total


def _map(address: int | None, nbytes: int, fd: int | None, *, shared: bool = False) -> int:
    """mmap: Python's own cannot say where."""
    flags, protection = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, _PROT_NONE
    if fd is None:
        flags |= mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    else:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        found_nbytes = os.fstat(fd).st_size
        if found_nbytes < nbytes:  # touching what lies behind its end would be a SIGBUS
            raise GmsError(f"a descriptor of {found_nbytes:,} bytes came for a segment of {nbytes:,}")
    if address is not None:
        flags |= _MAP_FIXED
    found = _LIBC.mmap(address, nbytes, protection, flags, -1 if fd is None else fd, 0)
    if found is None or found == _MAP_FAILED:
        raise GmsError(f"cannot map a segment of {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")
    if address is not None and found != address:
        raise GmsError(f"a segment was mapped at {found:#x}, and its tensors lie at {address:#x}")
    return int(found)


_BLOCK_NBYTES = 512  # the unit of st_blocks: stat(2)
_PROT_NONE = 0
_MAP_FIXED = 0x10  # <asm-generic/mman-common.h>, as on x86-64 and arm64
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


_LIBC = _libc()
