"""How long until the weights are ready, by strategy, and where the time goes.

One generated checkpoint is loaded into fresh models of this process: from its files, from a peer process over each
transport, and from a memory service, in turns. The whole `modelexpress.load()` is timed, and the steps inside it:

| step | what |
|---|---|
| find | looks at the registry |
| build | the engine's own model, allocated and not written |
| discover | the model's tensors and their memory |
| plan | which bytes go where, and what verifies them |
| connect | reaching the source or the service |
| register | NIXL: memory that is written (in several threads; their sum) |
| transfer | from the first byte to the last word of the source; with the checks that run beside it |
| verify | checksums (in several threads; their sum), beside the transfer |
| finalize | what the engine does with a loaded model |

Usage: load_latency.py [--nbytes N] [--rounds N]. Writes one JSON row a load to benchmarks/results/load_latency.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from checkpoints import write_llama
from layout_source import build
from page_cache_state import State, put
from peer_process import PeerProcess
from ratios import Row, rows
from rich.console import Console
from rich.table import Table

import modelexpress
from modelexpress import digest, nixl_transport, peer_transport, stripe
from modelexpress.adapter import ModuleAdapter
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.strategies import gms, rdma

HERE = Path(__file__).parent
NAMED = {"revision": "r", "model_name": "m"}
STEPS: dict[str, tuple[tuple[Any, str], ...]] = {
    "find": ((rdma.RdmaFromPeer, "look"),),
    "build": ((ModuleAdapter, "initialize"),),
    "discover": ((ModuleAdapter, "manifest"),),
    "plan": ((rdma, "plan_transfer"), (digest.Verifier, "__init__")),
    "connect": ((peer_transport.PeerTransport, "connect"), (gms.GmsImport, "_ask")),
    "register": ((nixl_transport._Lane, "_register"),),
    "transfer": ((stripe.Stripe, "read"), (DiskTensors, "read"), (gms._Generation, "load")),
    "verify": ((digest.Verifier, "moved"), (digest.Verifier, "check")),
    "finalize": ((ModuleAdapter, "finalize"),),
}


class Steps:
    """Seconds that went by inside of each step, over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for step, places in STEPS.items():
                for owner, name in places:
                    original = getattr(owner, name)
                    setattr(owner, name, self._timed(step, original))
                    stack.callback(setattr, owner, name, original)
            yield

    def _timed(self, step: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it runs takes and returns
            began = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                with self._lock:
                    self.seconds[step] += time.perf_counter() - began

        return timed


def load(checkpoint: Path, strategy: str, options: dict[str, str]) -> tuple[modelexpress.LoadReport, float, Steps]:
    steps = Steps()
    with steps.watched():
        began = time.perf_counter()
        report = modelexpress.load(lambda: build(checkpoint), checkpoint, strategies=strategy, **NAMED, **options)
        seconds = time.perf_counter() - began
    return report, seconds, steps


@contextmanager
def sources(checkpoint: Path) -> Iterator[dict[str, tuple[str, dict[str, str], State | None]]]:
    """Ways to load: the strategy, its options, and the state of the page cache that it wants."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        socket, registry = f"{folder}/gms.sock", f"file://{folder}/registry"
        stack.enter_context(PeerProcess([sys.executable, "-m", "modelexpress", "gms", "serve", "--socket", socket]))
        kept = {"gms": socket, "publish": True, **NAMED}
        modelexpress.load(lambda: build(checkpoint), checkpoint, strategies="disk", **kept)
        stack.enter_context(
            PeerProcess([sys.executable, str(HERE / "layout_source.py"), str(checkpoint), registry, *NAMED.values()])
        )
        yield {
            "disk, warm": ("disk", {}, "warm"),
            "disk, cold": ("disk", {}, "cold"),
            "peer, host": ("rdma", {"registry": registry, "transports": "host"}, None),
            "peer, nixl": ("rdma", {"registry": registry, "transports": "nixl"}, None),
            "peer, tcp": ("rdma", {"registry": registry, "transports": "tcp"}, None),
            "gms": ("gms", {"gms": socket}, None),
        }


def show(measured: list[dict[str, Any]]) -> None:
    table = Table("way", "ready, s", "least", "most", *STEPS, title="medians, s")
    for way in dict.fromkeys(row["way"] for row in measured):
        of_way = [row for row in measured if row["way"] == way]
        totals = [row["seconds"] for row in of_way]
        steps = (statistics.median(row["steps"].get(step, 0.0) for row in of_way) for step in STEPS)
        cells = (statistics.median(totals), min(totals), max(totals), *steps)
        table.add_row(way, *(f"{each:.4f}" for each in cells))
    Console(width=max(160, Console().width)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nbytes", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    checkpoint = write_llama(HERE.parent / "demo-data" / f"llama-{options.nbytes}", nbytes=options.nbytes)
    measured: list[dict[str, Any]] = []
    with sources(checkpoint) as ways, rows("load_latency") as write:
        for turn in range(options.rounds + 1):  # the first warms up
            for way, (strategy, given, state) in ways.items():
                if state is not None:
                    put(sorted(checkpoint.glob("*.safetensors")), state)
                report, seconds, steps = load(checkpoint, strategy, given)
                if report.strategy != strategy:
                    raise SystemExit(f"{way} was delivered by {report.strategy}: {report.attempts}")
                row: Row = {
                    "way": way,
                    "round": turn,
                    "strategy": report.strategy,
                    "cache": state or "in memory",
                    "nbytes": report.nbytes,
                    "seconds": seconds,
                    "steps": dict(steps.seconds),
                }
                del report
                if turn:
                    write(row)
                    measured.append(dict(row))
    show(measured)


if __name__ == "__main__":
    main()
