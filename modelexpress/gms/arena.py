"""Arena: allocations of an engine that land in a staged generation, so that nothing has to be moved at publication.

While `Arena.landing` is open, the memory of every tensor that this thread makes uninitialised on the service's device
(`torch.empty` and its kin, which is how engines make weights) comes from segments of the staged generation. All other
memory comes from where it always does, and is moved when it is published.

Made as a mode of torch's dispatcher and not as an allocator of its own. An allocator that calls into Python takes
the interpreter's lock while it holds torch's allocator lock, and a thread that frees a tensor takes them the other
way round: both would stand still for ever. The mode also does on the host what it does on a GPU.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from modelexpress.dispatch_mode import DispatchMode
from modelexpress.errors import GmsError
from modelexpress.gms.client import Segment, Staging

logger = logging.getLogger(__name__)

_ALIGN_NBYTES = 512  # as torch's allocator for GPUs
# Few segments, whatever the model's size, and a last one that is not much of it.
_SMALL_SEGMENT_NBYTES = 64 * 1024 * 1024
_LARGE_SEGMENT_NBYTES = 1024 * 1024 * 1024
_SHARE = 16

_aten = torch.ops.aten
_UNINITIALISED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


class Piece(NamedTuple):
    """Memory of one storage: `nbytes` at `offset` of a segment."""

    segment: Segment
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.segment.mapping.address + self.offset


class Arena:
    """The memory of one staged generation, given out piece by piece. Pieces that are freed are given out again."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._device = torch.device(staging.device)
        self._lock = threading.Lock()
        self._taken: dict[Segment, dict[int, int]] = {}  # bytes of the pieces in use, by their offset
        # Segment and offset of pieces that nothing uses any more. Finalizers add to it: they must not wait for a lock.
        self._freed: deque[tuple[weakref.ref[Segment], int]] = deque()
        self._closed = False

    def landing(self) -> AbstractContextManager[object]:
        """Hold this while an engine allocates its weights. For the calling thread; may be nested."""
        return _Landing(self)

    def settle(self) -> tuple[Piece, ...]:
        """The pieces in use, for `publish_model`. Gives back segments without any; nothing lands from here on.

        Raises:
            GmsError: the service is gone.
        """
        gc.collect()  # what only cycles keep is not in use
        with self._lock:
            self._closed = True
            self._take_back()
            taken, self._taken = self._taken, {}
        for segment in [segment for segment, pieces in taken.items() if not pieces]:
            self._staging.release(segment)
        return tuple(Piece(segment, *piece) for segment, pieces in taken.items() for piece in pieces.items())

    def tensor(self, nbytes: int) -> torch.Tensor | None:
        """A uint8 tensor over memory of the generation; None where the service has none to give, or all is settled."""
        with self._lock:
            if self._closed:
                return None
            self._take_back()
            try:
                piece = self._find(nbytes)
            except GmsError as exc:
                logger.warning("weights are allocated outside of the memory service from here on: %s", exc)
                self._closed = True
                return None
            self._taken[piece.segment][piece.offset] = nbytes
        lease = piece.segment.mapping.lease()
        lease.segment = piece.segment.lease
        freed = weakref.ref(piece.segment), piece.offset
        weakref.finalize(lease, self._freed.append, freed).atexit = False
        return piece.segment.mapping.tensor(lease, piece.offset, nbytes)

    def serves(self, device: torch.device | None) -> bool:
        """Whether an allocation on this device may land here. None is the host."""
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return (device or torch.device("cpu")) == self._device

    def _find(self, nbytes: int) -> Piece:
        for segment in reversed(self._taken):  # the newest has most room
            offset = first_gap(self._taken[segment], segment.mapping.nbytes, nbytes)
            if offset is not None:
                return Piece(segment, offset, nbytes)
        staged = sum(segment.mapping.nbytes for segment in self._taken)
        share = min(max(staged // _SHARE, _SMALL_SEGMENT_NBYTES), _LARGE_SEGMENT_NBYTES)
        segment = self._staging.add_writable(max(nbytes, share))
        self._taken[segment] = {}
        return Piece(segment, 0, nbytes)

    def _take_back(self) -> None:
        if self._freed and self._device.type != "cpu":
            torch.cuda.synchronize(self._device)  # kernels of another stream may still use it
        while self._freed:
            segment, offset = self._freed.popleft()
            if (found := segment()) is not None:
                del self._taken[found][offset]


def first_gap(taken: Mapping[int, int], size: int, nbytes: int) -> int | None:
    """Where `nbytes` fit into a segment of `size` bytes that has pieces `taken` (offset: bytes); None: nowhere."""
    at = 0
    for offset in sorted(taken):
        if at + nbytes <= offset:
            return at
        at = -(-(offset + taken[offset]) // _ALIGN_NBYTES) * _ALIGN_NBYTES
    return at if at + nbytes <= size else None


class _Landing(DispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - as torch
        kwargs = kwargs or {}
        landed = self._land(func, args, kwargs) if func in _UNINITIALISED and not kwargs.get("pin_memory") else None
        return func(*args, **kwargs) if landed is None else landed

    def _land(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:  # noqa: ANN401 - as torch
        like = args[0].device if isinstance(args[0], torch.Tensor) else None
        if not self._arena.serves(kwargs.get("device") or like):
            return None
        wanted = func(*args, **{**kwargs, "device": "meta"})
        if type(wanted) is not torch.Tensor or wanted.layout != torch.strided or not wanted.numel():
            return None
        stored = self._arena.tensor(wanted.untyped_storage().nbytes())
        if stored is None:
            return None
        empty = stored.new_empty(0, dtype=wanted.dtype)
        return empty.set_(stored.untyped_storage(), 0, wanted.shape, wanted.stride())
