"""Importing a model from a memory service against copying the same bytes once, and what two readers cost in memory.

An import is timed from the first message to the last tensor bound; the module is built before, on the meta device.
A copy is one thread's memcpy of the same bytes, from touched into touched memory. Imports and copies of all sizes take
turns in one process, and the bytes are checked after each import. Then two processes import and read every page:
their PSS together, over what they had before, is one copy. Needs 12 GB of memory. Writes one JSON row a size to
benchmarks/results/gms_import.jsonl.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash
from peer_process import PeerProcess
from ratios import add_to_summary, ratio_of, rows, show
from rich.console import Console
from rich.table import Table
from torch import nn

from modelexpress.adapter import ModuleAdapter
from modelexpress.gms.client import Imported, Segment, Staging, Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.weights import bind_model, contents_of, match_model, publish_model
from modelexpress.manifest import WeightsIdentity
from modelexpress.memory import memory_at

SIZES_GB = (0.25, 1.0, 4.0)
TENSORS = 300
ROUNDS = 15
SIZES_AT_MOST = 1.5  # between the slowest and the fastest size: an import looks at tensors, not at bytes
PSS_AT_MOST = 1.1  # of one copy, for two readers together
WIDTH = 1024


def build(nbytes: int, device: str) -> nn.Module:
    """300 equal layers of bfloat16."""
    rows = round(nbytes / TENSORS / WIDTH / 2)
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False, dtype=torch.bfloat16) for _ in range(TENSORS)))


def adapter_of(nbytes: int) -> ModuleAdapter:
    def identify() -> WeightsIdentity:
        ranks = dict.fromkeys(("tp_rank", "pp_rank", "ep_rank", "dp_rank"), 0)
        sizes = dict.fromkeys(("tp_size", "pp_size", "ep_size", "dp_size"), 1)
        named = dict.fromkeys(("revision", "engine", "engine_version", "dtype", "quantization"), "benchmark")
        return WeightsIdentity(model=str(nbytes), role="target", **named, **ranks, **sizes)

    return ModuleAdapter(lambda: build(nbytes, "meta"), identify)


def where(socket: str, nbytes: int) -> Where:
    return Where(socket, f"benchmark {nbytes}")


def publish(socket: str, nbytes: int) -> tuple[int, str]:
    """Put random weights into the service; returns their bytes and checksum."""
    module = build(nbytes, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in module.parameters():
            each.view(torch.int16).random_(generator=generator)
    staging = open_session(where(socket, nbytes), "RW", HostMemory(), wait_s=10)
    assert isinstance(staging, Staging)
    publish_model(staging, adapter_of(nbytes), module, kind="layout", label="bench", checksums=False, threads=1).close()
    return sum(each.nbytes for each in module.parameters()), checksum(module)


def checksum(module: nn.Module) -> str:
    digest = xxhash.xxh3_128()
    for each in module.parameters():
        digest.update(memory_at(each.data_ptr(), each.nbytes))
    return digest.hexdigest()


def import_into(module: nn.Module, at: Where, adapter: ModuleAdapter) -> Imported:
    """What is timed."""
    imported = open_session(at, "RO", HostMemory(), wait_s=0)
    assert isinstance(imported, Imported)
    segments = imported.take_segments()
    contents = contents_of(imported.body, [segment.mapping.nbytes for segment in segments])
    bind_model(contents, match_model(contents, adapter, module), segments)
    return imported


class Copy:
    """One thread's memcpy out of the service's memory, every page of both sides touched before."""

    def __init__(self, at: Where, target: mmap.mmap) -> None:
        imported = open_session(at, "RO", HostMemory(), wait_s=0)
        assert isinstance(imported, Imported)
        self._segments: tuple[Segment, ...] = imported.take_segments()
        self._target = ctypes.c_char.from_buffer(target)
        self.run()

    def run(self) -> None:
        at = ctypes.addressof(self._target)
        for segment in self._segments:
            ctypes.memmove(at, segment.mapping.address, segment.mapping.nbytes)
            at += segment.mapping.nbytes


def seconds_of(run: Any, *arguments: object) -> tuple[float, Any]:  # noqa: ANN401 - whatever it runs returns
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    result = run(*arguments)
    taken = time.perf_counter() - started
    gc.enable()
    return taken, result


class Size:
    """One size of model, published, and what was measured of it."""

    def __init__(self, socket: str, nbytes: int, target: mmap.mmap) -> None:
        self._socket = socket
        self._nbytes = nbytes
        self._where = where(socket, nbytes)
        self._published, self._expected = publish(socket, nbytes)
        self._adapter = adapter_of(nbytes)
        self._copy = Copy(self._where, target)
        self._imports: list[float] = []
        self._copies: list[float] = []

    def measure(self) -> None:
        module = build(self._nbytes, "meta")
        import_s, imported = seconds_of(import_into, module, self._where, self._adapter)
        if checksum(module) != self._expected:
            sys.exit(f"the import of {self._published:,} bytes has other bytes than were published")
        del module
        imported.close()
        copy_s, _ = seconds_of(self._copy.run)
        self._imports.append(import_s)
        self._copies.append(copy_s)

    def row(self) -> dict[str, object]:
        del self._copy  # a third that maps the pages of the two readers
        imports, copies = self._imports[1:], self._copies[1:]  # the first warms up
        return {
            "strategy": "gms",
            "nbytes": self._published,
            "tensors": TENSORS,
            "import_s": spread(imports),
            "memcpy_s": spread(copies),
            "memcpy_gb_per_s": self._published / statistics.median(copies) / 1e9,
            "ratios": [i / c for i, c in zip(imports, copies, strict=True)],
            "pss_of_two_readers": pss_of_two(self._socket, self._nbytes) / self._published,
            "cache": "published by this process, in memory",
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
        }


def spread(seconds: list[float]) -> dict[str, float]:
    return {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}


def pss_of_two(socket: str, nbytes: int) -> int:
    """What two processes that read every page have more than before they imported."""
    command = [sys.executable, __file__, "read", socket, str(nbytes)]
    with ExitStack() as stack:
        readers = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        before = [int(line_of(reader)) for reader in readers]
        for word in ("import", "measure"):
            for reader in readers:
                say(reader, word)
            after = [int(line_of(reader)) for reader in readers]
        return sum(after) - sum(before)


def line_of(reader: subprocess.Popen[str]) -> str:
    assert reader.stdout is not None
    return reader.stdout.readline()


def say(reader: subprocess.Popen[str], word: str) -> None:
    assert reader.stdin is not None
    reader.stdin.write(f"{word}\n")
    reader.stdin.flush()


def read(socket: str, nbytes: int) -> None:
    """A reader: its PSS before, when it has read every page, and when the other has, too."""
    module = build(nbytes, "meta")
    for word in ("", "import\n", "measure\n"):
        if word and sys.stdin.readline() != word:
            return
        if word == "import\n":
            import_into(module, where(socket, nbytes), adapter_of(nbytes))
            checksum(module)
        print(pss_bytes(), flush=True)
    sys.stdin.read()  # stay mapped until the other was measured, too


def pss_bytes() -> int:
    """Without files: how many processes share torch's libraries at the moment is not what is asked."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


def faults_of(measured: list[dict[str, Any]]) -> list[str]:
    faults = []
    medians = [row["import_s"]["median"] for row in measured]
    if max(medians) > SIZES_AT_MOST * min(medians):
        faults.append(
            f"imports of {TENSORS} tensors differ by {max(medians) / min(medians):.2f}; at most {SIZES_AT_MOST}"
        )
    if max(row["pss_of_two_readers"] for row in measured) > PSS_AT_MOST:
        faults.append(f"two readers take more than {PSS_AT_MOST} copies")
    return faults


def main() -> None:
    sizes_nbytes = [round(size * 1e9) for size in SIZES_GB]
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/gms.sock"
        with PeerProcess([sys.executable, "-m", "modelexpress", "gms", "serve", "--socket", socket]):
            target = mmap.mmap(-1, max(sizes_nbytes) + (1 << 30))  # segments are a little more than their tensors
            sizes = [Size(socket, nbytes, target) for nbytes in sizes_nbytes]
            for _ in range(ROUNDS + 1):
                for each in sizes:
                    each.measure()
            measured: list[dict[str, Any]] = [each.row() for each in sizes]
    with rows("gms_import") as write:
        for row in measured:
            write(row)
    table = Table("GB", "tensors", "import, ms", "memcpy, ms", "import / memcpy", "PSS of two readers, copies")
    for row in measured:
        numbers = (1e3 * row["import_s"]["median"], 1e3 * row["memcpy_s"]["median"])
        table.add_row(
            f"{row['nbytes'] / 1e9:.2f}",
            str(TENSORS),
            *(f"{number:.1f}" for number in numbers),
            f"{statistics.median(row['ratios']):.4f}",
            f"{row['pss_of_two_readers']:.3f}",
        )
    Console(width=max(120, Console().width)).print(table)
    ratios = {"gms_import_vs_memcpy": ratio_of(measured[1]["ratios"])}
    add_to_summary(ratios)
    show(ratios)
    for fault in faults_of(measured):
        print(f"missed: {fault}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(sys.argv[2], int(sys.argv[3]))
    else:
        main()
