"""Peak memory of a load whose first two peers die half-way, against that of a clean load.

Each load runs in a process of its own; its peak is VmHWM, which the kernel keeps. The peers serve the model's
layout, so that their half-written bytes force the rebuild for which a second parameter set would be needed.
Writes one JSON row a run to benchmarks/results/retry_peak_memory.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from checkpoints import write_llama
from layout_source import build
from one_pass import peak_bytes
from peer_process import PeerProcess
from ratios import add_to_summary, ratio_of, rows, show
from rich.console import Console
from rich.table import Table
from torch import nn

import modelexpress
from modelexpress.registry.open import open_registry

HERE = Path(__file__).parent
DYING = "two dying peers, then disk"
CASES = ("disk", "one peer", DYING)


def measure(case: str, checkpoint: Path, registry: str) -> dict[str, object]:
    """Load once in this process and say what it took."""
    count = {"disk": 0, "one peer": 1}.get(case, 2)
    command = [sys.executable, str(HERE / "layout_source.py"), str(checkpoint), registry]
    built = 0

    def initialize() -> nn.Module:
        nonlocal built
        built += 1
        return build(checkpoint)

    with ExitStack() as stack:
        peers = [stack.enter_context(PeerProcess(command)) for _ in range(count)]
        assassin = Assassin(peers, registry, checkpoint) if case == DYING else None
        report = modelexpress.load(
            initialize,
            checkpoint,
            progress=assassin.count if assassin is not None else None,
            registry=registry if count else None,
            strategies="rdma,disk" if count else "disk",
        )
    return {
        "case": case,
        "strategy": report.strategy,
        "attempts": [f"{each.strategy}: {each.outcome}" for each in report.attempts],
        "models_built": built,
        "nbytes": report.nbytes,
        "peak_bytes": peak_bytes(),
        "torch": torch.__version__,
    }


class Assassin:
    """Kills a peer that is being read when half of the model has arrived, and the other at nine tenths."""

    def __init__(self, peers: list[PeerProcess], registry: str, checkpoint: Path) -> None:
        self._registry = registry
        nbytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        self._plan = [(0.5 * nbytes, peers), (0.9 * nbytes, peers)]
        self._arrived = 0
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._arrived += nbytes
            if self._plan and self._arrived >= self._plan[0][0]:
                _, peers = self._plan.pop(0)
                read = self._being_read()  # with one that was killed, as long as its record stands
                victim = next(peer for peer in peers if peer.pid in read and peer.poll() is None)
                victim.kill()

    def _being_read(self) -> set[int]:
        with closing(open_registry(self._registry, signing_key=None, timeout_s=10, lease_ttl_s=15)) as opened:
            return {each.record.pid for each in opened.find(None) if each.readers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    checkpoint = write_llama(HERE.parent / "demo-data" / "llama-1gb", nbytes=1_000_000_000)
    measured: list[dict[str, Any]] = []
    with rows("retry_peak_memory") as write:
        for pair in range(options.pairs):
            for case in CASES:
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, case, str(checkpoint), f"file://{folder}/registry"]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                measured.append(json.loads(done.stdout) | {"pair": pair})
                write(measured[-1])
                if case == DYING and measured[-1]["strategy"] != "disk":
                    raise SystemExit(f"a peer was not killed in time: {measured[-1]['attempts']}")
    table = Table("case", "delivered by", "attempts", "models built", "peak GB")
    for row in measured[: len(CASES)]:
        cells = (
            row["strategy"],
            ", ".join(row["attempts"]),
            str(row["models_built"]),
            f"{row['peak_bytes'] / 1e9:.3f}",
        )
        table.add_row(row["case"], *cells)
    Console(width=max(140, Console().width)).print(table)
    _, clean, dying = ([row["peak_bytes"] for row in measured if row["case"] == case] for case in CASES)
    ratios = {"retry_peak_vs_clean": ratio_of([each / one for each, one in zip(dying, clean, strict=True)])}
    add_to_summary(ratios)
    show(ratios)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
    else:
        main()
