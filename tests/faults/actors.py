"""The processes of a run: each is forked from one that has imported torch and done nothing, and talks by a pipe.

A source, a target, a memory service, a relay, or somebody who writes to a full disk. They use modelexpress as its
users do; nothing in it knows that it is being tested. A target stands still where the run wants it to: in the function
that builds its model, or in its progress callback.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modelexpress
from modelexpress.checkpoint.checksums import write_checksums
from modelexpress.checkpoint.index import open_index
from modelexpress.errors import LoadFailed, ModelExpressError
from modelexpress.gms import archive
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.server import GmsServer
from tests.faults import cell

_SETTLE_S = 5.0  # for threads that end, and sockets that close

Message = dict[str, Any]


class Died(Exception):
    """A process ended before it said what was waited for."""


class Silent(Exception):
    """A process said nothing for as long as it may take."""


class Pipe:
    """JSON messages between two processes."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: object) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises Died when the other end closed, and Silent."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                raise Silent(f"nothing was said for {timeout_s} s")
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise Died
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found: Message = json.loads(line)
        return found

    def close(self) -> None:
        self._socket.close()


class Actor:
    """A process of the run, as the director sees it.

    Args:
        others: whose pipes the new process must not keep open.
    """

    def __init__(
        self, name: str, act: Callable[..., None], *args: object, log: Path, others: list[Actor], **options: object
    ) -> None:
        ours, theirs = socket.socketpair()
        self.name = name
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for each in others:
                each.pipe.close()
            ours.close()
            _become(name, log, lambda: act(Pipe(theirs), *args, **options))
        theirs.close()
        self.pipe = Pipe(ours)
        others.append(self)

    def signal(self, number: int) -> None:
        if self.running:
            os.kill(self.pid, number)

    @property
    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, as subprocess has it; None where it does not end."""
        give_up = time.monotonic() + timeout_s
        while self.running and time.monotonic() < give_up:
            time.sleep(0.005)
        return self.code

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait(10)


def _become(name: str, log: Path, act: Callable[[], None]) -> None:
    """The life of a forked process: never returns."""
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(message)s", force=True)
        act()
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def layers(spec: Mapping[str, tuple[str, tuple[int, ...]]]) -> nn.Module:
    """A module with a parameter for each (dtype, shape) of a checkpoint, not yet written."""
    module = nn.Module()
    for name, (dtype, shape) in spec.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def digests(module: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bytes."""
    return {
        name: hashlib.sha256(each.detach().view(torch.uint8).numpy().data).hexdigest()
        for name, each in module.named_parameters()
    }


# The source


def source(pipe: Pipe, spec: Any, checkpoint: str, *, kind: str, options: Message, network: int | None) -> None:
    """Serves a checkpoint's weights until it is told to stop."""
    _move_to(network, options)
    clock = options.pop("clock", None)
    if clock is not None:
        cell.shift_clock(clock)
    with ExitStack() as serving:
        try:
            if kind == "checkpoint":
                served = serving.enter_context(modelexpress.serve_checkpoint(checkpoint, **options))
            else:
                files = {name: options[name] for name in ("revision", "model_name") if name in options}
                loaded = modelexpress.load(lambda: layers(spec), checkpoint, strategies="disk", **files)
                assert loaded.model is not None
                served = serving.enter_context(modelexpress.publish(loaded.model, checkpoint, **options))
        except ModelExpressError as exc:
            pipe.send(error=type(exc).__name__, text=str(exc))
            return
        pipe.send(ready=served.record.name)
        with suppress(Died):
            pipe.receive()


def _move_to(network: int | None, options: Message) -> None:
    if network is not None:
        cell.enter(f"/proc/{network}/ns/net", cell.CLONE_NEWNET)
    os.environ.update(options.pop("environ", {}))
    if options.pop("wired", False):
        cell.show_network()


# The target


class _Holding:
    """Stops a target at one moment, until the director says "go"."""

    def __init__(self, pipe: Pipe, event: str, nbytes: int) -> None:
        self.held_s = 0.0
        self.seen = 0
        self._pipe = pipe
        self._event = event
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._done = False

    def at(self, event: str) -> None:
        with self._lock:
            if self._done or event != self._event:
                return
            self._done = True
            began = time.monotonic()
            self._pipe.send(at=event, seen=self.seen)
            self._pipe.receive()
            self.held_s += time.monotonic() - began

    def progress(self, nbytes: int) -> None:
        self.seen += nbytes
        if self.seen >= self._nbytes:
            self.at("bytes")


def target(pipe: Pipe, spec: Any, checkpoint: str, *, event: str, at_nbytes: int, options: Message) -> None:
    """Loads once, and says what came of it and what it holds before, after, and when the model is gone."""
    _move_to(None, options)
    clock = options.pop("clock", None)
    if clock is not None:
        cell.shift_clock(clock)
    _warm_up(options)
    before = _census()
    reset_peak()
    base = peak_nbytes()
    pipe.send(ready=True, census=before)
    pipe.receive()
    holding = _Holding(pipe, event, at_nbytes)
    built: list[nn.Module] = []

    def build() -> nn.Module:
        holding.at("built")
        built.append(layers(spec))
        return built[0] if len(built) == 1 else built.pop()

    began = time.monotonic()
    said: Message = {}
    report = None
    try:
        report = modelexpress.load(build, checkpoint, progress=holding.progress, **options)
        said = {"report": json.loads(report.to_json()), "same_root": report.model is built[0]}
    except LoadFailed as exc:
        said = {"error": "LoadFailed", "text": str(exc), "report": json.loads(exc.report.to_json())}
    except Exception as exc:
        traceback.print_exc()
        said = {"error": type(exc).__name__, "text": str(exc), "ours": isinstance(exc, ModelExpressError)}
    said |= {"seconds": time.monotonic() - began, "held_s": holding.held_s, "peak": peak_nbytes() - base}
    said["digests"] = digests(report.model) if report is not None and report.model is not None else None
    pipe.send(result=said)
    with suppress(Died):
        while pipe.receive().get("say") == "again":
            pipe.send(digests=digests(report.model) if report is not None and report.model is not None else None)
    if report is not None and report.publication is not None:
        report.publication.withdraw()
    del report
    built.clear()
    pipe.send(census=_settled(before))
    with suppress(Died):
        pipe.receive()  # the director looks, too


def _warm_up(options: Message) -> None:
    """Have the libraries open what they keep open, so that it is there before it is counted."""
    _ = torch.ones(1 << 16).sum()
    transports = options.get("transports", "host")
    if not options.get("registry"):
        return
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.ones(1024), requires_grad=False))
    registry = f"file://{os.getcwd()}/warm-up-{os.getpid()}"
    shared = {"registry": registry, "revision": "warm", "transports": transports}
    with modelexpress.publish(model, "/nowhere", **shared):
        modelexpress.load(lambda: _copy_of(model), "/nowhere", strategies="rdma", **shared)
    os.rmdir(registry.removeprefix("file://"))


def _copy_of(model: nn.Module) -> nn.Module:
    copy = nn.Module()
    copy.register_parameter("w", nn.Parameter(torch.zeros_like(model.w), requires_grad=False))
    return copy


def census(pid: int | str = "self") -> dict[str, list[str]]:
    """What a process holds: descriptors, threads, mappings of shared memory. As /proc says, from within or without."""
    fds = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            fds.append(os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0])
    threads = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            threads.append(Path(f"/proc/{pid}/task/{task}/comm").read_text().strip())
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm" in line or "memfd:" in line or "SYSV" in line]
    return {"descriptors": sorted(fds), "threads": sorted(threads), "shared memory": sorted(shared)}


def _census() -> dict[str, list[str]]:
    gc.collect()
    found = census()
    found["python threads"] = sorted(each.name for each in threading.enumerate())
    return found


def _settled(before: Mapping[str, list[str]]) -> dict[str, list[str]]:
    give_up = time.monotonic() + _SETTLE_S
    while (now := _census()) != before and time.monotonic() < give_up:
        if all(len(now[what]) <= len(before[what]) for what in before):
            break
        time.sleep(0.05)
    return now


def reset_peak() -> None:
    """Let the peak of this process's memory begin at what it is now: proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    """The most memory that this process had since then."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


# The others


def service(pipe: Pipe, path: str) -> None:
    """A memory service until SIGTERM."""
    with GmsServer(path, HostMemory(), quota_nbytes=None) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        pipe.send(ready=True)
        server.serve_forever()


def network(pipe: Pipe) -> None:
    """Keeps a network alive, in which nothing runs yet; two ports only, so that who comes back has the same."""
    cell.unshare(cell.CLONE_NEWNET)
    pipe.send(ready=True)
    with suppress(Died):
        pipe.receive()


def relay(pipe: Pipe, port: int) -> None:
    """Moves bytes between whoever connects and a port of loopback, until it is told to drop them or to keep them."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(ready=True, port=listener.getsockname()[1])
    pairs: dict[socket.socket, socket.socket] = {}
    moving = True
    while True:
        readable, _, _ = select.select([pipe, *((listener, *pairs) if moving else ())], [], [])
        if pipe in readable:
            try:
                said = pipe.receive()["say"]
            except Died:
                return
            moving = said == "move"
            if said == "drop":
                _reset_all(pairs)
                moving = True
            pipe.send(done=said)
            continue
        for each in readable:
            if each is listener:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:
                    near.close()
                    continue
                pairs |= {near: far, far: near}
            elif each in pairs:
                _move(each, pairs)


def _move(each: socket.socket, pairs: dict[socket.socket, socket.socket]) -> None:
    other = pairs[each]
    try:
        data = each.recv(1 << 16)
        if data:
            other.sendall(data)
            return
    except OSError:
        pass
    for end in (each, other):
        pairs.pop(end, None)
        end.close()


def _reset_all(pairs: dict[socket.socket, socket.socket]) -> None:
    for each in list(pairs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
        each.close()
    pairs.clear()


def writes(pipe: Pipe, what: str, *, path: str, folder: str) -> None:
    """Saves a memory service to a folder, or records the checksums of one; says what was raised."""
    try:
        if what == "save":
            archive.save(path, folder, backend=HostMemory(), threads=2)
        else:
            write_checksums(open_index(folder), threads=2)
    except Exception as exc:
        pipe.send(error=type(exc).__name__, text=str(exc), ours=isinstance(exc, ModelExpressError))
        return
    pipe.send(error=None)
