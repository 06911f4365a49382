"""Reads weights from another process's memory with NIXL, over UCX: RDMA, host shared memory or TCP.

A source is one agent that has registered its memory and then does nothing. A target reads with lanes: each
lane is an agent of its own, used by one thread at a time, with one READ in flight.

Why an agent per lane: on cross-memory attach (CMA) the call that posts a READ copies, and one agent copies
with one thread. 512 MiB on two busy cores, medians of 7 interleaved rounds, against one plain READ of all of
it in the same round: CMA 0.94 with one lane, 1.62 with two, 2.42 with four; TCP 1.16, 1.52, 1.63. Back-end
threads (`num_threads=2`) came to what two lanes do, and need thousands of descriptors to split. A second
READ in flight per lane changed nothing.

How a read is ended: nothing in NIXL cancels a READ over TCP. Released, with its remote agent removed and its
memory deregistered, it went on: 11-16 MiB arrived after that. Two things stop it, and both are done. A lane's
agent has no progress thread, so that what UCX moves by software moves only while the lane itself asks (with
one it was slower, too: 1.45 against 1.62, TCP 1.24 against 1.52). And the agent of a lane that failed is
destroyed, and checked to be gone, which also ends what a network card would write.
"""

from __future__ import annotations

import functools
import logging
import os
import struct
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import nixl
import numpy as np
import xxhash

from modelexpress.errors import NotAvailable, RecoveryFailed, StrategyError, TransferFailed
from modelexpress.manifest import Manifest
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.thread_name import name_this_thread
from modelexpress.transport import Arrived, Connection, Registration, Transport

T = TypeVar("T")

# What each NIXL error means to a reader. NIXL 1.5's errors share no base but Exception, so each is named;
# tests/test_nixl_transport.py::test_every_nixl_error_is_known fails when NIXL brings a new one.
ERROR_MEANINGS: dict[type[Exception], str] = {
    getattr(nixl._bindings, name): meaning
    for name, meaning in {
        "nixlRemoteDisconnectError": "the source went away",
        "nixlBackendError": "UCX failed, or nobody listens where the source was",
        "nixlNotFoundError": "the source has not registered that memory",
        "nixlMismatchError": "the source's agent blob is not one of this NIXL",
        "nixlInvalidParamError": "NIXL refused a parameter",
        "nixlNotAllowedError": "NIXL knows another agent of that name",
        "nixlNotSupportedError": "NIXL cannot do this between these two kinds of memory",
        "nixlCancelledError": "the read was cancelled",
        "nixlNotPostedError": "the read was never posted",
        "nixlRepostActiveError": "the read was posted twice",
        "nixlNoTelemetryError": "NIXL has no telemetry of the read",
        "nixlUnknownError": "NIXL does not say why",
    }.items()
    if hasattr(nixl._bindings, name)
}

_ERRORS: tuple[type[Exception], ...] = tuple(ERROR_MEANINGS)
_AGENT_ERRORS: tuple[type[Exception], ...] = (RuntimeError, *_ERRORS)  # RuntimeError: there is no plugin at all

# A lane is worth its 30 ms (agent 20, blob 5, first contact 7) from about this many bytes at 4 GB/s.
_LANE_NBYTES = 128 * 1024 * 1024

# How long a READ in flight may take to finish when its lane must end, so that an agent is seldom destroyed
# under one: over TCP that aborts the *source* (UCX asserts in uct_tcp_ep_pending_purge: 4 of 4 stopped sources
# when they went on, and 3 of 3 running ones within 5 readers that gave up). A chunk needs 16 ms.
_DRAIN_S = 1.0

# How long after the deadline, or after another lane failed, a lane may take to come back. Draining is 1 s,
# destroying an agent under a READ took 0.08-0.17 s.
_GRACE_S = 3.0

# Between two looks at a READ. A chunk takes 4 ms (CMA, where it is done before the first look) to 16 ms (TCP).
_POLL_MIN_S = 20e-6
_POLL_MAX_S = 200e-6

# UCX's TCP segments are 8 KiB; with 64 KiB a READ is 1.3-2 times as fast and larger adds nothing.
_TCP_SEGMENTS = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")
_TCP_SEGMENT = "64k"

_MAGIC = b"MXNIXL\x00\x01"  # the last byte is the version of the frame
_FRAME = struct.Struct("<8sI16s")  # magic, length of the body, xxh3_128 of the body

_PROOF_NBYTES = 16

_MEMORY_TYPES = {"cpu": "DRAM", "cuda": "VRAM"}


class NixlTransport(Transport):
    """Moves bytes between processes and hosts.

    Args:
        lanes: how many agents read at the same time, at most.
        connect_timeout_s: for the first contact with a source, which reads a few bytes of it.
    """

    name = "nixl"

    def __init__(self, *, lanes: int, connect_timeout_s: float) -> None:
        self._lanes = lanes
        self._connect_timeout_s = connect_timeout_s
        self._opened: list[_NixlRegistration | _NixlConnection] = []

    def register(self, manifest: Manifest) -> Registration:
        registration = _NixlRegistration(manifest)
        self._opened.append(registration)
        return registration

    def connect(self, endpoint: bytes, *, deadline: float) -> Connection:
        source = _decode_endpoint(endpoint)
        until = min(deadline, time.monotonic() + self._connect_timeout_s)
        # In a thread, so that a NIXL that blocks cannot hold us. Nothing of the target is registered yet.
        first = _in_thread(lambda: _Lane(source, lambda: time.monotonic() < until, failure=NotAvailable))
        wait([first], timeout=_left(until) + _GRACE_S)
        if not first.done():
            first.add_done_callback(_close_late)
            raise NotAvailable(f"NIXL did not come back within {self._connect_timeout_s + _GRACE_S:g} s of connecting")
        connection = _NixlConnection(source, first.result(), self._lanes)
        self._opened.append(connection)
        return connection

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


class _Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a reader needs. `proof` lies at `proof_address` in the source for as long as its registration is open."""

    blob: bytes
    proof: bytes
    proof_address: int


def _encode_endpoint(endpoint: _Endpoint) -> bytes:
    body = msgspec.msgpack.encode(endpoint)
    return _FRAME.pack(_MAGIC, len(body), xxhash.xxh3_128_digest(body)) + body


def _decode_endpoint(data: bytes) -> _Endpoint:
    """Nothing damaged may reach NIXL: after a truncated blob an agent refuses the whole one, too.

    Raises:
        NotAvailable: says what is wrong with it.
    """
    if len(data) < _FRAME.size:
        raise NotAvailable(f"the source's endpoint has {len(data)} bytes, fewer than its header")
    magic, nbytes, digest = _FRAME.unpack_from(data)
    body = data[_FRAME.size :]
    if magic != _MAGIC:
        raise NotAvailable("the source's endpoint is not one of this version of modelexpress' NIXL transport")
    if len(body) != nbytes or xxhash.xxh3_128_digest(body) != digest:
        raise NotAvailable(f"the source's endpoint is damaged: {len(body)} of {nbytes} bytes, or a wrong checksum")
    try:
        endpoint = msgspec.msgpack.decode(body, type=_Endpoint)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise NotAvailable(f"the source's endpoint cannot be read: {exc}") from exc
    if len(endpoint.proof) != _PROOF_NBYTES or not 0 < endpoint.proof_address < 1 << 63:
        raise NotAvailable(
            f"the source's endpoint has a proof of {len(endpoint.proof)} bytes at {endpoint.proof_address:#x}; one has "
            f"{_PROOF_NBYTES} bytes in memory"
        )
    return endpoint


class _NixlRegistration(Registration):
    """One agent that offers the storages, and a few bytes that prove to a reader whom it reached."""

    def __init__(self, manifest: Manifest) -> None:
        self._proof = np.frombuffer(os.urandom(_PROOF_NBYTES), dtype=np.uint8).copy()
        self._agent = _Agent(progress_thread=True)  # it answers readers over TCP
        try:
            places = [(each.address, each.nbytes, each.device) for each in manifest.storages]
            with _translated(NotAvailable, lambda reason: f"cannot register {len(places)} storages: {reason}"):
                self._agent.register([*places, _place(self._proof)])
                blob = self._agent.nixl.get_agent_metadata()
        except BaseException:
            self._agent.destroy()
            raise
        self._endpoint = _encode_endpoint(_Endpoint(blob, self._proof.tobytes(), self._proof.ctypes.data))

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def close(self) -> None:
        """Withdraws the proof, which fails every read that has not ended yet, and destroys the agent.

        Over TCP, memory that is freed under a living agent kills this process. On CMA a reader copies without
        asking us, and only the missing proof tells it that what it copied may have changed.
        """
        self._proof[:] = 0
        self._agent.destroy()


class _NixlConnection(Connection):
    """Lanes to one source. The first proved the source; the others are made when there is enough to move."""

    def __init__(self, source: _Endpoint, first: _Lane, lanes: int) -> None:
        self._source = source
        self._lanes: list[_Lane | None] = [first] + [None] * (lanes - 1)
        self._nbytes = 0

    def read(self, plan: TransferPlan, *, deadline: float, arrived: Arrived | None = None) -> None:
        self._nbytes += plan.nbytes
        count = max(1, min(len(self._lanes), self._nbytes // _LANE_NBYTES))
        progress = _Progress(plan, deadline, arrived)
        shares = plan.lanes(count) if plan.chunks else ()
        running = [self._start(at, share, progress) for at, share in enumerate(shares)]
        try:
            wait(running, timeout=_left(deadline + _GRACE_S), return_when=FIRST_EXCEPTION)
        finally:  # also when the caller is interrupted
            progress.stopped.set()
            wait(running, timeout=_left(min(deadline, time.monotonic()) + _GRACE_S))
        stuck = sum(1 for each in running if not each.done())
        if stuck:
            raise RecoveryFailed(
                f"{stuck} of {len(running)} lanes did not come back from NIXL within {_GRACE_S:g} s of their end, "
                f"{progress}; they may still write, so the target memory must not be used again"
            )
        _raise_first(running)

    def _start(self, at: int, share: Sequence[Chunk], progress: _Progress) -> Future[None]:
        """Run one lane's share. While it runs, and if it fails, the connection has no such lane."""
        lane, self._lanes[at] = self._lanes[at], None

        def run() -> None:
            self._lanes[at] = _read_share(lane, self._source, share, progress)

        return _in_thread(run)

    def close(self) -> None:
        for at, lane in enumerate(self._lanes):
            self._lanes[at] = None
            if lane is not None:
                lane.close()


class _Progress:
    """One read, seen by all its lanes: what arrived, and whether to stop."""

    def __init__(self, plan: TransferPlan, deadline: float, arrived: Arrived | None) -> None:
        self.plan = plan
        self.deadline = deadline
        self.stopped = threading.Event()
        self._arrived = arrived
        self._lock = threading.Lock()
        self._chunks = 0
        self._nbytes = 0

    def arrived(self, chunk: Chunk) -> None:
        with self._lock:
            self._chunks += 1
            self._nbytes += chunk.nbytes
        if self._arrived is not None:
            self._arrived(chunk)

    def goes_on(self) -> bool:
        return not self.stopped.is_set() and time.monotonic() < self.deadline

    def __str__(self) -> str:
        return (
            f"after {self._chunks} of {len(self.plan.chunks)} chunks "
            f"({self._nbytes / 1e9:.2f} of {self.plan.nbytes / 1e9:.2f} GB)"
        )


def _read_share(lane: _Lane | None, source: _Endpoint, share: Sequence[Chunk], progress: _Progress) -> _Lane:
    """Move one share and give the lane back, fit for the next read. A lane that fails is closed first."""
    lane = lane or _Lane(source, progress.goes_on, failure=TransferFailed)
    try:
        lane.read(share, progress)
    except BaseException:
        lane.close()
        raise
    return lane


class _Lane:
    """An agent that has reached one source. Used by one thread at a time.

    Args:
        go_on: asked while the first contact is waited for.
        failure: what to raise when it has not.
    """

    def __init__(self, source: _Endpoint, go_on: Callable[[], bool], *, failure: type[StrategyError]) -> None:
        self._source = source
        self._scratch = np.zeros(len(source.proof), dtype=np.uint8)
        with _translated(failure, str):
            self._agent = _Agent(progress_thread=False)
        try:
            with _translated(failure, lambda reason: f"cannot reach the source: {reason}"):
                self._agent.add_remote(source.blob)
                self._agent.register([_place(self._scratch)])
                self._prove(go_on)
        except BaseException:
            self._agent.destroy()
            raise

    def _prove(self, go_on: Callable[[], bool]) -> None:
        """Read a few bytes that only the right source has while it is open, into memory of our own."""
        self._scratch[:] = 0
        there = [(self._source.proof_address, len(self._source.proof), "cpu")]
        if not self._agent.read([_place(self._scratch)], there, go_on):
            raise NotAvailable("it does not answer: it is stopped, overloaded or out of reach")
        if self._scratch.tobytes() != self._source.proof:
            raise NotAvailable("it has closed its registration, or another process answers in its place")

    def read(self, share: Sequence[Chunk], progress: _Progress) -> None:
        """Move chunk after chunk. The target memory is registered meanwhile."""
        plan = progress.plan
        storages = plan.target.storages
        parts = [part for chunk in share for part in chunk.ranges]
        places = [(plan.target_address(each), each.nbytes, storages[each.target_storage].device) for each in parts]
        with _translated(TransferFailed, lambda reason: f"cannot register the target memory: {reason} {progress}"):
            registered = self._agent.register(places)
        for chunk in share:
            if progress.stopped.is_set():  # another lane failed, or the caller was interrupted: that goes up
                break
            self._move(chunk, progress)
            progress.arrived(chunk)
        else:
            # On CMA we can read a closed registration, while its memory is changed: nobody asks the source.
            with _translated(TransferFailed, lambda reason: f"the source cannot be trusted {progress}: {reason}"):
                self._prove(progress.goes_on)
        with _translated(TransferFailed, lambda reason: f"cannot deregister the target memory: {reason} {progress}"):
            self._agent.deregister(registered)

    def _move(self, chunk: Chunk, progress: _Progress) -> None:
        plan = progress.plan
        here, there = plan.target.storages, plan.source.storages
        local = [(plan.target_address(each), each.nbytes, here[each.target_storage].device) for each in chunk.ranges]
        remote = [(plan.source_address(each), each.nbytes, there[each.source_storage].device) for each in chunk.ranges]
        gives_up_at = None

        def go_on() -> bool:
            nonlocal gives_up_at
            if gives_up_at is None and not progress.goes_on():
                gives_up_at = time.monotonic() + _DRAIN_S
            return gives_up_at is None or time.monotonic() < gives_up_at

        finished = time.monotonic() < progress.deadline
        with _translated(TransferFailed, lambda reason: f"{reason} {progress}"):
            finished = finished and self._agent.read(local, remote, go_on)
        if not finished or time.monotonic() > progress.deadline:
            raise TransferFailed(f"deadline passed {progress}: the source is stopped, overloaded or out of reach")

    def close(self) -> None:
        self._agent.destroy()


class _Agent:
    """A NIXL agent with a random name, and the only reference to it.

    Agents of one name refuse each other, hence the name. Nobody else may hold `nixl`, not even a frame in a
    traceback: as long as it lives, what it was asked to read is written.
    """

    def __init__(self, *, progress_thread: bool) -> None:
        self._remote: Any = None
        self._registered: list[Any] = []
        self._handles: list[Any] = []
        _quieten()
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
            self.nixl: Any = nixl.nixl_agent(f"mx-{uuid.uuid4().hex}", config)
            self.nixl.create_backend("UCX", _ucx_parameters())
        except _AGENT_ERRORS as exc:
            self.nixl = None
            traceback.clear_frames(exc.__traceback__)
            raise NotAvailable(f"NIXL cannot make an agent: {_meaning(exc)}{_ucx_settings()}") from exc

    def register(self, places: Iterable[_Place]) -> list[Any]:
        """Register memory; gives back what `deregister` takes. Ranges that touch become one."""
        made = []
        for memory_type, rows in _by_memory_type(_merged(places)):
            made.append(self.nixl.register_memory(np.array(rows, dtype=np.uint64), memory_type))
            self._registered.append(made[-1])
        return made

    def deregister(self, registered: list[Any]) -> None:
        for each in registered:
            self.nixl.deregister_memory(each)
            self._registered.remove(each)

    def add_remote(self, blob: bytes) -> None:
        self._remote = self.nixl.add_remote_agent(blob)

    def read(self, local: Sequence[_Place], remote: Sequence[_Place], go_on: Callable[[], bool]) -> bool:
        """Read and wait. False when `go_on` says no first; then the READ is still in flight."""
        for memory_types, rows in _by_both_memory_types(local, remote):
            here = self.nixl.get_xfer_descs(np.array([row for row, _ in rows], dtype=np.uint64), memory_types[0])
            there = self.nixl.get_xfer_descs(np.array([row for _, row in rows], dtype=np.uint64), memory_types[1])
            self._handles.append(self.nixl.initialize_xfer("READ", here, there, self._remote))
            state = self.nixl.transfer(self._handles[-1])
            pause_s = _POLL_MIN_S
            while state == "PROC":
                if not go_on():
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_MAX_S)
                state = self.nixl.check_xfer_state(self._handles[-1])
            if state != "DONE":
                raise TransferFailed(f"NIXL says {state}")
            self.nixl.release_xfer_handle(self._handles.pop())
        return True

    def destroy(self) -> None:
        """End everything that this agent does, and prove it. Safe to call twice.

        Raises:
            RecoveryFailed: somebody still holds the agent, so it may still write.
        """
        if self.nixl is None:
            return
        with suppress(*_ERRORS):  # a broken agent refuses to tidy up; its end does that too
            while self._handles:
                self.nixl.release_xfer_handle(self._handles.pop())
        with suppress(*_ERRORS):
            if self._remote is not None:
                self.nixl.remove_remote_agent(self._remote)
        with suppress(*_ERRORS):
            self.deregister(list(self._registered))
        self._handles.clear()
        self._registered.clear()
        alive = weakref.ref(self.nixl.agent)
        self.nixl = None
        if alive() is not None:
            raise RecoveryFailed("a NIXL agent is still referenced and cannot be destroyed; its memory may be written")


_Place = tuple[int, int, str]  # address, bytes, device
_Row = tuple[int, int, int]  # address, bytes, device id; what NIXL takes


def _place(array: np.ndarray[Any, Any]) -> _Place:
    return array.ctypes.data, array.nbytes, "cpu"


def _merged(places: Iterable[_Place]) -> list[_Place]:
    """Join ranges that touch or overlap, never across a gap: what lies in one is not ours to register."""
    merged: list[_Place] = []
    for address, nbytes, device in sorted(places, key=lambda each: (each[2], each[0], each[1])):
        if merged and merged[-1][2] == device and address <= merged[-1][0] + merged[-1][1]:
            start, before, _ = merged[-1]
            merged[-1] = (start, max(before, address + nbytes - start), device)
        else:
            merged.append((address, nbytes, device))
    return merged


def _by_memory_type(places: Iterable[_Place]) -> Iterator[tuple[str, list[_Row]]]:
    rows: dict[str, list[_Row]] = {}
    for address, nbytes, device in places:
        memory_type, device_id = _memory_type(device)
        rows.setdefault(memory_type, []).append((address, nbytes, device_id))
    yield from rows.items()


def _by_both_memory_types(
    local: Sequence[_Place], remote: Sequence[_Place]
) -> Iterator[tuple[tuple[str, str], list[tuple[_Row, _Row]]]]:
    """Pairs of rows, by the kinds of memory they join: one READ knows one kind on each side."""
    pairs: dict[tuple[str, str], list[tuple[_Row, _Row]]] = {}
    for (here, nbytes, device), (there, _, far_device) in zip(local, remote, strict=True):
        near_type, near_id = _memory_type(device)
        far_type, far_id = _memory_type(far_device)
        pair = ((here, nbytes, near_id), (there, nbytes, far_id))
        pairs.setdefault((near_type, far_type), []).append(pair)
    yield from pairs.items()


@functools.cache
def _memory_type(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    if kind not in _MEMORY_TYPES or not (index or "0").isdecimal():
        raise NotAvailable(f"NIXL moves host and CUDA memory, and this is on {device!r}")
    return _MEMORY_TYPES[kind], int(index or "0")


def _ucx_parameters() -> dict[str, str]:
    """Peer error handling: without it the death of a peer over TCP is missed in 5 of 7 cases."""
    unset = [key for key in _TCP_SEGMENTS if f"UCX_{key}" not in os.environ]
    parameters = {"ucx_error_handling_mode": "peer"}
    if unset:
        parameters["engine_config"] = ",".join(f"{key}={_TCP_SEGMENT}" for key in unset)
    return parameters


def _ucx_settings() -> str:
    """The environment variables that most often leave UCX without a transport, for an error message."""
    found = [f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ]
    return f"; the environment sets {', '.join(found)}, which may leave UCX without a transport" if found else ""


def _quieten() -> None:
    """Keep NIXL and UCX off standard output, which belongs to whoever uses this library.

    NIXL's Python logger comes with a handler to standard output at level INFO. UCX logs to standard output
    and has no call to change that: it reads the environment when NIXL loads it with the first agent. What
    the user has set stays.
    """
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    theirs = logging.getLogger("nixl")
    for handler in [each for each in theirs.handlers if each.get_name() == "consoleHandler"]:
        theirs.removeHandler(handler)
        theirs.propagate = True
        if theirs.level == logging.INFO and "NIXL_LOG_LEVEL" not in os.environ:
            theirs.setLevel(logging.WARNING)


@contextmanager
def _translated(kind: type[StrategyError], say: Callable[[str], str]) -> Iterator[None]:
    """Turn NIXL's errors into ours. `say` makes the message of a reason when there is one."""
    try:
        yield
    except StrategyError as exc:
        raise kind(say(str(exc))) from exc
    except _ERRORS as exc:
        # NIXL's own frames hold the agent, and the exception is kept: see _Agent.
        traceback.clear_frames(exc.__traceback__)
        raise kind(say(_meaning(exc))) from exc


def _meaning(exc: Exception) -> str:
    return f"{ERROR_MEANINGS.get(type(exc), 'NIXL failed')} ({type(exc).__name__}: {exc})"


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, which cannot hold the interpreter's exit when NIXL never returns."""
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(work, future), name="mx-nixl", daemon=True).start()
    return future


def _close_late(lane: Future[_Lane]) -> None:
    """Close a lane that nobody waits for any more."""
    if lane.exception() is None:
        lane.result().close()


def _run(work: Callable[[], T], future: Future[T]) -> None:
    name_this_thread("mx-nixl")
    try:
        future.set_result(work())
    except BaseException as exc:  # noqa: BLE001 - the outermost line of a thread; it goes up in the caller
        future.set_exception(exc)
    finally:
        del work, future  # the exception holds this frame, and they the exception


def _raise_first(running: list[Future[None]]) -> None:
    """Raise what a lane raised, if any did. The gravest wins, and what `arrived` raised before our own."""
    failed = [each for each in running if each.exception() is not None]
    failed.sort(
        key=lambda each: (
            not isinstance(each.exception(), RecoveryFailed),
            isinstance(each.exception(), TransferFailed),
        )
    )
    running.clear()
    try:
        if failed:
            failed[0].result()
    finally:
        del failed  # its exception holds this frame
