"""Invariant 2 where breaking it ends the load: a model of more than half of the device's memory, whose first two peers
die half-way, comes from disk, and at no moment is there more than one of it.

The peers are processes that serve over NIXL from host memory. It has not run on a GPU yet; on the host the same is done
with 512 MiB. On a machine with a GPU that nobody else uses meanwhile:

pip install -e '.[nixl,dev]' && python -m pytest -m gpu tests/gpu/test_retry_memory.py
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from torch import nn

import modelexpress
from benchmarks.peer_process import PeerProcess
from modelexpress.registry.open import open_registry
from tests.support.hollow import NAMED, build, write_checkpoint, wrong_layers
from tests.support.sglang_cpu.isolated import run_isolated
from tests.support.sglang_cpu.memory import AnonymousPeak, anonymous_bytes

pytestmark = pytest.mark.nixl

SHARE = 0.55  # of the device's memory; twice that does not fit
LAYERS = 64
ON_THE_HOST_NBYTES = 512 * 1024 * 1024
# NIXL, its buffers and threads are host memory like the weights, and come with the first read.
BESIDE_WEIGHTS_ON_THE_HOST_NBYTES = 100 * 1024 * 1024


class Assassin:
    """Kills the peer that is being read each time half of the model arrived, until `deaths` have died."""

    def __init__(self, registry: str, half_nbytes: int, deaths: int) -> None:
        self.killed: list[int] = []
        self._registry = registry
        self._half_nbytes = half_nbytes
        self._deaths = deaths
        self._arrived = 0
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        """Bytes that arrived, from any thread."""
        with self._lock:
            self._arrived += nbytes
            if self._arrived >= self._half_nbytes and len(self.killed) < self._deaths:
                self._arrived = 0
                self.killed.append(self._being_read())
                os.kill(self.killed[-1], signal.SIGKILL)

    def _being_read(self) -> int:
        with closing(open_registry(self._registry, signing_key=None, timeout_s=10, lease_ttl_s=15)) as opened:
            return next(each.record.pid for each in opened.find(None) if each.readers)


def loaded(device: str, nbytes: int, checkpoint: str, registry: str) -> dict[str, object]:
    """Load in this process; how, and the most memory that it took."""
    alive: list[int] = []
    parameters: list[weakref.ref[torch.Tensor]] = []

    def initialize() -> nn.Module:
        alive.append(sum(ref() is not None for ref in parameters))
        module = build(nbytes, LAYERS, device)
        parameters[:] = [weakref.ref(each) for each in module.parameters()]
        return module

    assassin = Assassin(registry, nbytes // 2, deaths=2)

    def load() -> modelexpress.LoadReport:
        options = {"registry": registry, "verify": "off", "strategies": "rdma,disk", "transfer_timeout_s": 300, **NAMED}
        return modelexpress.load(initialize, checkpoint, progress=assassin.count, **options)

    report, peak_nbytes = _measured(load, device)
    return {
        "attempts": [(each.strategy, each.outcome) for each in report.attempts if each.outcome != "off"],
        "killed": assassin.killed,
        "alive when built": alive,
        "nbytes": report.nbytes,
        "peak": peak_nbytes,
        "wrong": wrong_layers(report.model),
    }


def _measured(load: Callable[[], modelexpress.LoadReport], device: str) -> tuple[modelexpress.LoadReport, int]:
    """What `load` gives, and the most bytes of the device's memory that this process had more than before."""
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return load(), torch.cuda.max_memory_allocated(device) - before
    before = anonymous_bytes(os.getpid())
    with AnonymousPeak(lambda: {0: os.getpid()}) as peak:
        report = load()
    return report, max(peak.peak_bytes[0], anonymous_bytes(os.getpid())) - before


def size_on(device: str) -> int:
    return ON_THE_HOST_NBYTES if device == "cpu" else int(SHARE * torch.cuda.get_device_properties(device).total_memory)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_two_dying_peers_and_then_disk_take_the_memory_of_one_model(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = size_on(device)
    checkpoint, registry = write_checkpoint(tmp_path / "hollow", nbytes, LAYERS), f"file://{tmp_path}/registry"
    peer = [sys.executable, "-m", "tests.support.hollow", str(nbytes), str(LAYERS), registry]
    with ExitStack() as running:
        with monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that UCX does not lock what they register into memory
            peers = [running.enter_context(PeerProcess(peer)) for _ in range(2)]
        found = run_isolated(loaded, device, nbytes, checkpoint, registry, timeout_s=800)
        assert sorted(found["killed"]) == sorted(each.pid for each in peers)

    assert found["attempts"] == [["rdma", "failed"], ["rdma", "failed"], ["disk", "loaded"]]
    assert found["wrong"] == []
    assert found["alive when built"] == [0, 0]
    assert 0.99 * nbytes < found["nbytes"] <= nbytes
    beside_weights_nbytes = BESIDE_WEIGHTS_ON_THE_HOST_NBYTES if device == "cpu" else 0
    assert 0.95 * found["nbytes"] <= found["peak"] <= 1.05 * found["nbytes"] + beside_weights_nbytes, found
