"""Messages between a memory service and its clients, and how they travel on a Unix socket.

A frame is a 4-byte big-endian length and a msgpack message of exactly that many bytes; file descriptors ride
on frames of their own, so that a frame that is refused for its size never brings any. There is no pickle. One
connection is one session: its close gives back all that the session holds.

    client                              server
    Hello(request, key, wait)        -> Granted(mode, generation, instance) | Refused, and the end
    staging:  Allocate(nbytes)       -> Allocated + 1 fd | Refused       (as often as needed)
              Release(segment)       -> Done | Refused                   (what is not needed after all)
              Commit(label, body)    -> Committed | Refused              (the client reads from now on)
    reading:  (nothing)              <- Layout(body, segments) and the fds in batches, right after Granted
    others:   Status, Drop           -> StatusReply, Done | Refused, and the end

A client that waits or reads sends nothing: anything it sends ends its session. A `Refused` of kind "protocol"
ends the session too, unless it answers an Allocate, a Release or a Commit. A server that is full refuses at once, so a
client whose Hello cannot be sent may still find a `Refused` to read.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any, Literal

import msgspec

from modelexpress.errors import GmsError
from modelexpress.gms.state import Request

# A manifest needs about 100 bytes a tensor: 64 MiB are 600,000 tensors.
MAX_FRAME_NBYTES = 64 * 1024 * 1024
MAX_HELLO_NBYTES = 4096

# The kernel's SCM_MAX_FD: one message carries at most 253 descriptors.
MAX_FDS = 253
MAX_SEGMENTS = 16 * MAX_FDS

_LENGTH = struct.Struct(">I")
_INT = struct.Struct("i")
_FDS_NBYTES = socket.CMSG_SPACE(MAX_FDS * _INT.size)
_RECEIVE_NBYTES = 1024 * 1024  # grows with what arrives, not with what was announced


class WentAway(GmsError):
    """The other end closed or died in the middle of an exchange."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """First message of a session. `wait_s`: how long it may wait for its grant; 0 asks for an answer now.

    Namespace and key are 1 to 200 printable characters.
    """

    request: Request
    namespace: str
    key: str
    wait_s: float


class Status(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """First message of a session that only asks what there is."""


class Drop(msgspec.Struct, frozen=True, tag="drop", forbid_unknown_fields=True):
    """First message of a session that makes a committed generation unfindable."""

    namespace: str
    key: str


class Allocate(msgspec.Struct, frozen=True, tag="allocate", forbid_unknown_fields=True):
    """A segment of this many bytes for the staged generation, reserved before it is promised."""

    nbytes: int


class Release(msgspec.Struct, frozen=True, tag="release", forbid_unknown_fields=True):
    """The staged generation does without this segment: its place, from 0, among those that it has now."""

    segment: int


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """The staged generation is complete. `body` is opaque to the server; readers get it as it is."""

    label: str
    body: bytes


ClientMessage = Hello | Status | Drop | Allocate | Release | Commit


class Granted(msgspec.Struct, frozen=True, tag="granted", forbid_unknown_fields=True):
    """The session stages or reads this generation. `instance` is new each time a service starts."""

    mode: Literal["stage", "read"]
    generation: int
    instance: str


class Layout(msgspec.Struct, frozen=True, tag="layout", forbid_unknown_fields=True):
    """What a reader maps. One descriptor for each segment follows, in batches."""

    body: bytes
    segments: tuple[int, ...]


class Allocated(msgspec.Struct, frozen=True, tag="allocated", forbid_unknown_fields=True):
    """One descriptor follows."""

    nbytes: int


class Committed(msgspec.Struct, frozen=True, tag="committed", forbid_unknown_fields=True):
    """The generation is sealed, and what new readers get."""

    generation: int


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """It was done."""


class KeyStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key, for people. Label, generation, segments and readers are those of the committed generation.

    `nbytes` is all that the key costs, staged and superseded generations included.
    """

    namespace: str
    key: str
    label: str
    phase: str
    generation: int | None
    nbytes: int
    segments: int
    readers: int
    waiting: int
    superseded: int


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply", forbid_unknown_fields=True):
    """What a server holds. `quota_nbytes` 0: no quota. `sessions` counts the one that asks."""

    pid: int
    device: str
    quota_nbytes: int
    used_nbytes: int
    sessions: int
    keys: tuple[KeyStatus, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The server says no, and why. `kind` tells the client which error to raise."""

    kind: Literal["busy", "missing", "stale", "memory", "protocol"]
    reason: str


ServerMessage = Granted | Layout | Allocated | Committed | Done | StatusReply | Refused


def send_message(sock: socket.socket, message: msgspec.Struct, *, deadline: float) -> None:
    """Send one frame.

    Raises:
        GmsError: it is too large, the other end went away, or the deadline (`time.monotonic()`) passed.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_FRAME_NBYTES:
        raise GmsError(f"a message of {len(data):,} bytes; the limit is {MAX_FRAME_NBYTES:,}")
    with _bounded(sock, deadline, "sending"):
        sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(
    sock: socket.socket, kinds: UnionType | type, *, deadline: float, limit: int = MAX_FRAME_NBYTES
) -> Any:  # noqa: ANN401 - one of `kinds`
    """Receive one frame of one of these kinds; None when the other end closed instead of beginning one.

    Never takes more bytes than the frame has, nor any before its length was accepted. The deadline covers the
    whole frame, so that a sender of half a message costs a bounded time.

    Raises:
        GmsError: half a frame, a frame over `limit`, another message, descriptors, or the deadline passed.
    """
    with _bounded(sock, deadline, "waiting for a message"):
        head = _receive_exactly(sock, _LENGTH.size, may_end=True, deadline=deadline)
        if head is None:
            return None
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > limit:
            raise GmsError(f"the other end announced a message of {nbytes:,} bytes; the limit is {limit:,}")
        data = _receive_exactly(sock, nbytes, may_end=False, deadline=deadline)
    try:
        return msgspec.msgpack.decode(data or b"", type=kinds)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise GmsError(f"the other end sent what is no message of this protocol: {exc}") from exc


def send_fds(sock: socket.socket, fds: Sequence[int], *, deadline: float) -> None:
    """Send descriptors, at most MAX_FDS on each carrier byte, and the next only when the last were taken.

    Raises:
        GmsError: the other end went away, or did not take them before the deadline.
    """
    for start in range(0, len(fds), MAX_FDS):
        if start:
            wait_until_taken(sock, deadline=deadline)
        with _bounded(sock, deadline, "sending descriptors"):
            _send_batch(sock, list(fds[start : start + MAX_FDS]), deadline)


def wait_until_taken(sock: socket.socket, *, deadline: float) -> None:
    """Return when the other end has read all that was sent.

    Descriptors on their way count against a limit that all processes of a user share, for as long as the
    receiver does not read: so one that never reads must not be sent more, nor be taken for a reader.

    Raises:
        GmsError: the other end went away, or did not read before the deadline.
    """
    poller = select.poll()
    poller.register(sock, 0)  # hang-up and errors only
    pause_s = 0.001
    with _bounded(sock, deadline, "waiting for the other end to read"):
        while _unread_nbytes(sock):
            if poller.poll(1000 * min(pause_s, _left(deadline))):
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            pause_s = min(2 * pause_s, 0.05)


def receive_fds(sock: socket.socket, count: int, *, deadline: float) -> list[int]:
    """Receive exactly `count` descriptors, close-on-exec; the caller closes them. None leaks when this raises.

    Raises:
        GmsError: fewer, more, or truncated descriptors, or the deadline passed.
    """
    fds: list[int] = []
    try:
        with _bounded(sock, deadline, "waiting for descriptors"):
            while len(fds) < count:
                sock.settimeout(_left(deadline))
                # Not socket.recv_fds, which ignores its flags: Python 3.11. Every child would inherit what it gets.
                carrier, controls, flags, _ = sock.recvmsg(1, _FDS_NBYTES, socket.MSG_CMSG_CLOEXEC)
                received = array.array("i")
                for level, kind, data in controls:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        received.frombytes(data[: len(data) // received.itemsize * received.itemsize])
                fds.extend(received)
                if carrier != b"F" or not received or flags & socket.MSG_CTRUNC or len(fds) > count:
                    raise GmsError(  # noqa: TRY301 - what arrived is closed below
                        f"expected {count} descriptors and got {len(fds)}; is the descriptor limit too low?"
                    )
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _send_batch(sock: socket.socket, fds: list[int], deadline: float) -> None:
    while True:
        sock.settimeout(_left(deadline))
        try:
            socket.send_fds(sock, [b"F"], fds)
        except OSError as exc:
            if exc.errno != errno.ETOOMANYREFS:
                raise
        else:
            return
        # Other receivers of this user have yet to take theirs: unix(7).
        time.sleep(min(0.01, _left(deadline)))


def _unread_nbytes(sock: socket.socket) -> int:
    # SIOCOUTQ, the same number as TIOCOUTQ on every architecture: tcp(7), unix(7).
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, _INT.pack(0))
    return int(_INT.unpack(answer)[0])


@contextmanager
def _bounded(sock: socket.socket, deadline: float, doing: str) -> Iterator[None]:
    try:
        sock.settimeout(_left(deadline))
        yield
    except TimeoutError as exc:
        raise GmsError(f"the other end took too long: {doing} ended at the deadline") from exc
    except OSError as exc:
        raise WentAway(f"the other end went away while {doing}: {exc.strerror or exc}") from exc


def _receive_exactly(sock: socket.socket, nbytes: int, *, may_end: bool, deadline: float) -> bytes | None:
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(_left(deadline))
        part = sock.recv(min(nbytes - len(data), _RECEIVE_NBYTES))
        if not part:
            if may_end and not data:
                return None
            raise WentAway(f"the other end went away after {len(data):,} of {nbytes:,} bytes of a message")
        data += part
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
