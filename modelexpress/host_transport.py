"""Reads weights from another process of this host, by asking the kernel to copy them (`process_vm_readv`).

One copy, by the reader's own cores: the source does nothing and need not even run. A read of a chunk is a few calls
that return when the bytes are there, so nothing can arrive late, and the deadline is kept to within one step.

What a reader makes sure of before it trusts an endpoint: that both run under one kernel and see one set of process
numbers, that the process is the one that registered (a number is used again; its start time is not), that the kernel
lets us read it (the same user and no `yama` in the way, or CAP_SYS_PTRACE), and that a random word lies where the
source put it. The word is read again after every chunk: a source that closes its registration erases it first.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelexpress.destination import STEP_NBYTES, Destination, Run, steps
from modelexpress.errors import NotAvailable, TransferFailed
from modelexpress.frame import framed, unframed
from modelexpress.lanes import Reading, run_lanes
from modelexpress.manifest import PIECE_NBYTES, Manifest
from modelexpress.plan import TransferPlan
from modelexpress.transport import Arrived, Connection, Moved, Registration, Transport, Work

_PROOF_NBYTES = 16
_START_TIME = 19  # field 22 of /proc/PID/stat, counted behind the name: proc(5)
_MAGIC = b"MXHOST\x00\x01"
_THREADS = "mx-host"


class _Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which process of which kernel, and the word that lies at `proof_address` while its registration is open."""

    kernel: str
    processes: str
    pid: int
    started: int
    proof: bytes
    proof_address: int


class HostTransport(Transport):
    """Moves bytes between processes of one host, into host memory or a device.

    Args:
        lanes: how many threads copy at the same time.
    """

    name = "host"

    def __init__(self, *, lanes: int) -> None:
        self._lanes = lanes
        self._opened: list[_HostRegistration] = []

    def register(self, manifest: Manifest) -> Registration:
        elsewhere = next((each.device for each in manifest.storages if each.device != "cpu"), None)
        if elsewhere is not None:
            raise NotAvailable(f"the kernel copies host memory, and a storage is on {elsewhere}")
        registration = _HostRegistration(_here())
        self._opened.append(registration)
        return registration

    def connect(self, endpoint: bytes, *, deadline: float, stop: threading.Event | None = None) -> Connection:
        source = unframed(_MAGIC, endpoint, _Endpoint, what="host transport")
        _require_possible(source)
        here = _here()
        if (source.kernel, source.processes) != (here.kernel, here.processes):
            raise NotAvailable("the source runs on another host, or in a container with process numbers of its own")
        if _started(source.pid) != source.started:
            raise NotAvailable(f"the source went away: process {source.pid} has ended")
        _prove(source)
        return _HostConnection(source, self._lanes)

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


class _HostRegistration(Registration):
    """Nothing but a word in this process's memory: as long as it is there, the storages may be read."""

    transport = HostTransport.name

    def __init__(self, here: _Endpoint) -> None:
        proof = os.urandom(_PROOF_NBYTES)
        self._proof = ctypes.create_string_buffer(proof, _PROOF_NBYTES)
        address = ctypes.addressof(self._proof)
        self._endpoint = framed(_MAGIC, msgspec.structs.replace(here, proof=proof, proof_address=address))

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def close(self) -> None:
        """Erase the word: a reader that looks for it after its copy knows that the copy may be wrong."""
        ctypes.memset(self._proof, 0, _PROOF_NBYTES)


class _HostConnection(Connection):
    transport = HostTransport.name

    def __init__(self, source: _Endpoint, lanes: int) -> None:
        self._source = source
        self._lanes = lanes

    def read(
        self,
        plan: TransferPlan,
        *,
        deadline: float,
        arrived: Arrived | None = None,
        moved: Moved | None = None,
        work: Work | None = None,
    ) -> None:
        elsewhere = next((each.device for each in plan.source.storages if each.device != "cpu"), None)
        if elsewhere is not None:
            raise TransferFailed(f"the source's manifest has a storage on {elsewhere}, which it cannot have registered")
        reading = Reading(plan, deadline, arrived, moved, work)
        count = min(self._lanes, len(plan.chunks))
        run_lanes([functools.partial(_run_lane, self._source, reading)] * count, reading, name=_THREADS)

    def close(self) -> None:
        """Nothing is held: each read is a call of its own."""


def _run_lane(source: _Endpoint, reading: Reading) -> None:
    """Move chunks until none is left."""
    destination = Destination(reading.plan)
    most = STEP_NBYTES if reading.moved is not None else PIECE_NBYTES
    while (chunk := reading.take()) is not None:
        start = 0
        for runs in steps(destination.runs(chunk), most=most):
            if not reading.goes_on():
                raise reading.out_of_time()
            nbytes = sum(each[2] for each in runs)
            try:
                _copy(source.pid, runs)
            except NotAvailable as exc:
                raise TransferFailed(f"{exc} {reading}") from exc
            if reading.moved is not None and not destination.staged:
                reading.moved(chunk, start, nbytes)
            start += nbytes
        destination.land()
        _trust(source, reading)
        reading.arrived(chunk)
    if not reading.stopped:
        _trust(source, reading)


def _require_possible(source: _Endpoint) -> None:
    """An endpoint comes from outside, and what it says goes to the kernel. Zeros lie in much memory, and prove nothing.

    Raises:
        NotAvailable: no process can have said that.
    """
    a_word = len(source.proof) == _PROOF_NBYTES and any(source.proof)
    if not a_word or not 0 < source.proof_address < 1 << 63 or not 0 < source.pid < 1 << 31:
        raise NotAvailable(
            f"the source's endpoint names process {source.pid} and {len(source.proof)} bytes at "
            f"{source.proof_address:#x}: impossible"
        )


def _trust(source: _Endpoint, reading: Reading) -> None:
    try:
        _prove(source)
    except NotAvailable as exc:
        raise TransferFailed(f"the source cannot be trusted {reading}: {exc}") from exc


def _prove(source: _Endpoint) -> None:
    """Read the word that only the right process has, while its registration is open.

    Raises:
        NotAvailable: it is not there, or may not be read; says why.
    """
    found = ctypes.create_string_buffer(_PROOF_NBYTES)
    _copy(source.pid, [(ctypes.addressof(found), source.proof_address, _PROOF_NBYTES)])
    if found.raw != source.proof:
        raise NotAvailable("the source has closed its registration, or another process has its number")


def _copy(pid: int, runs: Sequence[Run]) -> None:
    """Copy each run from the other process. At most _MOST_RUNS.

    Raises:
        NotAvailable: the process ended, may not be read, or has no such memory.
    """
    here = array("Q", [word for local, _, nbytes in runs for word in (local, nbytes)])
    there = array("Q", [word for _, remote, nbytes in runs for word in (remote, nbytes)])
    wanted = sum(each[2] for each in runs)
    copied = _process_vm_readv()(pid, here.buffer_info()[0], len(runs), there.buffer_info()[0], len(runs), 0)
    if copied == wanted:
        return
    number = ctypes.get_errno() if copied < 0 else 0
    if number == errno.ESRCH:
        raise NotAvailable(f"the source went away: process {pid} has ended")
    if number == errno.EPERM:
        raise NotAvailable(
            f"the kernel does not let this process read process {pid}: run both as one user with "
            "kernel.yama.ptrace_scope 0, or give CAP_SYS_PTRACE"
        )
    why = os.strerror(number) if number else f"{copied:,} of {wanted:,} bytes came"
    raise NotAvailable(f"the source's memory cannot be read, it may be ending: {why}")


def _here() -> _Endpoint:
    """This process, without a word.

    Raises:
        NotAvailable: /proc does not say who we are.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/pid")
    except OSError as exc:
        raise NotAvailable(f"/proc does not say which host this is: {exc}") from exc
    pid = os.getpid()
    return _Endpoint(kernel, f"{space.st_dev}:{space.st_ino}", pid, _started(pid), b"", 0)


def _started(pid: int) -> int:
    """When a process started, in clock ticks since the kernel did; -1 when there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return -1
    return -1 if words[0] in (b"Z", b"X") else int(words[_START_TIME])


@functools.cache
def _process_vm_readv() -> ctypes._NamedFuncPointer:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as exc:
        raise NotAvailable("this C library has no process_vm_readv") from exc
    call.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return call
