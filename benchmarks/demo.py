"""The main job, end to end: by disk, from a peer, and with the peer killed in the middle of the read.

Two checkpoints: trained weights of a speech model from a package, and a generated Llama-shaped one of about 1 GB
in 4 shards. Every loaded byte is compared with what the files hold, by a reader that is not ours.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import silero_vad, write_llama
from peer_process import PeerProcess
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

import modelexpress

DATA = Path(__file__).parent.parent / "demo-data"


def shards(checkpoint: Path) -> list[Path]:
    return [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))


def holds_the_files_bytes(report: modelexpress.LoadReport, checkpoint: Path) -> bool:
    """Whether the model has exactly the tensors of the files, byte for byte, as the reference library reads them."""
    loaded = dict(report.model.named_parameters()) if report.model is not None else {}
    seen = 0
    for file in shards(checkpoint):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                expected, found = stored.get_tensor(name), loaded[name]
                same_kind = expected.dtype == found.dtype and expected.shape == found.shape
                if not same_kind or bytes_of(expected) != bytes_of(found):
                    return False
                seen += 1
    return seen == len(loaded) > 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def by_disk(checkpoint: Path, registry: str) -> modelexpress.LoadReport:
    return modelexpress.load_checkpoint(checkpoint, registry=registry, strategies="disk")


def from_a_peer(checkpoint: Path, registry: str) -> modelexpress.LoadReport:
    with PeerProcess.serve(checkpoint, registry):
        return modelexpress.load_checkpoint(checkpoint, registry=registry, strategies="rdma,disk")


def peer_killed_mid_read(checkpoint: Path, registry: str) -> modelexpress.LoadReport:
    """SIGKILL when half of the bytes have arrived. A model of one read dies between its read and its confirmation."""
    half = sum(file.stat().st_size for file in shards(checkpoint)) // 2
    with PeerProcess.serve(checkpoint, registry) as peer:
        arrived = 0

        def kill_at_half(nbytes: int) -> None:
            nonlocal arrived
            arrived += nbytes
            if arrived >= half:
                peer.kill()

        return modelexpress.load_checkpoint(
            checkpoint, registry=registry, strategies="rdma,disk", progress=kill_at_half
        )


SCENARIOS: dict[str, tuple[Callable[[Path, str], modelexpress.LoadReport], str]] = {
    "disk": (by_disk, "disk"),
    "peer": (from_a_peer, "rdma"),
    "peer killed mid-read": (peer_killed_mid_read, "disk"),
}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    models = {
        "silero-vad (trained)": silero_vad(),
        "llama-shaped (generated)": write_llama(DATA / "llama-1gb", nbytes=1_000_000_000),
    }
    table = Table("model", "GB", "what happens", "delivered by", "GB/s", "attempts", "bytes as in the files")
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for model, checkpoint in models.items():
            for what, (run, expected) in SCENARIOS.items():
                report = run(checkpoint, f"file://{folder}/registry")
                equal = holds_the_files_bytes(report, checkpoint)
                right = right and equal and report.strategy == expected
                tried = ", ".join(f"{each.strategy}: {each.outcome}" for each in report.attempts)
                rates = (f"{report.nbytes / 1e9:.3f}", what, str(report.strategy), f"{report.gb_per_s:.2f}")
                table.add_row(model, *rates, tried, "yes" if equal else "NO")
    Console(width=max(120, Console().width)).print(table)
    if not right:
        sys.exit("a load delivered other bytes, or by another way, than it should have")


if __name__ == "__main__":
    main()
