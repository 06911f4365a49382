"""Bytes of shards into the memory that they belong in: what one thread does.

Bytes that the kernel has in memory are copied from there, straight to their place. The others are read past the page
cache, by requests that are large enough for the disk, into a small buffer, and copied to their place while they lie in
the processor's cache: half the CPU time of a read through the page cache, and no page of anybody else is pushed out.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from ctypes import memmove
from functools import cached_property
from types import TracebackType
from typing import Self

import msgspec
import torch

from modelexpress.checkpoint.files import (
    DIRECT_NBYTES,
    check_unchanged,
    fill,
    fill_direct,
    open_direct,
    open_regular,
)
from modelexpress.checkpoint.index import CheckpointIndex
from modelexpress.checkpoint.page_cache import cached_runs
from modelexpress.devices import bind_thread
from modelexpress.manifest import NO_STORAGE
from modelexpress.memory import device_memory_at, memory_at

_BUFFER_NBYTES = 4 * 1024 * 1024  # the most that one request to a disk carries
_ASKED_NBYTES = 128 * 1024  # less is read through the page cache, which reads ahead
_STEP_NBYTES = 1024 * 1024  # bytes that somebody looks at right after this are read in steps that a core's cache holds

Landed = Callable[[int], None]


class Place(msgspec.Struct, frozen=True):
    """Bytes of one shard and the memory they go to."""

    storage: int
    offset: int
    nbytes: int
    address: int
    device: str = "cpu"


class ShardReader:
    """Reads with one file open at a time: the shard that was asked for last. Not thread-safe.

    Args:
        direct: whether bytes that the kernel does not have in memory are read past the page cache. Without it they
            stay there for the next reader.
        most_nbytes: the most memory that it may take for itself.
        pinned: whether that memory is page-locked, as copies to a device want it.
    """

    def __init__(self, index: CheckpointIndex, *, direct: bool, most_nbytes: int, pinned: bool = False) -> None:
        self._shards = index.shards
        self._direct = direct
        self._storage = NO_STORAGE
        self._fd = -1
        self._direct_fd: int | None = None
        self._direct_storage = NO_STORAGE  # for which it was opened, or refused
        self._buffer = _Buffer(min(_BUFFER_NBYTES, most_nbytes), pinned=pinned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(check=kind is None)

    def read(self, places: Iterable[Place], landed: Landed | None = None) -> None:
        """Fill every place. Places of one kind of memory that follow each other in a file are read together.

        Args:
            landed: called with the number of bytes that just came into place, in the order of the places.

        Raises:
            CheckpointError: a shard changed since the index was made, ended early, or could not be read.
        """
        run: list[Place] = []
        for place in places:
            if run and not _follows(place, run[-1]):
                self._read_run(run, landed)
                run = []
            run.append(place)
        if run:
            self._read_run(run, landed)

    def _read_run(self, run: list[Place], landed: Landed | None) -> None:
        if run[0].storage != self._storage:
            self._open(run[0].storage)
        offset, nbytes = run[0].offset, run[-1].offset + run[-1].nbytes - run[0].offset
        left = deque(run)
        if not self._direct or nbytes < _ASKED_NBYTES:
            self._read_cached(offset, nbytes, left, landed)
            return
        for part in cached_runs(self._fd, offset, nbytes):
            if part.cached:
                self._read_cached(part.offset, part.nbytes, left, landed)
            else:
                self._read_cold(part.offset, part.nbytes, left, landed)

    def _read_cached(self, offset: int, nbytes: int, left: deque[Place], landed: Landed | None) -> None:
        """Through the page cache, straight into host memory; to a device by way of the buffer."""
        name = self._shards[self._storage].name
        most = nbytes if landed is None else _STEP_NBYTES
        end = offset + nbytes
        while offset < end:
            step = min(most, end - offset)
            if left[0].device != "cpu":
                step = min(step, self._buffer.nbytes)
                fill(self._fd, name, offset, [self._buffer.view(step)])
                self._scatter(0, step, left, landed)
            else:
                places = first_places(left, step)
                fill(self._fd, name, offset, [memory_at(place.address, place.nbytes) for place in places])
                if landed is not None:
                    landed(step)
            offset += step

    def _read_cold(self, offset: int, nbytes: int, left: deque[Place], landed: Landed | None) -> None:
        """Past the page cache, as far as the file system does it."""
        end = offset + nbytes
        fd, name = self._open_direct(), self._shards[self._storage].name
        while fd is not None and offset < end:
            start = offset // DIRECT_NBYTES * DIRECT_NBYTES
            blocks = -(-(end - start) // self._buffer.nbytes)
            block = -(-(end - start) // (blocks * DIRECT_NBYTES)) * DIRECT_NBYTES  # of equal size: no crumb at the end
            last = min(start + block, end)
            if not fill_direct(fd, name, start, self._buffer.view(block), last - start):
                self._close_direct()
                break
            self._scatter(offset - start, last - offset, left, landed)
            offset = last
        if offset < end:
            # All of it is asked for at once, so that the disk has enough to do.
            os.posix_fadvise(self._fd, offset, end - offset, os.POSIX_FADV_WILLNEED)
            self._read_cached(offset, end - offset, left, landed)

    def _scatter(self, start: int, nbytes: int, left: deque[Place], landed: Landed | None) -> None:
        """Copy bytes of the buffer to their places."""
        for place in first_places(left, nbytes):
            if place.device == "cpu":
                memmove(place.address, self._buffer.address + start, place.nbytes)
            else:
                bind_thread(place.device)
                host = self._buffer.tensor[start : start + place.nbytes]
                device_memory_at(place.address, place.nbytes, place.device).copy_(host)
            start += place.nbytes
        if landed is not None:
            landed(nbytes)

    def _open(self, storage: int) -> None:
        self._close(check=True)
        shard = self._shards[storage]
        self._fd, self._storage = open_regular(shard.path, shard.name), storage
        check_unchanged(self._fd, shard.name, shard.state)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the kernel's read-ahead

    def _open_direct(self) -> int | None:
        if self._direct_fd is None and self._direct_storage != self._storage:
            shard = self._shards[self._storage]
            self._direct_storage = self._storage  # asked once a file, also where it is refused
            self._direct_fd = open_direct(shard.path, shard.name, shard.state)
        return self._direct_fd

    def _close_direct(self) -> None:
        fd, self._direct_fd = self._direct_fd, None
        if fd is not None:
            os.close(fd)

    def _close(self, *, check: bool) -> None:
        """`check`: nobody wrote to the file while it was read, either."""
        if self._fd < 0:
            return
        self._close_direct()
        fd, self._fd = self._fd, -1
        shard, self._storage = self._shards[self._storage], NO_STORAGE
        self._direct_storage = NO_STORAGE
        try:
            if check:
                check_unchanged(fd, shard.name, shard.state)
        finally:
            os.close(fd)


class _Buffer:
    """Memory on the way, made when it is first used, at an address that a disk can write to."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = max(DIRECT_NBYTES, nbytes // DIRECT_NBYTES * DIRECT_NBYTES)
        self._pinned = pinned

    @cached_property
    def tensor(self) -> torch.Tensor:
        if self._pinned:
            memory = torch.empty(self.nbytes + DIRECT_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            # Huge pages: a request of 4 MiB has two pieces of memory then, and not a thousand.
            block = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.madvise(mmap.MADV_HUGEPAGE)
            memory = torch.frombuffer(block, dtype=torch.uint8)
        skipped = -memory.data_ptr() % DIRECT_NBYTES
        return memory[skipped : skipped + self.nbytes]

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def view(self, nbytes: int) -> memoryview:
        return memory_at(self.address, nbytes)


def _follows(place: Place, before: Place) -> bool:
    return (place.storage, place.device) == (before.storage, before.device) and (
        place.offset == before.offset + before.nbytes
    )


def first_places(left: deque[Place], nbytes: int) -> list[Place]:
    """Take the first `nbytes` of the places that are left; the last of them is cut where they end."""
    taken: list[Place] = []
    while nbytes:
        place = left.popleft()
        if place.nbytes > nbytes:
            left.appendleft(
                Place(place.storage, place.offset + nbytes, place.nbytes - nbytes, place.address + nbytes, place.device)
            )
            place = Place(place.storage, place.offset, nbytes, place.address, place.device)
        taken.append(place)
        nbytes -= place.nbytes
    return taken
