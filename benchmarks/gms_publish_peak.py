"""Peak memory while a loaded model moves into a memory service: never a second parameter set.

Samples, every millisecond, the anonymous memory of the publishing process plus what the service holds, over what the
process had before its model. Writes a JSON row to benchmarks/results/gms_publish_peak.jsonl.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from checkpoints import write_llama
from layout_source import build
from peer_process import PeerProcess
from ratios import rows

import modelexpress
from modelexpress.gms import client

HERE = Path(__file__).parent
SLACK = 0.05


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no RssAnon")


class Sampler:
    """The most that this process and the service used together while it ran."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = 0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.001):
            # The service's share first: what moves meanwhile is counted twice, never not at all.
            held = client.status(self._socket).used_nbytes
            self.peak = max(self.peak, held + anonymous_bytes())


def main() -> None:
    checkpoint = write_llama(HERE.parent / "demo-data" / "llama-1gb", nbytes=1_000_000_000)
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/gms/service.sock"
        service = [sys.executable, "-m", "modelexpress", "gms", "serve", "--socket", socket]
        with PeerProcess(service):
            base = anonymous_bytes()
            started = time.perf_counter()
            with Sampler(socket) as sampler:
                report = modelexpress.load(lambda: build(checkpoint), checkpoint, gms=socket, publish=True)
            seconds = time.perf_counter() - started
            held = client.status(socket).used_nbytes
    if report.model is None or not held:
        sys.exit("the model was not kept by the service")
    sizes = [each.nbytes for each in report.model.parameters()]
    allowed = sum(sizes) * (1 + SLACK) + max(64 * 1024 * 1024, *sizes)
    row = {
        "model_bytes": sum(sizes),
        "largest_storage_bytes": max(sizes),
        "peak_over_base_bytes": sampler.peak - base,
        "peak_over_model": (sampler.peak - base) / sum(sizes),
        "load_and_publish_seconds": seconds,
    }
    with rows("gms_publish_peak") as write:
        write(row)
    print(json.dumps(row))
    if row["peak_over_base_bytes"] > allowed:
        sys.exit(f"more than model + one segment + {SLACK:.0%}: {allowed:,.0f} bytes")


if __name__ == "__main__":
    main()
