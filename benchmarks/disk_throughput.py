"""How fast files become parameters: modelexpress beside memcpy and beside the disk itself, interleaved, bytes checked.

Every way fills the same parameters, which exist and were touched. What is timed of modelexpress is a whole `load()`:
finding the files, reading and checking their headers, planning, reading. Warm: the files lie in the page cache, and
memcpy moves the same bytes from memory with one thread. Cold: they do not, which the kernel was asked, and the disk is
read past the page cache by the plainest loop, at several depths; the best of them counts.

Writes one JSON row a pass to benchmarks/results/disk_throughput.jsonl, and ratios to benchmarks/results/summary.json.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from checkpoints import write_300_tensors
from contents import digest_of, spoil
from one_pass import timed
from page_cache_state import State, put
from ratios import Ratio, add_to_summary, pairs_of, ratio_of, rows, show, show_passes
from safetensors import safe_open

import modelexpress
from modelexpress.adapter import CheckpointModule
from modelexpress.checkpoint.index import open_index
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.strategies.base import LoadReport

MIB = 1024 * 1024
Row = dict[str, object]
DEPTHS = ((1, 4), (2, 4), (4, 4), (8, 4), (4, 1), (8, 1))  # requests under way, MiB of each


class DiskTarget:
    """A checkpoint's files, and parameters for them that were touched. The digest is the reference library's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors"))
        self.model = CheckpointModule()
        self.model.allocate(open_index(folder).manifest)
        self.parameters = dict(sorted(self.model.named_parameters()))
        for tensor in self.parameters.values():
            tensor.zero_()
        self.nbytes = sum(tensor.nbytes for tensor in self.parameters.values())
        read: dict[str, torch.Tensor] = {}
        for path in self.files:
            with safe_open(path, "pt") as opened:
                read |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        self.digest = digest_of(read)

    def spoil(self) -> None:
        spoil(self.parameters.values())

    def check(self, way: str) -> None:
        if digest_of(self.parameters) != self.digest:
            raise SystemExit(f"{way} brought wrong bytes")


def load(target: DiskTarget) -> LoadReport:
    return modelexpress.load(target.model, target.folder, strategies="disk")


def iterate(target: DiskTarget) -> None:
    """As an engine loads: it gets each tensor and copies it."""
    for name, tensor in DiskTensors(open_index(target.folder)).tensors():
        ctypes.memmove(target.parameters[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


class Memcpy:
    """The same bytes, from memory of this process."""

    def __init__(self, target: DiskTarget) -> None:
        load(target)
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in target.parameters.values()]

    def run(self, threads: int) -> None:
        def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for to, source in pairs:
                ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)

        in_threads([lambda at=at: copy(self._pairs[at::threads]) for at in range(threads)])


def read_device(files: Sequence[Path], threads: int, block_nbytes: int) -> None:
    """Read every byte past the page cache, and leave it where it landed."""
    opened = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    blocks = iter([(fd, at) for fd in opened for at in range(0, os.fstat(fd).st_size, block_nbytes)])
    lock = threading.Lock()

    def read() -> None:
        buffer = mmap.mmap(-1, block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            os.preadv(block[0], [buffer], block[1])

    in_threads([read] * threads)
    for fd in opened:
        os.close(fd)


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


class Recorder:
    """Times passes and writes their rows."""

    def __init__(self, target: DiskTarget, write: Callable[[Row], None]) -> None:
        self.rows: list[Row] = []
        self._target = target
        self._write = write

    def time(self, way: str, run: Callable[[], object], pair: int, state: State, *, fills: bool = True) -> None:
        """One pass, after a pass of the same way where that does not change what is in memory."""
        if state == "warm":
            run()
        self._target.spoil()
        share = put(self._target.files, state)
        took = timed(run)
        if fills:
            self._target.check(way)
        self.add({
            "way": way, "state": state, "share_in_memory": share, "pair": pair, "nbytes": self._target.nbytes,
            "tensors": len(self._target.parameters), "seconds": took.seconds, "cpu_seconds": took.cpu_seconds,
            "gb_per_s": self._target.nbytes / took.seconds / 1e9, "extra_bytes": took.extra_bytes,
            "torch": torch.__version__, "strategy": took.said.strategy if isinstance(took.said, LoadReport) else None,
        })  # fmt: skip

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write(row)


def measure(target: DiskTarget, recorder: Recorder, pairs: int) -> None:
    memcpy = Memcpy(target)
    for pair in range(pairs):
        recorder.time("load", lambda: load(target), pair, "warm")
        recorder.time("memcpy x1", lambda: memcpy.run(1), pair, "warm")
        recorder.time("memcpy x2", lambda: memcpy.run(2), pair, "warm")
        recorder.time("iterator", lambda: iterate(target), pair, "warm")
        recorder.time("load", lambda: load(target), pair, "cold")
        for depth, mib in DEPTHS:
            way = f"device {depth} x {mib} MiB"
            recorder.time(way, lambda d=depth, m=mib: read_device(target.files, d, m * MIB), pair, "cold", fills=False)
        recorder.time("iterator", lambda: iterate(target), pair, "cold")


def ratios_of(recorded: Sequence[Row]) -> dict[str, Ratio]:
    devices = [f"device {depth} x {mib} MiB" for depth, mib in DEPTHS]
    extra = [float(str(row["extra_bytes"])) / 2**20 for row in recorded if row["way"] in ("load", "iterator")]
    return {
        "disk_warm_vs_memcpy": ratio_of(pairs_of(recorded, "load", ["memcpy x1"], state="warm")),
        "disk_cold_vs_device": ratio_of(pairs_of(recorded, "load", devices, state="cold")),
        "extra_memory_mib_disk": ratio_of(extra),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("demo-data/300-tensors"), help="written where it is not")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    target = DiskTarget(write_300_tensors(options.folder))
    with rows("disk_throughput") as write:
        recorder = Recorder(target, write)
        measure(target, recorder, options.pairs)
    found = ratios_of(recorder.rows)
    add_to_summary(found)
    show_passes(recorder.rows)
    show(found)


if __name__ == "__main__":
    main()
