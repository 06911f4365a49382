"""How the work before a byte moves grows: with the tensors of a model, and with the sources in the registry.

Tensors, 1 to 100,000: a source describes and offers its model; a target decodes the offer, describes its own, plans,
and prepares to verify. Sources, 1 to 1,000: held by another process, in a directory and in a Redis server on loopback;
a target finds them all (`modelexpress sources`), looks at some (a target that waits for its turn), and leases one.

Usage: scale.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from fleet import RECORD
from msgspec.structs import replace
from peer_process import PeerProcess
from ratios import Ratio, Row, add_to_summary, ratio_of, rows, show
from redis_process import redis_server
from rich.console import Console
from rich.table import Table
from torch import nn

from modelexpress.adapter import CheckpointModule
from modelexpress.digest import Verifier, checksums_of
from modelexpress.discovery import discover, manifest_of
from modelexpress.manifest import Manifest
from modelexpress.offer import Offer, decode_offer
from modelexpress.plan import plan_transfer
from modelexpress.registry.base import Registry
from modelexpress.registry.open import open_registry
from modelexpress.strategies.turn import SAMPLE

TENSORS = (1, 10, 100, 1_000, 10_000, 20_000, 100_000)
SOURCES = (1, 10, 100, 1_000)
TENSOR_NBYTES = 256
KEY = "key"
T = TypeVar("T")


class Clock:
    """Seconds of each step, round after round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, step: str, run: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = run()
        self.seconds.setdefault(step, []).append(time.perf_counter() - started)
        return result

    def row(self) -> dict[str, float]:
        return {step: statistics.median(taken) for step, taken in self.seconds.items()}


def model_of(count: int) -> CheckpointModule:
    module = CheckpointModule()
    for number in range(count):
        name = f"model.layers.{number // 100}.experts.{number % 100}.weight"
        empty = torch.empty(TENSOR_NBYTES, dtype=torch.uint8)
        module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    return module


def described(module: CheckpointModule) -> Manifest:
    found = discover(module)
    return manifest_of(found.tensors, found.scalars)


def measure_tensors(count: int, rounds: int) -> Row:
    source, target = model_of(count), model_of(count)
    clock = Clock()
    for _ in range(rounds):
        served = clock.time("describe", partial(described, source))
        checksums = checksums_of(served, threads=1)
        offer = clock.time("offer", Offer(served, b"endpoint", checksums).encode)
        decoded = clock.time("decode", partial(decode_offer, offer))
        wanted = clock.time("describe target", partial(described, target))
        plan = clock.time("plan", partial(plan_transfer, decoded.manifest, wanted))
        clock.time("verifier", partial(Verifier, plan, decoded.checksums, "on"))
    return {"tensors": count, "offer_bytes": len(offer), "rounds": rounds, "seconds": clock.row()}


def opened(url: str) -> closing[Registry]:
    return closing(open_registry(url, signing_key=None, timeout_s=10, lease_ttl_s=600))


def hold(url: str, count: int) -> None:
    """In a process of its own: publish sources until stdin ends."""
    with opened(url) as registry:
        for number in range(count):
            registry.publish(replace(RECORD, source_id=f"{number:032x}", keys=(KEY,)), b"offer")
        print("ready", flush=True)
        sys.stdin.read()


@contextmanager
def held(url: str, count: int) -> Iterator[None]:
    with PeerProcess([sys.executable, __file__, "hold", url, str(count)], stdin=subprocess.PIPE):
        yield


def measure_sources(kind: str, url: str, count: int, rounds: int) -> tuple[Row, list[float]]:
    clock = Clock()
    with held(url, count), opened(url) as registry:
        registry.find(KEY)
        for _ in range(rounds):
            found = clock.time("find", partial(registry.find, KEY))
            if len(found) != count:
                raise RuntimeError(f"{len(found)} of {count} sources were found in {url}")
            some = clock.time("look", partial(registry.find, KEY, at_most=SAMPLE))
            clock.time("lease", partial(_lease, registry, some[0].record))
    return {"registry": kind, "sources": count, "rounds": rounds, "seconds": clock.row()}, clock.seconds["find"]


def _lease(registry: Registry, record: object) -> None:
    with registry.reading(record, lease_s=30, limit=1):  # type: ignore[arg-type]  # a record, passed through partial
        pass


def compare_tensors(rounds: int, write: Callable[[Row], None]) -> Table:
    table = Table("tensors", "offer MB", "describe", "offer", "decode", "describe target", "plan", "verifier", "sum, s")
    for count in TENSORS:
        row = measure_tensors(count, rounds)
        write(row)
        seconds = row["seconds"]
        assert isinstance(seconds, dict)
        cells = (f"{each:.4f}" for each in (*seconds.values(), sum(seconds.values())))
        table.add_row(f"{count:,}", f"{int(str(row['offer_bytes'])) / 1e6:.2f}", *cells)
    return table


def compare_sources(rounds: int, write: Callable[[Row], None]) -> tuple[Table, dict[str, Ratio]]:
    table = Table("registry", "sources", "find, ms", f"look at {SAMPLE}, ms", "lease and back, ms")
    slowest: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        redis = stack.enter_context(redis_server(Path(folder)))
        for count in SOURCES:
            for kind, url in (("directory", f"file://{folder}/{count}"), ("redis", redis)):
                row, finds = measure_sources(kind, url, count, rounds)
                write(row)
                slowest[kind] = finds
                seconds = row["seconds"]
                assert isinstance(seconds, dict)
                table.add_row(kind, f"{count:,}", *(f"{1e3 * each:.2f}" for each in seconds.values()))
    slower = max(slowest.values(), key=statistics.median)
    return table, {"registry_find_1000_ms": ratio_of([1e3 * each for each in slower])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with rows("scale") as write:
        tables = [compare_tensors(options.rounds, write)]
        table, ratios = compare_sources(options.rounds, write)
    console = Console(width=max(140, Console().width))
    for each in (*tables, table):
        console.print(each)
    add_to_summary(ratios)
    show(ratios)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hold"]:
        hold(sys.argv[2], int(sys.argv[3]))
    else:
        main()
