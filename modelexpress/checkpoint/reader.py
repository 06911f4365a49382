"""The bytes of a validated checkpoint, into memory that exists or into fresh tensors.

Everything is `preadv`: no page of a file is ever mapped, so what was loaded stays what it is when the file
is overwritten, cut or replaced afterwards (a mapped file that shrinks ends the process with SIGBUS).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from queue import LifoQueue
from types import TracebackType
from typing import Self

import msgspec
import torch

from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.checkpoint.blocks import Blocks
from modelexpress.checkpoint.index import CheckpointIndex
from modelexpress.checkpoint.shard_reader import Place, ShardReader, first_places
from modelexpress.discovery import torch_dtype
from modelexpress.errors import CheckpointError, ConfigError
from modelexpress.manifest import NO_STORAGE, PIECE_NBYTES, TensorSpec, batches
from modelexpress.memory import ask_for_huge_pages
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.transport import Arrived, Moved, Work

_BUFFERS_NBYTES = 64 * 1024 * 1024  # all buffers of one read together
_GROUP_NBYTES = PIECE_NBYTES  # small tensors are read ahead together, up to this much

# What an iterator takes besides the tensors that its consumer has: less than 64 MiB, or what the next tensor needs.
_AHEAD_NBYTES = 2 * _GROUP_NBYTES
_AHEAD_BUFFERS_NBYTES = 8 * 1024 * 1024
_SPARE_NBYTES = 16 * 1024 * 1024  # blocks that a consumer dropped are kept for its next tensors, up to this much

_LANE_NBYTES = 1024 * 1024
_LISTED = 5  # names that an error spells out


class DiskTensors(CheckpointTensors):
    """The tensors of the shards of `index`.

    Args:
        threads: how many read at the same time, each with one file open; two saturate a page cache, and a disk or
            a network mount wants four or more requests at once. Nothing is open between calls.
        direct: whether bytes that the kernel does not have in memory are read past the page cache: about the rate of
            the disk, and nobody's pages are pushed out for it. Without it they stay there, for others on this host
            that read the same files.

    Raises from both methods:
        CheckpointError: a shard changed since the index was made, ended early, or could not be read.
    """

    def __init__(self, index: CheckpointIndex, *, threads: int = 4, direct: bool = True) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}; a checkpoint needs at least 1 to be read")
        self.label = str(index.root)
        self.manifest = index.manifest
        self._index = index
        self._threads = threads
        self._direct = direct

    def read(self, plan: TransferPlan, *, arrived: Arrived | None = None, moved: Moved | None = None) -> None:
        """See the contract. Chunks are read in file order, by whichever thread is free.

        Peak memory beyond the target: none for host memory and bytes that the kernel has in memory, else 4 MiB a
        thread, and 64 MiB at most. Host memory that nobody touched yet gets huge pages where the kernel has them.
        The first error stops all threads after the chunk they are at, and is raised when all have ended.
        """
        if plan.source != self.manifest:
            raise ConfigError(f"the plan's source is not the manifest of the checkpoint {self.label}")
        for storage in plan.target.storages:
            if storage.device == "cpu":
                ask_for_huge_pages(storage.address, storage.nbytes)
        work = Work(plan.chunks)
        count = min(self._threads, len(plan.chunks))
        with ThreadPoolExecutor(max(1, count), thread_name_prefix="mx-disk") as pool:
            try:
                lanes = [pool.submit(self._read_lane, plan, work, arrived, moved) for _ in range(count)]
                for lane in as_completed(lanes):
                    lane.result()
            finally:
                work.stop()

    def _read_lane(self, plan: TransferPlan, work: Work, arrived: Arrived | None, moved: Moved | None) -> None:
        pinned = any(storage.device != "cpu" for storage in plan.target.storages)
        with self._reader(_BUFFERS_NBYTES, pinned=pinned) as reader:
            while (chunk := work.take()) is not None:
                reader.read(_places(plan, chunk), None if moved is None else _Steps(chunk, moved))
                if arrived is not None:
                    arrived(chunk)

    def _reader(self, most_nbytes: int, *, pinned: bool = False) -> ShardReader:
        """One of `threads` that together take at most so much memory."""
        return ShardReader(self._index, direct=self._direct, most_nbytes=most_nbytes // self._threads, pinned=pinned)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See the contract. While the consumer works on one group (16 MiB of tensors, or one larger tensor),
        `threads` threads read the next two, or the next larger tensor. Peak memory beyond what the consumer keeps:
        that, and 24 MiB of buffers and of memory that the consumer dropped. Abandoning the iterator ends the threads
        and closes the files.

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
        waiting = deque(batches(wanted, _GROUP_NBYTES))
        with _Ahead(lambda: self._reader(_AHEAD_BUFFERS_NBYTES), self._threads) as ahead:
            ahead.start_some(waiting)
            while ahead.is_busy:
                arrived = ahead.arrived()
                ahead.start_some(waiting)
                while arrived:
                    yield arrived.pop()


class _Steps:
    """Tells how far one chunk has come."""

    def __init__(self, chunk: Chunk, moved: Moved) -> None:
        self._chunk = chunk
        self._moved = moved
        self._start = 0

    def __call__(self, nbytes: int) -> None:
        self._moved(self._chunk, self._start, nbytes)
        self._start += nbytes


def _places(plan: TransferPlan, chunk: Chunk) -> list[Place]:
    storages = plan.target.storages
    return [
        Place(
            part.source_storage,
            part.source_offset,
            part.nbytes,
            plan.target_address(part),
            storages[part.target_storage].device,
        )
        for part in chunk.ranges
    ]


class _Group(msgspec.Struct):
    """Tensors that are read together, and the reads that are under way."""

    tensors: list[tuple[str, torch.Tensor]]
    nbytes: int
    reads: list[Future[None]]


class _Ahead:
    """Reads groups of tensors, in order, by several threads, while the caller does something else."""

    def __init__(self, make: Callable[[], ShardReader], threads: int) -> None:
        self._closing = ExitStack()
        self._blocks = Blocks(_SPARE_NBYTES)
        self._closing.callback(self._blocks.close)
        self._threads = threads
        # The one that was given back last has the file open that is wanted next.
        self._idle: LifoQueue[ShardReader] = LifoQueue()
        for _ in range(threads):
            self._idle.put(self._closing.enter_context(make()))
        # Entered last, so left first: its threads must be done with the files and the memory.
        self._pool = self._closing.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="mx-ahead"))
        self._closing.callback(self._give_up)
        self._groups: deque[_Group] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def _give_up(self) -> None:
        """What no thread began is not begun."""
        for group in self._groups:
            for read in group.reads:
                read.cancel()

    @property
    def is_busy(self) -> bool:
        return bool(self._groups)

    def start_some(self, waiting: deque[list[TensorSpec]]) -> None:
        """Begin as many of the groups as may be under way at a time, the first one always."""
        while waiting:
            nbytes = sum(spec.nbytes for spec in waiting[0])
            if self._groups and sum(group.nbytes for group in self._groups) + nbytes > _AHEAD_NBYTES:
                return
            self._start(waiting.popleft(), nbytes)

    def _start(self, group: list[TensorSpec], nbytes: int) -> None:
        """Make fresh tensors and let the threads fill them."""
        # Here and not in the threads: malloc reuses what the consumer's thread freed.
        tensors = [(t.name, self._blocks.empty(t.shape, torch_dtype(t), t.nbytes)) for t in group]
        places = [
            Place(spec.storage, spec.offset, spec.nbytes, tensor.data_ptr())
            for spec, (_, tensor) in zip(group, tensors, strict=True)
            if spec.storage != NO_STORAGE
        ]
        reads = [self._pool.submit(self._read, lane) for lane in _cut(places, self._threads)]
        self._groups.append(_Group(tensors, nbytes, reads))

    def _read(self, places: list[Place]) -> None:
        reader = self._idle.get()
        try:
            reader.read(places)
        finally:
            self._idle.put(reader)

    def arrived(self) -> list[tuple[str, torch.Tensor]]:
        """Wait for the oldest group; its tensors, the last one first. They are the caller's alone."""
        group = self._groups[0]
        for read in group.reads:
            read.result()
        self._groups.popleft()
        return group.tensors[::-1]


def _cut(places: list[Place], lanes: int) -> list[list[Place]]:
    """At most `lanes` runs of about equal bytes, none below 1 MiB but the last: less is not worth a thread."""
    left, cut = deque(places), []
    nbytes = sum(place.nbytes for place in places)
    share = max(_LANE_NBYTES, -(-nbytes // lanes))
    while nbytes:
        cut.append(first_places(left, min(share, nbytes)))
        nbytes -= min(share, nbytes)
    return cut
