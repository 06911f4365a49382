"""A process's side of the memory service: stage and commit a generation, or import a committed one.

Errors are raised; what becomes of the engine is its own to decide. A session's close is its release, so a client
that dies holds nothing.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from modelexpress.errors import GmsError, NotAvailable, StaleGeneration
from modelexpress.gms.memory import Mapping, MemoryBackend
from modelexpress.gms.protocol import (
    MAX_FDS,
    MAX_SEGMENTS,
    Allocate,
    Allocated,
    Commit,
    Committed,
    Done,
    Drop,
    Granted,
    Hello,
    Layout,
    Refused,
    Release,
    ServerMessage,
    Status,
    StatusReply,
    WentAway,
    receive_fds,
    receive_message,
    send_message,
)
from modelexpress.gms.state import Request

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Copies (address, offset in the segment, bytes) parts of this process's memory into a segment.
Write = Callable[[Sequence[tuple[int, int, int]]], None]

# For one exchange that does not wait for another session. Reserving a segment zeroes its pages, at 5 GB/s.
_ANSWER_S = 10.0
_CONNECT_S = 1.0
DEFAULT_NAMESPACE = "default"
_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7)


class Busy(NotAvailable):
    """Another session stages what was asked for; it may be committed soon."""


class Where(msgspec.Struct, frozen=True):
    """One key of one service. `answer_s`: beyond it, a service that does not answer is stopped or overloaded."""

    path: str
    key: str
    namespace: str = DEFAULT_NAMESPACE
    answer_s: float = _ANSWER_S

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "path", os.path.abspath(self.path))  # the process may go elsewhere


def open_session(where: Where, request: Request, backend: MemoryBackend, *, wait_s: float) -> Staging | Imported:
    """Ask for a key. What comes back says what was granted; close it, or let the imported tensors go.

    Args:
        wait_s: how long to wait for another session's commit or end; 0 asks what there is now.

    Raises:
        NotAvailable: there is no service at the path, nothing is committed, or the wait was in vain.
        GmsError: the service broke the protocol, or what it offers is not sealed.
    """
    with _connect(where.path) as sock:
        hello = Hello(request, where.namespace, where.key, wait_s)
        granted = _exchange(sock, hello, Granted, where, wait_s=wait_s)
        if granted.mode == "stage":
            return Staging(sock.dup(), where, granted, backend)
        return _import(sock, where, granted, backend)


def require_service(path: str) -> None:
    """Find out in a fraction of a millisecond whether there is anything to ask.

    Raises:
        NotAvailable: there is no service at the path.
    """
    _connect(path).close()


def status(path: str) -> StatusReply:
    """What a service holds.

    Raises:
        NotAvailable: there is no service at the path.
    """
    with _connect(path) as sock:
        return _exchange(sock, Status(), StatusReply, Where(path, ""))


def held_nbytes(where: Where) -> int:
    """Memory that a service holds for a key now, for generations that are not committed yet, too.

    Raises:
        NotAvailable: there is no service at the path.
    """
    keys = status(where.path).keys
    return sum(each.nbytes for each in keys if (each.namespace, each.key) == (where.namespace, where.key))


def drop(where: Where) -> None:
    """Make the committed generation of a key unfindable; those who read it keep it.

    Raises:
        NotAvailable: there is no service, or no such key.
    """
    with _connect(where.path) as sock:
        _exchange(sock, Drop(where.namespace, where.key), Done, where)


class Segment:
    """Bytes of a generation at an address of this process. Writing there never reaches the service.

    `lease` keeps the mapping: whoever refers to it, as a tensor made by `tensor` does, keeps the memory.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.lease = mapping.lease()
        weakref.finalize(self.lease, mapping.close).atexit = False

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over some of the bytes, with a storage of its own that begins there."""
        return self.mapping.tensor(self.lease, offset, nbytes)


class Staging:
    """A generation that nobody sees yet. Its close, or this process's end, gives all of it back."""

    def __init__(self, sock: socket.socket, where: Where, granted: Granted, backend: MemoryBackend) -> None:
        self.where = where
        self.generation = granted.generation
        self.device = backend.device
        self._sock = sock
        self._granted = granted
        self._backend = backend
        self._segments: list[Segment] = []
        self._writable: dict[Segment, int] = {}  # and their descriptors

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What the generation consists of by now, in its order."""
        return tuple(self._segments)

    def add(self, nbytes: int, parts: Sequence[tuple[int, int, int]]) -> Segment:
        """Reserve a segment, copy (address, offset, bytes) parts into it, and map it here.

        The mapping stays good whatever becomes of the staging.

        Raises:
            GmsError: no memory or quota left; states need and free. The staging can go on or be closed.
        """
        return self.add_from(nbytes, lambda write: write(parts))

    def add_from(self, nbytes: int, fill: Callable[[Write], None]) -> Segment:
        """The same for bytes that are not all in memory: `fill` brings them piece by piece.

        It is called once with a function that copies (address, offset, bytes) parts, from any thread and in any
        order, until `fill` returns. When `fill` raises, the segment belongs to no `Segment`: close the staging.
        """
        fd = self._allocate(nbytes)
        try:
            fill(partial(self._backend.fill, fd))
            segment = Segment(self._backend.map(fd, nbytes))
        finally:
            os.close(fd)
        self._segments.append(segment)
        return segment

    def add_writable(self, nbytes: int) -> Segment:
        """Reserve a segment and map it for writing. What is written there is in it, until `commit` freezes it.

        Raises: as `add`.
        """
        fd = self._allocate(nbytes)
        try:
            segment = Segment(self._backend.map(fd, nbytes, writable=True))
        except BaseException:
            os.close(fd)
            raise
        self._segments.append(segment)
        self._writable[segment] = fd
        return segment

    def release(self, segment: Segment) -> None:
        """Give back a segment. What is mapped here stays mapped as long as something refers to it.

        Raises:
            GmsError: the service refused or is gone.
        """
        _exchange(self._sock, Release(self._segments.index(segment)), Done, self.where)
        self._segments.remove(segment)
        if segment in self._writable:
            os.close(self._writable.pop(segment))

    def commit(self, label: str, body: bytes) -> Imported:
        """Make the generation what new readers get, in one step. This session reads it from now on.

        Raises:
            GmsError: the service refused or is gone; nothing became visible, unless the answer was lost.
        """
        for segment, fd in self._writable.items():
            segment.mapping.freeze(fd)
        _exchange(self._sock, Commit(label, body), Committed, self.where)
        segments, self._segments = self._segments, []
        sock = self._sock.dup()
        self.close()
        return Imported(sock, self.where, self._granted, body, segments, self._backend)

    def close(self) -> None:
        """Abort. What was mapped here stays mapped as long as something refers to it."""
        self._segments.clear()
        _close_all(tuple(self._writable.values()))
        self._writable.clear()
        self._sock.close()

    def _allocate(self, nbytes: int) -> int:
        _exchange(self._sock, Allocate(nbytes), Allocated, self.where)
        with _named(self.where):
            (fd,) = receive_fds(self._sock, 1, deadline=time.monotonic() + self.where.answer_s)
        return fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Imported:
    """A committed generation in this process's address space.

    The memory lives as long as anything refers to a segment's lease, and so does the session, unless `close`
    ended it before. `body` is what the writer said about the segments.
    """

    def __init__(
        self,
        sock: socket.socket,
        where: Where,
        granted: Granted,
        body: bytes,
        segments: Sequence[Segment],
        backend: MemoryBackend,
    ) -> None:
        self.where = where
        self.generation = granted.generation
        self.instance = granted.instance
        self.body = body
        self.device = backend.device
        self._backend = backend
        self._mappings = tuple(segment.mapping for segment in segments)
        self._session = _Session(sock)
        self._paused = False
        if segments:
            self._session.hold_for(segments)
        else:
            weakref.finalize(self, self._session.close).atexit = False
        self._segments = tuple(segments)

    def take_segments(self) -> tuple[Segment, ...]:
        """The segments, in the writer's order. Once: from then on the caller's references keep them."""
        segments, self._segments = self._segments, ()
        return segments

    @property
    def paused(self) -> bool:
        """Whether the memory was let go of."""
        return self._paused

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that are mapped, or reserved while paused."""
        return sum(mapping.nbytes for mapping in self._open_mappings())

    @property
    def kept_nbytes(self) -> int:
        """Memory that the service keeps for the generation, whether this process looks at all of it or not."""
        unit = self._backend.granularity
        return sum(-(-mapping.nbytes // unit) * unit for mapping in self._mappings)

    def holds(self, address: int) -> bool:
        """Whether an address lies in one of the segments."""
        return any(0 <= address - each.address < each.nbytes for each in self._open_mappings())

    def is_as_sealed(self) -> bool:
        """Whether every byte that this process sees is the generation's own, and will be so after a pause."""
        return all(mapping.is_as_sealed() for mapping in self._open_mappings())

    def pause(self) -> None:
        """Let go of the memory and of the generation; the addresses stay reserved. Touching a tensor is a fault.

        What this process wrote into its private pages is lost. Segments that no tensor looks at any more are gone
        already. Pausing twice is no error. Withdraw what is published to peers from this memory first.
        """
        if not self._paused:
            self._paused = True
            for mapping in self._open_mappings():
                mapping.release()
            self._session.close()

    def resume(self) -> None:
        """Map the same generation at the same addresses again: all segments, or none. No-op when not paused.

        Raises:
            StaleGeneration: it was replaced or dropped, or the service is another one; still paused.
            NotAvailable, GmsError: the service is gone, or the kernel refused; still paused.
        """
        if not self._paused:
            return
        with _connect(self.where.path) as sock:
            self._ask_again(sock)
            try:
                layout = _receive_layout(sock, self.where)
                _require_sizes(layout, self._mappings)
                for mapping, (fd, _) in zip(
                    self._mappings, _receive_segments(sock, layout, self._backend, self.where), strict=True
                ):
                    if mapping.address:
                        mapping.restore(fd)
            except BaseException:
                for mapping in self._open_mappings():
                    mapping.release()
                raise
            self._session.sock = sock.dup()
        self._paused = False

    def _ask_again(self, sock: socket.socket) -> None:
        hello = Hello("RO", self.where.namespace, self.where.key, 0.0)
        try:
            granted = _exchange(sock, hello, Granted, self.where)
        except NotAvailable as exc:
            raise StaleGeneration(f"generation {self.generation} of {self.where.key[:16]} is gone: {exc}") from exc
        if (granted.instance, granted.generation) != (self.instance, self.generation):
            raise StaleGeneration(
                f"generation {self.generation} of {self.where.key[:16]} is not there any more, and "
                f"{granted.generation} is; load again"
            )

    def _open_mappings(self) -> list[Mapping]:
        return [mapping for mapping in self._mappings if mapping.address]

    def close(self) -> None:
        """End the session. The memory stays as long as something refers to it."""
        self._segments = ()
        self._session.close()


class _Session:
    """The socket of a reader, closed when the last segment is collected."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock: socket.socket | None = sock
        self._left = 0

    def hold_for(self, segments: Sequence[Segment]) -> None:
        self._left = len(segments)
        for segment in segments:
            weakref.finalize(segment.lease, self._let_go).atexit = False

    def close(self) -> None:
        sock, self.sock = self.sock, None
        if sock is not None:
            sock.close()

    def _let_go(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.close()


def _import(sock: socket.socket, where: Where, granted: Granted, backend: MemoryBackend) -> Imported:
    layout = _receive_layout(sock, where)
    received = _receive_segments(sock, layout, backend, where)
    segments = [Segment(backend.map(fd, nbytes)) for fd, nbytes in received]
    return Imported(sock.dup(), where, granted, layout.body, segments, backend)


def _receive_layout(sock: socket.socket, where: Where) -> Layout:
    with _named(where):
        layout: Layout | None = receive_message(sock, Layout, deadline=time.monotonic() + where.answer_s)
    if layout is None:
        raise GmsError(f"the memory service at {where.path} went away before it said what to map")
    if len(layout.segments) > MAX_SEGMENTS or min(layout.segments, default=1) < 1:
        raise GmsError(
            f"the memory service offers {len(layout.segments):,} segments, the smallest of "
            f"{min(layout.segments):,} bytes; there are at most {MAX_SEGMENTS:,}, none of them empty"
        )
    return layout


def _require_sizes(layout: Layout, mappings: Sequence[Mapping]) -> None:
    """What is mapped in the place of another segment is as large: behind its end there would be a SIGBUS."""
    if layout.segments != tuple(mapping.nbytes for mapping in mappings):
        raise GmsError("the memory service offers other segments than this generation had; load again")


def _receive_segments(
    sock: socket.socket, layout: Layout, backend: MemoryBackend, where: Where
) -> Iterator[tuple[int, int]]:
    """The descriptors that follow a layout, each with its size; closed when the next batch is asked for.

    A batch at a time, so that a process needs few descriptors for many segments. Nothing unsealed is accepted.
    """
    for start in range(0, len(layout.segments), MAX_FDS):
        sizes = layout.segments[start : start + MAX_FDS]
        with _named(where):
            fds = receive_fds(sock, len(sizes), deadline=time.monotonic() + where.answer_s)
        try:
            for fd, nbytes in zip(fds, sizes, strict=True):
                if not backend.is_sealed(fd, nbytes):
                    raise GmsError(f"the memory service offers a segment of {nbytes:,} bytes that is not sealed")
                yield fd, nbytes
        finally:
            _close_all(fds)


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect(path)
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError as exc:
        sock.close()
        raise NotAvailable(f"no memory service is running at {path} ({exc.strerror or exc})") from exc
    if uid not in (0, os.getuid()):
        sock.close()
        raise NotAvailable(f"the memory service at {path} runs as user {uid}; weights are taken from our own or root")
    return sock


def _exchange(sock: socket.socket, message: msgspec.Struct, answer: type[T], where: Where, *, wait_s: float = 0.0) -> T:
    """Send one message and wait for its answer; a refusal is raised as what it means to the caller."""
    deadline = time.monotonic() + wait_s + where.answer_s
    with _named(where):
        with suppress(WentAway):  # a service that is full says so and closes before it was asked
            send_message(sock, message, deadline=deadline)
        reply = receive_message(sock, ServerMessage, deadline=deadline)
    if isinstance(reply, answer):
        return reply
    if reply is None:
        raise GmsError(f"the memory service at {where.path} closed the connection")
    if not isinstance(reply, Refused):
        raise GmsError(f"the memory service at {where.path} answered with a {type(reply).__name__}")
    if reply.kind in ("missing", "busy"):
        raise (Busy if reply.kind == "busy" else NotAvailable)(f"the memory service at {where.path}: {reply.reason}")
    if reply.kind == "stale":
        raise StaleGeneration(f"the memory service at {where.path}: {reply.reason}")
    raise GmsError(f"the memory service at {where.path} refused: {reply.reason}")


@contextmanager
def _named(where: Where) -> Iterator[None]:
    """The protocol knows two ends of a socket: say which service went away, was late, or talked nonsense."""
    try:
        yield
    except GmsError as exc:
        raise type(exc)(f"the memory service at {where.path}: {exc}; see whether it still runs") from exc


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
