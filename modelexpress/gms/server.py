"""The memory service: a process that owns memory, and outlives the engines that filled it.

One connection is one session, and one thread: it waits, reads or stages until the client closes, and the close
gives back what it held, however the client died. Whatever a client sends, or does not, costs its own connection
and a bounded time.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from modelexpress.errors import ConfigError, GmsError
from modelexpress.gms.listener import listen
from modelexpress.gms.memory import MemoryBackend
from modelexpress.gms.protocol import (
    MAX_HELLO_NBYTES,
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
    Status,
    WentAway,
    receive_message,
    send_fds,
    send_message,
    wait_until_taken,
)
from modelexpress.gms.state import Grant
from modelexpress.gms.store import Name, Refusal, Store

logger = logging.getLogger(__name__)

MAX_SESSIONS = 256
MAX_WAIT_S = 3600.0
MAX_TEXT = 200

_HANDSHAKE_S = 5.0
_REFUSE_S = 1.0
_ACCEPT_AGAIN_S = 0.1
_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7)


@dataclass(frozen=True, slots=True, eq=False)
class _Session:
    """A connected client. `bell` is an eventfd that rings when it is granted something."""

    id: int
    sock: socket.socket
    bell: int
    pid: int

    def is_gone(self) -> bool:
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def wake(self) -> None:
        os.eventfd_write(self.bell, 1)

    def wait_readable(self) -> None:
        """Until the client sends, closes, or the service stops: a parked session needs nothing else."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.poll()


class GmsServer:
    """Serves one kind of memory at one socket path. It owns the path from its construction to its close.

    Args:
        path: of the socket. Its directory is made with mode 0700 when there is none.
        quota_nbytes: the most that all segments together may have; None: what the machine has.
        frame_timeout_s: for each message once it has begun, and for each reply to be taken.

    Raises:
        ConfigError: the path cannot be used, or the quota is not positive.
        GmsError: a live server has the path; names its pid.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        backend: MemoryBackend,
        *,
        quota_nbytes: int | None,
        frame_timeout_s: float = 30.0,
    ) -> None:
        if quota_nbytes is not None and quota_nbytes <= 0:
            raise ConfigError(f"a quota of {quota_nbytes:,} bytes; give a positive number, or none")
        self.path = Path(path).absolute()
        self._store = Store(backend, quota_nbytes=quota_nbytes)
        self._frame_timeout_s = frame_timeout_s
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._threads: list[threading.Thread] = []
        self._serving = threading.Lock()
        self._closed = False
        self._listener = listen(self.path)
        self._stop_receiver, self._stop_sender = socket.socketpair()
        self._stop_sender.setblocking(False)

    def serve_forever(self) -> None:
        """Serve until `stop`; then end every session, free everything, remove the socket and return."""
        with self._serving:
            if self._closed:
                return
            logger.info("serving %s memory at %s, instance %s", self._store.device, self.path, self._store.instance)
            try:
                self._accept_until_stopped()
            finally:
                self._close()
                logger.info("stopped serving at %s", self.path)

    def stop(self) -> None:
        """Make `serve_forever` return. Safe from a signal handler, from any thread, and more than once."""
        with suppress(OSError):  # closed, or asked so often that the pipe is full
            self._stop_sender.send(b"s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and return when everything is closed, by whichever thread serves."""
        self.stop()
        with self._serving:
            self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        # All at once: what one session gives back must not be granted to another that is about to end.
        with self._store.standing_still(), self._lock:
            for session in self._sessions.values():
                with suppress(OSError):  # the client was faster
                    session.sock.shutdown(socket.SHUT_RDWR)  # ends whatever the session's thread waits for
        for thread in self._threads:
            thread.join()
        self._store.close()
        self._stop_receiver.close()
        self._stop_sender.close()

    def _accept_until_stopped(self) -> None:
        poller = select.poll()
        poller.register(self._stop_receiver, select.POLLIN)
        poller.register(self._listener.sock, select.POLLIN)
        while self._stop_receiver.fileno() not in {fd for fd, _ in poller.poll()}:
            try:
                sock, _ = self._listener.sock.accept()
            except BlockingIOError:
                continue  # the client gave up
            except OSError as exc:
                # Out of descriptors, most likely. The connection stays in the queue, so poll would not wait.
                logger.warning("cannot accept a connection at %s: %s", self.path, exc.strerror)
                self._stop_receiver.settimeout(_ACCEPT_AGAIN_S)
                with suppress(TimeoutError):
                    self._stop_receiver.recv(1, socket.MSG_PEEK)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        refusal = _not_admitted(uid, len(self._threads))
        if refusal is not None:
            with sock:
                _refuse(sock, pid, refusal)
            return
        try:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as exc:
            with sock:
                _refuse(sock, pid, Refusal("busy", f"the service cannot open another session: {exc.strerror}"))
            return
        session = _Session(next(self._ids), sock, bell, pid)
        thread = threading.Thread(target=self._run, args=(session,), name=f"gms-session-{session.id}")
        with self._lock:
            self._sessions[session.id] = session
        try:
            thread.start()
        except RuntimeError as exc:  # no thread to be had
            _refuse(sock, pid, Refusal("busy", f"the service cannot open another session: {exc}"))
            self._end(session)
        else:
            self._threads.append(thread)

    def _run(self, session: _Session) -> None:
        try:
            self._converse(session)
        except Refusal as refusal:
            _refuse(session.sock, session.pid, refusal)
        except WentAway as exc:
            logger.info("the session of pid %d ended: %s", session.pid, exc)
        except GmsError as exc:
            _refuse(session.sock, session.pid, Refusal("protocol", str(exc)))
        except Exception:  # a bug that one session meets must not cost the memory of all others
            logger.exception("the session of pid %d ended by an error of the service", session.pid)
        finally:
            self._end(session)

    def _end(self, session: _Session) -> None:
        try:
            self._store.leave(session)
        finally:
            with self._lock:
                del self._sessions[session.id]
                session.sock.close()
                os.close(session.bell)

    def _converse(self, session: _Session) -> None:
        sock = session.sock
        deadline = time.monotonic() + _HANDSHAKE_S
        match receive_message(sock, Hello | Status | Drop, deadline=deadline, limit=MAX_HELLO_NBYTES):
            case Hello() as hello:
                self._hold(session, hello)
            case Status():
                send_message(sock, self._store.status(sessions=len(self._sessions)), deadline=self._soon())
            case Drop(namespace=namespace, key=key):
                self._store.drop(_name(namespace, key))
                send_message(sock, Done(), deadline=self._soon())

    def _hold(self, session: _Session, hello: Hello) -> None:
        """The life of a session that stages or reads."""
        if not hello.wait_s >= 0:  # NaN is not
            raise Refusal("protocol", f"a wait of {hello.wait_s} s; it must be 0 or more")
        self._store.ask(session, _name(hello.namespace, hello.key), hello.request)
        grant = self._granted(session, min(hello.wait_s, MAX_WAIT_S))
        if grant is None:
            return
        granted = Granted(grant.mode, grant.generation, self._store.instance)
        send_message(session.sock, granted, deadline=self._soon())
        if grant.mode == "read":
            self._show(session)
        elif not self._stage(session):
            return
        session.wait_readable()
        if not session.is_gone():
            raise GmsError("a session that reads has nothing to send")

    def _granted(self, session: _Session, wait_s: float) -> Grant | None:
        """Wait for the grant; None when the client hung up first."""
        deadline = time.monotonic() + wait_s
        poller = select.poll()
        poller.register(session.sock, select.POLLIN)
        poller.register(session.bell, select.POLLIN)
        while (grant := self._store.granted(session)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return self._store.give_up(session, waited_s=wait_s)
            if session.sock.fileno() in {fd for fd, _ in poller.poll(math.ceil(1000 * left_s))}:
                if session.is_gone():
                    return None
                raise GmsError("a session that waits has nothing to send")
        return grant

    def _show(self, session: _Session) -> None:
        """Give a reader the generation it was granted."""
        shown = self._store.read_by(session)
        deadline = self._soon()
        layout = Layout(shown.body, tuple(segment.nbytes for segment in shown.segments))
        send_message(session.sock, layout, deadline=deadline)
        send_fds(session.sock, [segment.fd for segment in shown.segments], deadline=deadline)
        wait_until_taken(session.sock, deadline=deadline)

    def _stage(self, session: _Session) -> bool:
        """Give a writer what it asks for until it has committed (True) or hung up (False)."""
        while True:
            session.wait_readable()
            message = receive_message(session.sock, Allocate | Release | Commit, deadline=self._soon())
            if message is None:
                return False
            try:
                if isinstance(message, Commit):
                    generation = self._store.commit(session, _checked("label", message.label, 0), message.body)
                    send_message(session.sock, Committed(generation), deadline=self._soon())
                    return True
                if isinstance(message, Release):
                    self._store.release(session, message.segment)
                    send_message(session.sock, Done(), deadline=self._soon())
                    continue
                segment = self._store.allocate(session, message.nbytes)
                send_message(session.sock, Allocated(segment.nbytes), deadline=self._soon())
                send_fds(session.sock, [segment.fd], deadline=self._soon())
            except Refusal as refusal:
                send_message(session.sock, _refused(session.pid, refusal), deadline=self._soon())

    def _soon(self) -> float:
        return time.monotonic() + self._frame_timeout_s


def _not_admitted(uid: int, sessions: int) -> Refusal | None:
    own = os.geteuid()
    if uid not in (0, own):
        return Refusal("protocol", f"uid {uid} may not use the service of uid {own}")
    if sessions >= MAX_SESSIONS:
        return Refusal("busy", f"{sessions} sessions are open, the most that the service has at a time; try later")
    return None


def _refuse(sock: socket.socket, pid: int, refusal: Refusal) -> None:
    """The last words of a session."""
    message = _refused(pid, refusal)
    with suppress(GmsError):  # it went away, or does not listen
        send_message(sock, message, deadline=time.monotonic() + _REFUSE_S)


def _refused(pid: int, refusal: Refusal) -> Refused:
    level = logging.INFO if refusal.kind in ("missing", "busy") else logging.WARNING
    logger.log(level, "refused pid %d: %s", pid, refusal)
    return Refused(refusal.kind, str(refusal))


def _name(namespace: str, key: str) -> Name:
    return Name(_checked("namespace", namespace, 1), _checked("key", key, 1))


def _checked(what: str, text: str, least: int) -> str:
    """Short and printable: it goes into logs and messages."""
    if not least <= len(text) <= MAX_TEXT or not text.isprintable():
        raise Refusal("protocol", f"the {what} must be {least} to {MAX_TEXT} printable characters, not {text[:50]!a}")
    return text
