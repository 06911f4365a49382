"""Reads weights over plain TCP connections, received straight into the parameters.

For hosts without RDMA: over TCP, NIXL's READ is emulated by UCX with messages between two progress threads, and takes
about twice the CPU time of two sockets. A source of this transport can only be read, by whoever has its secret, where
a NIXL endpoint is a capability to write, too; and it outlives whatever its readers do.

A reader and a source prove to each other that they know the secret of the endpoint before anything else is said; the
secret itself never travels. The bytes are not encrypted, and nothing but the checksums of the weights shows that
somebody changed them on the way: it is for a network that only the fleet reaches, as NIXL is.

A reader's own threads write what they receive, so nothing can arrive late. A source that closes its registration ends
its connections first, and waits for the threads that send: a chunk that came whole was read while it was registered.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import msgspec

from modelexpress.destination import STEP_NBYTES, Destination, Run, steps
from modelexpress.errors import NotAvailable, RecoveryFailed, TransferFailed
from modelexpress.frame import framed, unframed
from modelexpress.lanes import Reading, run_lanes
from modelexpress.manifest import PIECE_NBYTES, Manifest
from modelexpress.memory import memory_at
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.thread_name import name_this_thread
from modelexpress.transport import Arrived, Connection, Moved, Registration, Transport, Work

logger = logging.getLogger(__name__)

_MAGIC = b"MXTCP\x00\x00\x01"
_THREADS = "mx-tcp"
_SECRET_NBYTES = 32
_NONCE_NBYTES = 16
_PROOF_NBYTES = 32  # HMAC-SHA256
_COUNT = struct.Struct("<I")
_RANGE = struct.Struct("<QQ")  # address, bytes

# In one request, and in all that wait for their answers: they must fit into the buffers of a connection whose other
# end is busy sending. 32 KiB, of at least 64.
_MOST_RANGES = 2048

_AHEAD = 3  # chunks that a lane has asked for, so that the source need not wait to be asked

# A source serves at most this many connections at once, and waits this long for a new one to prove itself.
_MOST_CONNECTIONS = 256
_PROVING_S = 5.0

_CLOSING_S = 10.0  # for threads that send, after their connection was ended under them
_LOOK_S = 0.1  # between two looks at whether a read that gets nothing should go on
_MOST_BUFFERS = 1024  # IOV_MAX
_LANE_NBYTES = 64 * 1024 * 1024  # a connection is worth its hand-shake from about this many bytes


class TcpTransport(Transport):
    """Moves bytes between hosts, from host memory into host memory or a device.

    Args:
        lanes: how many connections read at the same time, at most.
        connect_timeout_s: for each connection and its hand-shake.
        listen: the address of this host at which its sources are reached.
    """

    name = "tcp"

    def __init__(self, *, lanes: int, connect_timeout_s: float, listen: str) -> None:
        self._lanes = lanes
        self._connect_timeout_s = connect_timeout_s
        self._listen = listen
        self._opened: list[_TcpRegistration | _TcpConnection] = []

    def register(self, manifest: Manifest) -> Registration:
        elsewhere = next((each.device for each in manifest.storages if each.device != "cpu"), None)
        if elsewhere is not None:
            raise NotAvailable(f"sockets send host memory, and a storage is on {elsewhere}")
        registration = _TcpRegistration(manifest, self._listen)
        self._opened.append(registration)
        return registration

    def connect(self, endpoint: bytes, *, deadline: float, stop: threading.Event | None = None) -> Connection:
        source = unframed(_MAGIC, endpoint, _Endpoint, what="TCP transport")
        _require_possible(source)
        until = min(deadline, time.monotonic() + self._connect_timeout_s)

        def go_on() -> bool:
            return time.monotonic() < until and not (stop is not None and stop.is_set())

        connection = _TcpConnection(source, _Lane(source, go_on), self._lanes, self._connect_timeout_s)
        self._opened.append(connection)
        return connection

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


class _Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a source listens, and what proves to it that a reader may read."""

    address: str
    port: int
    secret: bytes


def _require_possible(source: _Endpoint) -> None:
    """An endpoint comes from outside: a name would be looked up, and a multicast address asked.

    Raises:
        NotAvailable: it names no address of one host.
    """
    try:
        address = ipaddress.ip_address(source.address)
    except ValueError:
        raise NotAvailable(f"the source's endpoint names {source.address!r:.100}, which is no IP address") from None
    zone = address.scope_id if isinstance(address, ipaddress.IPv6Address) else None
    if zone is not None:
        try:
            socket.if_nametoindex(zone)
        except (OSError, ValueError):  # a text that cannot be a name
            raise NotAvailable(
                f"the source's endpoint names {source.address!r:.100}, and this host has no interface {zone!r:.60}"
            ) from None
    if address.is_unspecified or address.is_multicast or not 0 < source.port < 1 << 16:
        raise NotAvailable(f"the source's endpoint names {address} port {source.port}: impossible")
    if len(source.secret) != _SECRET_NBYTES:
        raise NotAvailable(f"the source's endpoint has a secret of {len(source.secret)} bytes, not {_SECRET_NBYTES}")


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + nonces, "sha256")


# The source's side


class _TcpRegistration(Registration):
    """A port, and a thread for each connection. Only bytes of the storages are ever sent."""

    transport = TcpTransport.name

    def __init__(self, manifest: Manifest, listen: str) -> None:
        self._owner_pid = os.getpid()
        self._ranges = _Ranges(manifest)
        self._secret = os.urandom(_SECRET_NBYTES)
        self._closed = False
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        try:
            self._listener = socket.create_server((listen, 0), family=family)
        except OSError as exc:
            raise NotAvailable(f"cannot listen at {listen}: {exc}; set listen to an address of this host") from exc
        port = self._listener.getsockname()[1]
        self._endpoint = framed(_MAGIC, _Endpoint(listen, port, self._secret))
        self._thread = threading.Thread(target=self._accept, name=_THREADS, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # interrupted while the thread begins
            self._end_listening()
            raise
        os.register_at_fork(after_in_child=partial(_close_copies, weakref.ref(self)))

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def close(self) -> None:
        """End every connection, and wait for the threads that send: after that nothing reads the memory.

        Raises:
            RecoveryFailed: a thread does not come back, and may still read the memory.
        """
        if os.getpid() != self._owner_pid:
            return  # a forked child has nothing of it any more
        with self._lock:
            self._closed = True
            serving = dict(self._connections)
        self._end_listening()
        for connection in serving:
            with suppress(OSError):  # its reader went away, or its thread has closed it
                connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + _CLOSING_S
        for thread in (self._thread, *serving.values()):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise RecoveryFailed(f"a thread that serves a reader did not end within {_CLOSING_S:g} s")

    def _end_listening(self) -> None:
        self._closed = True
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for readers
        self._listener.close()

    def close_copies(self) -> None:
        """In a forked child: give up its copies of the sockets, without a word to who is at the other end.

        As long as the child had them, a reader would not see that the source died.
        """
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()

    def _accept(self) -> None:
        name_this_thread(_THREADS)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as exc:
                if self._closed:
                    return
                logger.warning("a reader could not be accepted, trying again: %s", exc)
                time.sleep(_LOOK_S)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name=_THREADS, daemon=True)
            with self._lock:
                if self._closed or len(self._connections) >= _MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections[connection] = thread
                thread.start()  # here, since whoever closes waits for what it finds

    def _serve(self, connection: socket.socket) -> None:
        name_this_thread(_THREADS)
        try:
            with connection:
                if self._proves_itself(connection):
                    connection.settimeout(None)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    while self._answer(connection):
                        pass
        except OSError as exc:
            logger.debug("a reader went away: %s", exc)
        finally:
            with self._lock:
                del self._connections[connection]

    def _proves_itself(self, connection: socket.socket) -> bool:
        ours = os.urandom(_NONCE_NBYTES)
        connection.settimeout(_PROVING_S)
        connection.sendall(ours)
        said = _receive(connection, _NONCE_NBYTES + _PROOF_NBYTES, until=time.monotonic() + _PROVING_S)
        nonces = ours + said[:_NONCE_NBYTES]
        if not hmac.compare_digest(said[_NONCE_NBYTES:], _proof(self._secret, b"reader", nonces)):
            logger.warning("refused a reader that does not know the secret of this source")
            return False
        connection.sendall(_proof(self._secret, b"source", nonces))
        return True

    def _answer(self, connection: socket.socket) -> bool:
        """Send what one request asks for; False when there is none any more, or it asks for what is not served."""
        first = connection.recv(1)
        if not first:
            return False
        (count,) = _COUNT.unpack(first + _receive(connection, _COUNT.size - 1))
        if count > _MOST_RANGES:
            logger.warning("refused a reader that asks for %d ranges at once", count)
            return False
        asked = list(_RANGE.iter_unpack(_receive(connection, count * _RANGE.size)))
        if not all(self._ranges.hold(*each) for each in asked):
            logger.warning("refused a reader that asks for memory that is not served")
            return False
        views = [memory_at(*each) for each in asked]
        while views:
            if len(views) == 1 or views[0].nbytes > 1 << 16:
                connection.sendall(views.pop(0))
            else:
                _advance(views, connection.sendmsg(views[:_MOST_BUFFERS]))
        return True


def _close_copies(made: weakref.ref[_TcpRegistration]) -> None:
    registration = made()
    if registration is not None:
        registration.close_copies()


class _Ranges:
    """The memory of a manifest's storages."""

    def __init__(self, manifest: Manifest) -> None:
        places = sorted((each.address, each.address + each.nbytes) for each in manifest.storages)
        self._starts = [start for start, _ in places]
        self._ends = [end for _, end in places]

    def hold(self, address: int, nbytes: int) -> bool:
        """Whether a run of bytes, at least one, lies in one storage."""
        at = bisect_right(self._starts, address) - 1
        return nbytes > 0 and at >= 0 and address + nbytes <= self._ends[at]


def _receive(connection: socket.socket, nbytes: int, *, until: float | None = None) -> bytes:
    """Exactly so many bytes. Raises OSError when the other end closes before, or is not done by `until`."""
    received = bytearray()
    while len(received) < nbytes:
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(nbytes - len(received))
        if not more:
            raise ConnectionError("the other end closed the connection")
        received += more
    return bytes(received)


def _advance(views: list[memoryview], nbytes: int) -> None:
    """Drop the first `nbytes` of the views."""
    done = 0
    while done < len(views) and nbytes >= views[done].nbytes:
        nbytes -= views[done].nbytes
        done += 1
    del views[:done]
    if nbytes:
        views[0] = views[0][nbytes:]


# The reader's side


class _TcpConnection(Connection):
    """Lanes to one source. The first proved the source; the others are made when there is enough to move."""

    transport = TcpTransport.name

    def __init__(self, source: _Endpoint, first: _Lane, lanes: int, connect_timeout_s: float) -> None:
        self._source = source
        self._connect_timeout_s = connect_timeout_s
        self._lanes: list[_Lane | None] = [first] + [None] * (lanes - 1)
        self._nbytes = 0

    def read(
        self,
        plan: TransferPlan,
        *,
        deadline: float,
        arrived: Arrived | None = None,
        moved: Moved | None = None,
        work: Work | None = None,
    ) -> None:
        self._nbytes += plan.nbytes
        reading = Reading(plan, deadline, arrived, moved, work)
        count = min(len(self._lanes), max(1, self._nbytes // _LANE_NBYTES), len(plan.chunks))
        run_lanes([partial(self._run_lane, at, reading) for at in range(count)], reading, name=_THREADS)

    def _run_lane(self, at: int, reading: Reading) -> None:
        """Move chunks until none is left. While it runs, and if it fails, the connection has no such lane."""
        lane, self._lanes[at] = self._lanes[at], None
        if lane is None and not reading.stopped:
            until = time.monotonic() + self._connect_timeout_s
            try:
                lane = _Lane(self._source, lambda: reading.goes_on() and time.monotonic() < until)
            except NotAvailable as exc:
                raise TransferFailed(f"{exc} {reading}") from exc
        if lane is None:
            return
        try:
            if lane.read(reading):
                self._lanes[at], lane = lane, None
        finally:
            if lane is not None:
                lane.close()

    def close(self) -> None:
        for at, lane in enumerate(self._lanes):
            self._lanes[at] = None
            if lane is not None:
                lane.close()


class _Lane:
    """One connection to a source, proven on both ends. Used by one thread at a time.

    Raises:
        NotAvailable: the source is not there, or it is another one; says why.
    """

    def __init__(self, source: _Endpoint, go_on: Callable[[], bool]) -> None:
        where = f"{source.address} port {source.port}"
        self._owner_pid = os.getpid()
        family = socket.AF_INET6 if ":" in source.address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(_LOOK_S)
            _patiently(partial(self._try_connect, (source.address, source.port)), go_on)
            self._prove(source.secret, go_on)
        except OSError as exc:
            self._socket.close()
            raise NotAvailable(f"nobody answers at {where}: {exc or type(exc).__name__}") from exc
        except BaseException:
            self._socket.close()
            raise
        # From here on calls block in the kernel, which comes back after this time with what there is.
        self._socket.settimeout(None)
        wait = struct.pack("ll", 0, int(_LOOK_S * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def _try_connect(self, where: tuple[str, int]) -> bool:
        with suppress(BlockingIOError):
            number = self._socket.connect_ex(where)
            if number in (0, errno.EISCONN):
                return True
            if number not in (errno.EAGAIN, errno.EALREADY, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
        return False

    def _prove(self, secret: bytes, go_on: Callable[[], bool]) -> None:
        theirs = self._receive(_NONCE_NBYTES, go_on)
        ours = os.urandom(_NONCE_NBYTES)
        self._socket.sendall(ours + _proof(secret, b"reader", theirs + ours))
        said = self._receive(_PROOF_NBYTES, go_on)
        if not hmac.compare_digest(said, _proof(secret, b"source", theirs + ours)):
            raise NotAvailable("another process listens where the source was")

    def _receive(self, nbytes: int, go_on: Callable[[], bool]) -> bytes:
        received = bytearray()

        def more() -> bool:
            with suppress(TimeoutError):
                part = self._socket.recv(nbytes - len(received))
                if not part:
                    raise ConnectionError(
                        "it has closed its registration, serves as many readers as it can, or does not know our secret"
                    )
                received.extend(part)
            return len(received) == nbytes

        _patiently(more, go_on)
        return bytes(received)

    def read(self, reading: Reading) -> bool:
        """Move chunk after chunk; the next ones are asked for before. False: the lane has answers to come."""
        destination = Destination(reading.plan)
        asked: deque[Chunk] = deque()
        held: Chunk | None = None  # taken, and too many ranges to be asked for while others arrive
        while True:
            while held is None and len(asked) < _AHEAD and (held := reading.take()) is not None:
                if asked and sum(len(each.ranges) for each in (*asked, held)) > _MOST_RANGES:
                    break
                self._ask(held, reading)
                asked.append(held)
                held = None
            if not asked and held is not None:
                self._ask(held, reading)
                asked.append(held)
                held = None
            if not asked:
                return True
            self._move(asked[0], destination, reading)
            reading.arrived(asked.popleft())
            if reading.stopped:
                return not asked

    def _ask(self, chunk: Chunk, reading: Reading) -> None:
        """Ask for the first ranges of a chunk, as many as one request holds."""
        self._ask_for(_sources_of(chunk, reading.plan)[:_MOST_RANGES], reading)

    def _ask_for(self, ranges: Sequence[tuple[int, int]], reading: Reading) -> None:
        view = memoryview(_COUNT.pack(len(ranges)) + b"".join(_RANGE.pack(*each) for each in ranges))
        while view:
            if not reading.goes_on():
                raise reading.out_of_time()
            with _awaited(reading):
                view = view[self._socket.send(view) :]

    def _move(self, chunk: Chunk, destination: Destination, reading: Reading) -> None:
        runs = destination.runs(chunk)
        most = STEP_NBYTES if reading.moved is not None else PIECE_NBYTES
        start = 0
        for first in range(0, len(runs), _MOST_RANGES):
            if first:
                self._ask_for(_sources_of(chunk, reading.plan)[first : first + _MOST_RANGES], reading)
            for step in steps(runs[first : first + _MOST_RANGES], most=most):
                self._fill(step, reading)
                nbytes = sum(each[2] for each in step)
                if reading.moved is not None and not destination.staged:
                    reading.moved(chunk, start, nbytes)
                start += nbytes
        destination.land()

    def _fill(self, step: Sequence[Run], reading: Reading) -> None:
        views = [memory_at(local, nbytes) for local, _, nbytes in step]
        while views:
            if not reading.goes_on():
                raise reading.out_of_time()
            with _awaited(reading):
                if len(views) == 1:
                    received = self._socket.recv_into(views[0], 0, socket.MSG_WAITALL)
                else:
                    received = self._socket.recvmsg_into(views[:_MOST_BUFFERS], 0, socket.MSG_WAITALL)[0]
                if not received:
                    raise TransferFailed(f"the source went away or closed its registration {reading}")
                _advance(views, received)

    def close(self) -> None:
        """Tell the source, also where a forked child has a copy of the socket, which would keep it open."""
        if os.getpid() == self._owner_pid:
            with suppress(OSError):  # the source went away
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _sources_of(chunk: Chunk, plan: TransferPlan) -> list[tuple[int, int]]:
    return [(plan.source_address(part), part.nbytes) for part in chunk.ranges]


@contextmanager
def _awaited(reading: Reading) -> Iterator[None]:
    """A call that comes back without a byte where there was none for a while."""
    try:
        yield
    except BlockingIOError:
        return
    except OSError as exc:
        raise TransferFailed(f"the source went away {reading}: {exc}") from exc


def _patiently(step: Callable[[], bool], go_on: Callable[[], bool]) -> None:
    """Repeat a step, which waits a moment itself, until it is done."""
    while not step():
        if not go_on():
            raise TimeoutError("it is stopped, overloaded or out of reach")
