"""The bytes of a validated checkpoint, into memory that exists or into fresh tensors.

Everything is `preadv`: no page of a file is ever mapped, so what was loaded stays what it is when the file
is overwritten, cut or replaced afterwards (a mapped file that shrinks ends the process with SIGBUS).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import chain
from types import TracebackType
from typing import Self

import msgspec
import torch

from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.checkpoint.blocks import Blocks
from modelexpress.checkpoint.files import check_unchanged, fill, open_regular
from modelexpress.checkpoint.index import CheckpointIndex
from modelexpress.discovery import torch_dtype
from modelexpress.errors import CheckpointError, ConfigError
from modelexpress.manifest import NO_STORAGE, PIECE_NBYTES, TensorSpec, batches
from modelexpress.memory import device_memory_at, memory_at
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.transport import Arrived, Moved

_GROUP_NBYTES = PIECE_NBYTES  # small tensors are read ahead together, up to this much
_LANE_NBYTES = 1024 * 1024
_SPARE_NBYTES = 64 * 1024 * 1024  # blocks that a consumer dropped are kept for its next tensors, up to this much
_LISTED = 5  # names that an error spells out


class DiskTensors(CheckpointTensors):
    """The tensors of the shards of `index`.

    `read` uses `threads` threads, each with one file open at a time; two saturate a page cache, more help a
    disk or network mount that answers many requests at once. Nothing is open between calls.

    Raises from both methods:
        CheckpointError: a shard changed since the index was made, ended early, or could not be read.
    """

    def __init__(self, index: CheckpointIndex, *, threads: int = 4) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}; a checkpoint needs at least 1 to be read")
        self.label = str(index.root)
        self.manifest = index.manifest
        self._index = index
        self._threads = threads

    def read(self, plan: TransferPlan, *, arrived: Arrived | None = None, moved: Moved | None = None) -> None:
        """See the contract. Host memory is read into directly: peak memory beyond the target is zero.

        Device memory goes through one host buffer a thread (16 MiB, page-locked); that path runs only where
        there is a GPU. The first error stops all threads after the chunk they are at, and is raised when
        all have ended.
        """
        if plan.source != self.manifest:
            raise ConfigError(f"the plan's source is not the manifest of the checkpoint {self.label}")
        stop = threading.Event()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="mx-disk") as pool:
            try:
                lanes = [pool.submit(self._read_lane, plan, lane, arrived, stop) for lane in plan.lanes(self._threads)]
                for lane in as_completed(lanes):
                    lane.result()
            finally:
                stop.set()

    def _read_lane(
        self, plan: TransferPlan, lane: Iterable[Chunk], arrived: Arrived | None, stop: threading.Event
    ) -> None:
        with _OpenShard(self._index) as shard, _Destination(plan) as destination:
            for chunk in lane:
                if stop.is_set():
                    return
                shard.read(destination.parts(chunk))
                destination.land()
                if arrived is not None:
                    arrived(chunk)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See the contract. While the consumer works on one group (16 MiB of tensors, or one larger tensor),
        `threads` threads read the next: peak memory beyond what the consumer keeps is two groups, and 64
        MiB of memory that the consumer dropped. Abandoning the iterator ends the threads and closes the files.

        Raises:
            CheckpointError: the checkpoint has no tensor of such a name (at once, before the first read),
                or this torch has no such dtype.
        """
        wanted = self._wanted(names)
        for tensor in wanted:
            torch_dtype(tensor)
        return self._read_ahead(wanted)

    def _wanted(self, names: Iterable[str] | None) -> list[TensorSpec]:
        every = sorted(self.manifest.tensors, key=lambda t: (t.storage, t.offset, t.name))
        if names is None:
            return every
        chosen = set(names)
        unknown = sorted(chosen - {tensor.name for tensor in every})
        if unknown:
            more = f", and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
            raise CheckpointError(f"{self.label}: no tensor {', '.join(map(repr, unknown[:_LISTED]))}{more} in it")
        return [tensor for tensor in every if tensor.name in chosen]

    def _read_ahead(self, wanted: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        with _Ahead(self._index, self._threads) as ahead:
            for group in chain(batches(wanted, _GROUP_NBYTES), [[]]):
                arrived = ahead.arrived()
                ahead.start(group)
                while arrived:
                    yield arrived.pop()


class _Part(msgspec.Struct, frozen=True):
    """Bytes of one shard and the host memory they go to."""

    storage: int
    offset: int
    view: memoryview


class _OpenShard:
    """One open file at a time: the shard that was asked for last. Not thread-safe."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._shards = index.shards
        self._fd = -1
        self._storage = NO_STORAGE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(check=kind is None)

    def read(self, parts: Iterable[_Part]) -> None:
        """Fill every part. Parts that follow each other in a file are read by one call."""
        run: list[_Part] = []
        for part in parts:
            if run and (part.storage != run[-1].storage or part.offset != run[-1].offset + run[-1].view.nbytes):
                self._read_run(run)
                run = []
            run.append(part)
        if run:
            self._read_run(run)

    def _read_run(self, run: list[_Part]) -> None:
        if run[0].storage != self._storage:
            self._open(run[0].storage)
        fill(self._fd, self._shards[self._storage].name, run[0].offset, [part.view for part in run])

    def _open(self, storage: int) -> None:
        self._close(check=True)
        shard = self._shards[storage]
        self._fd, self._storage = open_regular(shard.path, shard.name), storage
        check_unchanged(self._fd, shard.name, shard.state)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the kernel's read-ahead

    def _close(self, *, check: bool) -> None:
        """`check`: nobody wrote to the file while it was read, either."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        shard, self._storage = self._shards[self._storage], NO_STORAGE
        try:
            if check:
                check_unchanged(fd, shard.name, shard.state)
        finally:
            os.close(fd)


class _Destination:
    """Host memory that a chunk is read into: the target itself, or a buffer on the way to a device."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._buffer: torch.Tensor | None = None
        self._staged: list[tuple[torch.Tensor, int, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._staged.clear()
        self._buffer = None

    def parts(self, chunk: Chunk) -> list[_Part]:
        """Where to read the ranges of `chunk`. The buffer holds a whole chunk, since a chunk is at most a piece."""
        parts: list[_Part] = []
        staged_nbytes = 0
        for part in chunk.ranges:
            address, device = self._plan.target_address(part), self._plan.target.storages[part.target_storage].device
            if device != "cpu":
                staged = self._host()[staged_nbytes : staged_nbytes + part.nbytes]
                staged_nbytes += part.nbytes
                self._staged.append((staged, address, device))
                address = staged.data_ptr()
            parts.append(_Part(part.source_storage, part.source_offset, memory_at(address, part.nbytes)))
        return parts

    def land(self) -> None:
        """Copy what was staged to its device, and wait for it."""
        for staged, address, device in self._staged:
            device_memory_at(address, staged.nbytes, device).copy_(staged)
        self._staged.clear()

    def _host(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(PIECE_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._buffer


class _Ahead:
    """Reads one group of tensors by several threads, each with a file of its own, while the caller does
    something else.
    """

    def __init__(self, index: CheckpointIndex, threads: int) -> None:
        self._closing = ExitStack()
        self._blocks = Blocks(_SPARE_NBYTES)
        self._closing.callback(self._blocks.close)
        self._shards = [self._closing.enter_context(_OpenShard(index)) for _ in range(threads)]
        # Entered last, so left first: its threads must be done with the files and the memory.
        self._pool = self._closing.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="mx-ahead"))
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._reads: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def start(self, group: list[TensorSpec]) -> None:
        """Make fresh tensors and let the threads fill them. Nothing else may be under way."""
        # Here and not in the threads: malloc reuses what the consumer's thread freed.
        self._tensors = [(t.name, self._blocks.empty(t.shape, torch_dtype(t), t.nbytes)) for t in group]
        parts = [
            _Part(spec.storage, spec.offset, memory_at(tensor.data_ptr(), spec.nbytes))
            for spec, (_, tensor) in zip(group, self._tensors, strict=True)
            if spec.storage != NO_STORAGE
        ]
        lanes = _cut(parts, len(self._shards))
        self._reads = [self._pool.submit(shard.read, lane) for shard, lane in zip(self._shards, lanes, strict=False)]

    def arrived(self) -> list[tuple[str, torch.Tensor]]:
        """Wait for the group; its tensors, the last one first. They are the caller's alone."""
        for read in self._reads:
            read.result()
        tensors, self._tensors = self._tensors, []
        return tensors[::-1]


def _cut(parts: list[_Part], lanes: int) -> list[list[_Part]]:
    """At most `lanes` runs of about equal bytes, none below 1 MiB but the last: less is not worth a thread."""
    share = max(_LANE_NBYTES, -(-sum(part.view.nbytes for part in parts) // lanes))
    cut: list[list[_Part]] = [[]]
    room = share
    for part in parts:
        storage, offset, view = part.storage, part.offset, part.view
        while view.nbytes > room:
            cut[-1].append(_Part(storage, offset, view[:room]))
            offset, view, room = offset + room, view[room:], share
            cut.append([])
        cut[-1].append(_Part(storage, offset, view))
        room -= view.nbytes
    return [lane for lane in cut if lane]
