"""What a peer load costs before a byte moves: describing, offering, decoding and planning, by the number of tensors.

Writes one JSON row a size to benchmarks/results/control_work.jsonl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from modelexpress.adapter import CheckpointModule
from modelexpress.digest import Verifier, checksums_of
from modelexpress.discovery import discover, manifest_of
from modelexpress.manifest import Manifest
from modelexpress.offer import Offer, decode_offer
from modelexpress.plan import plan_transfer

RESULTS = Path(__file__).parent / "results" / "control_work.jsonl"
TENSOR_NBYTES = 256
ROUNDS = 5
T = TypeVar("T")


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


class Clock:
    """The fastest of several rounds of each step, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, step: str, run: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = run()
        taken = time.perf_counter() - started
        self.seconds[step] = min(taken, self.seconds.get(step, taken))
        return result


def measure(count: int) -> dict[str, object]:
    source, target = model_of(count), model_of(count)
    clock = Clock()
    for _ in range(ROUNDS):
        served = clock.time("describe", partial(described, source))
        checksums = checksums_of(served, threads=1)
        offer = clock.time("offer", Offer(served, b"endpoint", checksums).encode)
        decoded = clock.time("decode", partial(decode_offer, offer))
        wanted = described(target)
        plan = clock.time("plan", partial(plan_transfer, decoded.manifest, wanted))
        clock.time("verifier", partial(Verifier, plan, decoded.checksums, "on"))
    return {"tensors": count, "offer_bytes": len(offer), "rounds": ROUNDS, "seconds_min": clock.seconds}


def main() -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    table = Table("tensors", "offer MB", "describe", "offer", "decode", "plan", "verifier", "sum of the fastest, s")
    with RESULTS.open("a") as out:
        for count in (300, 20_000, 100_000):
            row = measure(count)
            out.write(json.dumps(row) + "\n")
            seconds = row["seconds_min"]
            assert isinstance(seconds, dict)
            cells = (f"{each:.3f}" for each in (*seconds.values(), sum(seconds.values())))
            table.add_row(f"{count:,}", f"{int(str(row['offer_bytes'])) / 1e6:.2f}", *cells)
    Console(width=max(120, Console().width)).print(table)


if __name__ == "__main__":
    main()
