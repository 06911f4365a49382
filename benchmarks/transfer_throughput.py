"""How fast weights move from one process to another: modelexpress beside the raw ways, interleaved, bytes checked.

Every way fills the same parameters of this process, which exist and were touched, from the same memory of another
process. What is timed of modelexpress is a whole `load()`: the registry, connecting, planning, moving, checking,
confirming. Of the others it is the copy alone, with everything prepared. Each timed pass has a warm-up of its own way
right before it, and the target is spoiled in between.

Writes one JSON row a pass to benchmarks/results/transfer_throughput.jsonl, and ratios with the least and the most of
their pairs to benchmarks/results/summary.json.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import contents
import nixl
from one_pass import timed
from ratios import Ratio, add_to_summary, pairs_of, ratio_of, rows, show, show_passes
from transfer_source import REVISION, TCP_REVISION, allocate, digest_of, places_of

import modelexpress
from modelexpress.adapter import CheckpointModule, ModuleAdapter
from modelexpress.api import peer_transport
from modelexpress.config import resolve_config
from modelexpress.identity import module_identity
from modelexpress.memory import memory_at
from modelexpress.model_root import ModelRoot
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.registry.base import SourceRecord
from modelexpress.registry.open import open_registry
from modelexpress.strategies.base import LoadReport, LoadTarget
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.rdma import RdmaFromPeer
from modelexpress.stripe import Session
from modelexpress.transport import Arrived, Connection, Moved, Work

HERE = Path(__file__).parent
BLOCK_NBYTES = 16 * 1024 * 1024
Place = tuple[int, int]
Row = dict[str, object]

# name in summary.json: what is divided by the best of what. Rates, so that more is better.
RATES = {
    "peer_vs_raw_copy": ("load", ("vm_readv x1", "vm_readv x2", "memfd x1", "memfd x2")),
    "peer_verified_vs_raw_copy": ("load, verified", ("vm_readv x1", "vm_readv x2", "memfd x1", "memfd x2")),
    "peer_vs_plain_nixl": ("load", ("plain nixl",)),
    "peer_nixl_vs_plain_nixl": ("load, nixl", ("plain nixl",)),
    "peer_tcp_vs_raw_tcp": ("load, tcp", ("sockets x1", "sockets x2")),
    "peer_nixl_tcp_vs_raw_tcp": ("load, nixl over tcp", ("sockets x1", "sockets x2")),
}
# Times: less is better.
TIMES = {
    "peer_death_at_90_vs_clean": ("death at 90 %", ("two sources",)),
    "two_sources_one_slow_vs_one": ("two sources, one slow", ("one source",)),
}


class Source:
    """transfer_source.py while the block runs."""

    def __init__(self, options: argparse.Namespace, registry: str, *, raw: bool = False) -> None:
        command = [
            sys.executable,
            str(HERE / "transfer_source.py"),
            str(options.nbytes),
            str(options.tensors),
            registry,
        ]
        environment = {"UCX_NET_DEVICES": "lo", **os.environ}
        self._process = subprocess.Popen(
            [*command, "--raw"] if raw else command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the source did not become ready")
        self.said = json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Without waiting for its end: taking its memory back is the kernel's work, and not the reader's."""
        self._process.kill()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its stdin, and waits


class Target:
    """The parameters that every way fills."""

    def __init__(self, options: argparse.Namespace, digest: str) -> None:
        self.model = allocate(options.nbytes, options.tensors)
        self.places = places_of(self.model)
        self.nbytes = sum(nbytes for _, nbytes in self.places)
        self._digest = digest

    def spoil(self) -> None:
        contents.spoil(self.model.parameters())

    def check(self, way: str) -> None:
        if digest_of(self.model) != self._digest:
            raise SystemExit(f"{way} brought wrong bytes")


def load(model: CheckpointModule, registry: str, **options: object) -> LoadReport:
    """A whole load into the parameters of `model`, which stay where they are."""
    return modelexpress.load(model, "/nowhere", registry=registry, strategies="rdma", **options)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_threads(count: int, pairs: list[tuple[Place, int]], run: Callable[[int, list[tuple[Place, int]]], None]) -> None:
    """Give each of `count` threads every count-th block."""
    threads = [threading.Thread(target=run, args=(at, pairs[at::count])) for at in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


class RawWays:
    """What moves the same bytes without modelexpress. Everything but the copy is prepared here."""

    def __init__(self, source: Source, target: Target, stack: ExitStack) -> None:
        self._pid = source.pid
        self._pairs = [
            ((there + at, min(BLOCK_NBYTES, nbytes - at)), here + at)
            for (there, nbytes), (here, _) in zip(source.said["places"], target.places, strict=True)
            for at in range(0, nbytes, BLOCK_NBYTES)
        ]
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        pointer, count = ctypes.c_void_p, ctypes.c_ulong
        self._readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
        self._sockets = [
            stack.enter_context(socket.create_connection(("127.0.0.1", source.said["port"]))) for _ in range(2)
        ]
        self._shared = os.open(f"/proc/{source.pid}/fd/{source.said['shared']}", os.O_RDWR)
        stack.callback(os.close, self._shared)
        self._target = target
        self._connect_nixl(source, target)

    def _connect_nixl(self, source: Source, target: Target) -> None:
        # Without a progress thread: the copy needs none, and as nixl makes it, it takes a core from everybody.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl.nixl_agent(f"plain-{os.getpid()}", config)
        self._agent.register_memory([(address, nbytes, 0, "") for address, nbytes in target.places], "DRAM")
        peer = self._agent.add_remote_agent(bytes.fromhex(source.said["blob"]))
        here = self._agent.get_xfer_descs([(address, nbytes, 0) for address, nbytes in target.places], "DRAM")
        there = self._agent.get_xfer_descs([(address, nbytes, 0) for address, nbytes in source.said["places"]], "DRAM")
        self._handle = self._agent.initialize_xfer("READ", here, there, peer)

    def vm_readv(self, threads: int) -> None:
        def run(_: int, pairs: list[tuple[Place, int]]) -> None:
            for (there, nbytes), here in pairs:
                local, remote = array.array("Q", (here, nbytes)), array.array("Q", (there, nbytes))
                if self._readv(self._pid, local.buffer_info()[0], 1, remote.buffer_info()[0], 1, 0) != nbytes:
                    raise OSError(ctypes.get_errno(), "process_vm_readv")

        in_threads(threads, self._pairs, run)

    def memfd(self, threads: int) -> None:
        """Map the copy and move it. Mapping is a part of it: a process maps a peer's memory once, for one load."""
        mapped = mmap.mmap(self._shared, self._target.nbytes)
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        pairs: list[tuple[Place, int]] = []
        for here, nbytes in self._target.places:
            pairs += [
                ((at + block, min(BLOCK_NBYTES, nbytes - block)), here + block)
                for block in range(0, nbytes, BLOCK_NBYTES)
            ]
            at += nbytes

        def run(_: int, pairs: list[tuple[Place, int]]) -> None:
            for (there, nbytes), here in pairs:
                ctypes.memmove(here, there, nbytes)

        in_threads(threads, pairs, run)

    def sockets(self, connections: int) -> None:
        def run(at: int, pairs: list[tuple[Place, int]]) -> None:
            opened = self._sockets[at]
            for place, _ in pairs:  # all at once, so that the source never waits to be asked
                opened.sendall(array.array("Q", place))
            for (_, nbytes), here in pairs:
                view = memory_at(here, nbytes)
                while len(view):
                    view = view[opened.recv_into(view) :]

        in_threads(connections, self._pairs, run)

    def plain_nixl(self) -> None:
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            time.sleep(1e-4)
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise SystemExit(f"plain NIXL: {state}")


def ways(source: Source, target: Target, registry: str, stack: ExitStack) -> dict[str, Callable[[], object]]:
    """What is compared, by name. Ours give a report."""
    raw = RawWays(source, target, stack)

    def nixl_over_tcp() -> LoadReport:
        with environment(UCX_TLS="tcp"):
            return load(target.model, registry, revision=TCP_REVISION, transports="nixl", verify="off")

    return {
        "load": lambda: load(target.model, registry, revision=REVISION, verify="off"),
        "load, verified": lambda: load(target.model, registry, revision=REVISION),
        "load, nixl": lambda: load(target.model, registry, revision=REVISION, transports="nixl", verify="off"),
        "load, nixl over tcp": nixl_over_tcp,
        "load, tcp": lambda: load(target.model, registry, revision=TCP_REVISION, transports="tcp", verify="off"),
        "vm_readv x1": lambda: raw.vm_readv(1),
        "vm_readv x2": lambda: raw.vm_readv(2),
        "memfd x1": lambda: raw.memfd(1),
        "memfd x2": lambda: raw.memfd(2),
        "sockets x1": lambda: raw.sockets(1),
        "sockets x2": lambda: raw.sockets(2),
        "plain nixl": raw.plain_nixl,
    }


class Recorder:
    """Times passes and writes their rows."""

    def __init__(self, target: Target, write: Callable[[Row], None]) -> None:
        self.rows: list[Row] = []
        self._target = target
        self._write = write

    def time(self, way: str, run: Callable[[], object], pair: int, *, warm_up: bool = True) -> None:
        if warm_up:
            run()
        self._target.spoil()
        took = timed(run)
        found = took.said
        self._target.check(way)
        row: Row = {
            "way": way,
            "pair": pair,
            "nbytes": self._target.nbytes,
            "tensors": len(self._target.places),
            "seconds": took.seconds,
            "cpu_seconds": took.cpu_seconds,
            "gb_per_s": self._target.nbytes / took.seconds / 1e9,
            "extra_bytes": took.extra_bytes,
            "nixl": version("nixl"),
        }
        if isinstance(found, LoadReport):
            row |= {"strategy": found.strategy, "shares": found.attempts[-1].shares}
            row["attempts"] = [f"{each.strategy}: {each.outcome}" for each in found.attempts if each.outcome != "off"]
        self.rows.append(row)
        self._write(row)


class OneSlow(RdmaFromPeer):
    """Reads of the source with this pid take ten times as long as they would, as if its network were slow."""

    slow_pid = 0

    @contextmanager
    def connect(
        self, record: SourceRecord, stop: threading.Event, deadline: float, *, leased: bool = False
    ) -> Iterator[Session]:
        with super().connect(record, stop, deadline, leased=leased) as session:
            if record.pid == self.slow_pid:
                session = replace(session, connection=SlowConnection(session.connection))
            yield session


class SlowConnection(Connection):
    """Sleeps nine times as long as each chunk took."""

    def __init__(self, inner: Connection) -> None:
        self.transport = inner.transport
        self._inner = inner

    def read(
        self,
        plan: TransferPlan,
        *,
        deadline: float,
        arrived: Arrived | None = None,
        moved: Moved | None = None,
        work: Work | None = None,
    ) -> None:
        begun = time.monotonic()
        last: dict[int, float] = {}

        def late(chunk: Chunk) -> None:
            lane = threading.get_ident()
            time.sleep(9 * (time.monotonic() - last.get(lane, begun)))
            last[lane] = time.monotonic()
            if arrived is not None:
                arrived(chunk)

        self._inner.read(plan, deadline=deadline, arrived=late, moved=moved, work=work)

    def close(self) -> None:
        self._inner.close()


def load_with_one_slow(target: Target, registry: str, slow_pid: int) -> LoadReport:
    config = resolve_config({"registry": registry, "revision": REVISION})
    adapter = ModuleAdapter(None, lambda: module_identity(Path("/nowhere"), config))
    with closing(open_registry(registry, signing_key=None, timeout_s=10, lease_ttl_s=15)) as opened:
        strategy = OneSlow(
            opened,
            peer_transport(config),
            verify=config.verify,
            transfer_timeout_s=config.transfer_timeout_s,
            max_sources=config.max_sources,
            max_readers=config.max_readers,
        )
        strategy.slow_pid = slow_pid
        return LoadStrategyChain([strategy]).run(LoadTarget(adapter, ModelRoot(target.model)))


def load_with_a_death(target: Target, registry: str, victim: Source) -> LoadReport:
    """Kill a source when nine tenths of the model have arrived."""
    arrived, lock = 0, threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal arrived
        with lock:
            before, arrived = arrived, arrived + nbytes
            if before < 0.9 * target.nbytes <= arrived:
                victim.kill()

    return load(target.model, registry, revision=REVISION, progress=count)


def compare_ways(options: argparse.Namespace, folder: str, recorder_of: Callable[[Target], Recorder]) -> list[Row]:
    registry = f"file://{folder}/ways"
    with ExitStack() as stack:
        source = stack.enter_context(Source(options, registry, raw=True))
        target = Target(options, source.said["digest"])
        compared = ways(source, target, registry, stack)
        recorder = recorder_of(target)
        for pair in range(options.pairs):
            for way, run in compared.items():
                if options.ways is None or way in options.ways:
                    recorder.time(way, run, pair)
        return recorder.rows


def compare_sources(options: argparse.Namespace, folder: str, recorder_of: Callable[[Target], Recorder]) -> list[Row]:
    """What a slow and a dying source cost. Two sources stay; the third is made anew for each death."""
    registry, alone = f"file://{folder}/two", f"file://{folder}/one"
    with ExitStack() as stack:
        first = stack.enter_context(Source(options, registry))
        single = stack.enter_context(Source(options, alone))
        target = Target(options, first.said["digest"])
        recorder = recorder_of(target)
        for pair in range(options.pairs):
            with Source(options, registry) as second:
                recorder.time("two sources", lambda: load(target.model, registry, revision=REVISION), pair)
                recorder.time("one source", lambda: load(target.model, alone, revision=REVISION), pair)
                slow = partial(load_with_one_slow, target, registry, second.pid)
                recorder.time("two sources, one slow", slow, pair)
                load(target.model, registry, revision=REVISION)
                death = partial(load_with_a_death, target, registry, second)
                recorder.time("death at 90 %", death, pair, warm_up=False)
        del single
        return recorder.rows


def ratios_of(measured: list[Row]) -> dict[str, Ratio]:
    found = {}
    for table, inverted in ((RATES, False), (TIMES, True)):
        for name, (ours, others) in table.items():
            pairs = pairs_of(measured, ours, others)
            if pairs:
                found[name] = ratio_of([1 / each for each in pairs] if inverted else pairs)
    extra = [float(str(row["extra_bytes"])) / 2**20 for row in measured if "strategy" in row]
    if extra:
        found["extra_memory_mib_peer"] = ratio_of(extra)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nbytes", type=int, default=2_000_000_000)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", choices=("ways", "sources"))
    parser.add_argument("--ways", type=lambda text: set(text.split("/")), help="some of the ways, with / between")
    options = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    measured: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, rows("transfer_throughput") as write:
        if options.only != "sources":
            measured += compare_ways(options, folder, lambda target: Recorder(target, write))
        if options.only != "ways":
            measured += compare_sources(options, folder, lambda target: Recorder(target, write))
    ratios = ratios_of(measured)
    add_to_summary(ratios)
    show_passes(measured)
    show(ratios)


if __name__ == "__main__":
    main()
