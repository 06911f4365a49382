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

import ctypes
import functools
import logging
import os
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import nixl
import numpy as np

from modelexpress.errors import NotAvailable, RecoveryFailed, StrategyError, TransferFailed
from modelexpress.frame import framed, unframed
from modelexpress.lanes import GRACE_S, Reading, in_thread, left, run_lanes
from modelexpress.manifest import Manifest
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.transport import Arrived, Connection, Moved, Registration, Transport, Work

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

# Between two looks at a READ. A chunk takes 4 ms (CMA, where it is done before the first look) to 16 ms (TCP).
_POLL_MIN_S = 20e-6
_POLL_MAX_S = 200e-6

# The longest that the progress thread of a source sleeps; whatever needs it wakes it. With nixl's own 0 it never does:
# an idle source took a whole core, and beside one on two cores all else was half as fast (process_vm_readv with two
# threads 3.9 against 8.2 GB/s, READs over TCP 1.2 against 2.5).
_SLEEP_US = 100_000

# UCX's TCP segments are 8 KiB; with 64 KiB a READ is 1.3-2 times as fast and larger adds nothing.
_TCP_SEGMENTS = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")
_TCP_SEGMENT = "64k"

_MAGIC = b"MXNIXL\x00\x01"
_THREADS = "mx-nixl"

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

    def connect(self, endpoint: bytes, *, deadline: float, stop: threading.Event | None = None) -> Connection:
        source = _decode_endpoint(endpoint)
        until = min(deadline, time.monotonic() + self._connect_timeout_s)

        def go_on() -> bool:
            return time.monotonic() < until and not (stop is not None and stop.is_set())

        # In a thread, so that a NIXL that blocks cannot hold us. Nothing of the target is registered yet.
        first = in_thread(lambda: _Lane(source, go_on, failure=NotAvailable), name=_THREADS)
        wait([first], timeout=left(until) + GRACE_S)
        if not first.done():
            first.add_done_callback(_close_late)
            raise NotAvailable(f"NIXL did not come back within {self._connect_timeout_s + GRACE_S:g} s of connecting")
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
    return framed(_MAGIC, endpoint)


def _decode_endpoint(data: bytes) -> _Endpoint:
    """Nothing damaged may reach NIXL: after a truncated blob an agent refuses the whole one, too.

    Raises:
        NotAvailable: says what is wrong with it.
    """
    endpoint = unframed(_MAGIC, data, _Endpoint, what="NIXL transport")
    if len(endpoint.proof) != _PROOF_NBYTES or not 0 < endpoint.proof_address < 1 << 63:
        raise NotAvailable(
            f"the source's endpoint has a proof of {len(endpoint.proof)} bytes at {endpoint.proof_address:#x}; one has "
            f"{_PROOF_NBYTES} bytes in memory"
        )
    return endpoint


class _NixlRegistration(Registration):
    """One agent that offers the storages, and a few bytes that prove to a reader whom it reached."""

    transport = NixlTransport.name

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
        if self._agent.is_ours:  # a forked child may not even have the page
            self._proof[:] = 0
        self._agent.destroy()


class _NixlConnection(Connection):
    """Lanes to one source. The first proved the source; the others are made when there is enough to move."""

    transport = NixlTransport.name

    def __init__(self, source: _Endpoint, first: _Lane, lanes: int) -> None:
        self._source = source
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
        count = min(len(self._lanes), max(1, self._nbytes // _LANE_NBYTES), len(plan.chunks))
        reading = Reading(plan, deadline, arrived, moved, work)
        run_lanes([functools.partial(self._run_lane, at, reading) for at in range(count)], reading, name=_THREADS)

    def _run_lane(self, at: int, reading: Reading) -> None:
        """Move chunks until none is left. While it runs, and if it fails, the connection has no such lane."""
        lane, self._lanes[at] = self._lanes[at], None
        if lane is None and reading.stopped:
            return
        lane = lane or _Lane(self._source, reading.goes_on, failure=TransferFailed)
        try:
            lane.read(reading)
        except BaseException:
            lane.close()
            raise
        self._lanes[at] = lane

    def close(self) -> None:
        for at, lane in enumerate(self._lanes):
            self._lanes[at] = None
            if lane is not None:
                lane.close()


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

    def read(self, reading: Reading) -> None:
        """Move chunk after chunk, and prove the source after each: on CMA we can read a closed registration while
        its memory is changed, since nobody asks the source. The target's memory is registered a chunk at a time,
        by whichever lane moves it.
        """
        registered: list[Any] = []
        while (chunk := reading.take()) is not None:
            registered += self._register(chunk, reading)
            self._move(chunk, reading)
            self._trust(reading)
            reading.arrived(chunk)
        if not reading.stopped:
            self._trust(reading)
        with _translated(TransferFailed, lambda reason: f"cannot deregister the target memory: {reason} {reading}"):
            self._agent.deregister(registered)

    def _trust(self, reading: Reading) -> None:
        with _translated(TransferFailed, lambda reason: f"the source cannot be trusted {reading}: {reason}"):
            self._prove(reading.goes_on)

    def _register(self, chunk: Chunk, reading: Reading) -> list[Any]:
        plan = reading.plan
        here = plan.target.storages
        places = [(plan.target_address(each), each.nbytes, here[each.target_storage].device) for each in chunk.ranges]
        with _translated(TransferFailed, lambda reason: f"cannot register the target memory: {reason} {reading}"):
            return self._agent.register(places)

    def _move(self, chunk: Chunk, reading: Reading) -> None:
        plan = reading.plan
        here, there = plan.target.storages, plan.source.storages
        local = [(plan.target_address(each), each.nbytes, here[each.target_storage].device) for each in chunk.ranges]
        remote = [(plan.source_address(each), each.nbytes, there[each.source_storage].device) for each in chunk.ranges]
        gives_up_at = None

        def go_on() -> bool:
            nonlocal gives_up_at
            if gives_up_at is None and not reading.goes_on():
                gives_up_at = time.monotonic() + _DRAIN_S
            return gives_up_at is None or time.monotonic() < gives_up_at

        finished = time.monotonic() < reading.deadline
        with _translated(TransferFailed, lambda reason: f"{reason} {reading}"):
            finished = finished and self._agent.read(local, remote, go_on)
        if not finished or time.monotonic() > reading.deadline:
            raise reading.out_of_time()

    def close(self) -> None:
        self._agent.destroy()


def make_agent(*, progress_thread: bool) -> nixl.nixl_agent:
    """An agent without a back-end, whose progress thread sleeps when there is nothing to do."""
    name = f"mx-{uuid.uuid4().hex}"
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    if progress_thread:  # nixl's Python class fixes how long it sleeps, so the object below that is made again
        config = nixl.nixlBind.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _SLEEP_US
        agent.agent = nixl.nixlBind.nixlAgent(name, config)
    return agent


class _Agent:
    """A NIXL agent with a random name, and the only reference to it.

    Agents of one name refuse each other, hence the name. Nobody else may hold `nixl`, not even a frame in a
    traceback: as long as it lives, what it was asked to read is written.

    In a forked child it is never destroyed: that would take down connections that the parent still uses, and wait for
    threads that are not there.
    """

    def __init__(self, *, progress_thread: bool) -> None:
        _require_own_ucx()
        self._owner_pid = os.getpid()
        self._remote: Any = None
        self._registered: list[Any] = []
        self._handles: list[Any] = []
        _quieten()
        try:
            self.nixl: Any = make_agent(progress_thread=progress_thread)
            self.nixl.create_backend("UCX", _ucx_parameters())
        except _AGENT_ERRORS as exc:
            self.nixl = None
            traceback.clear_frames(exc.__traceback__)
            raise NotAvailable(f"NIXL cannot make an agent: {_meaning(exc)}{_ucx_settings()}") from exc
        self._unless_forked = weakref.finalize(self, _keep_in_child, self._owner_pid, self.nixl.agent)

    @property
    def is_ours(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._owner_pid

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
        if not self.is_ours:
            self._unless_forked()
            self.nixl = None
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
        self._unless_forked.detach()
        alive = weakref.ref(self.nixl.agent)
        self.nixl = None
        if alive() is not None:
            raise RecoveryFailed("a NIXL agent is still referenced and cannot be destroyed; its memory may be written")


@functools.cache
def _ucx_pid() -> int:
    """The process that was the first to use UCX; a forked child has the answer of its parent."""
    return os.getpid()


def _require_own_ucx() -> None:
    """UCX keeps threads and locks for the whole process, and a fork takes neither along: 2 of 15 children that made an
    agent while their parent read hung in it.

    Raises:
        NotAvailable: this process was forked from one that had made an agent.
    """
    if _ucx_pid() != os.getpid():
        raise NotAvailable(
            f"this process was forked from process {_ucx_pid()}, which had used NIXL, and UCX does not survive a fork; "
            "start it with multiprocessing's spawn or forkserver"
        )


def _keep_in_child(owner_pid: int, agent: Any) -> None:  # noqa: ANN401 - a binding without types
    """Called when an agent is let go of that was not destroyed: in a forked child it is given a reference for ever."""
    if os.getpid() != owner_pid:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


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


def _close_late(lane: Future[_Lane]) -> None:
    """Close a lane that nobody waits for any more."""
    if lane.exception() is None:
        lane.result().close()
