"""Processes that a soaking process starts, ends and starts again: sources, and a memory service.

They come from one server that has imported everything, 30 ms each.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import xxhash
from torch import nn

import modelexpress
from modelexpress import tcp_transport
from modelexpress.errors import ModelExpressError
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.server import GmsServer

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["modelexpress.nixl_transport", __name__])

TRANSPORTS = "host,nixl,tcp"
_READY_S = 60.0


def digest_of(model: nn.Module) -> str:
    """Of names and bytes of all parameters."""
    found = xxhash.xxh3_128()
    for name, each in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(each.detach().view(torch.uint8).numpy())
    return found.hexdigest()


class Helper:
    """A process that said it is ready; `again` ends it with SIGKILL and starts another like it."""

    def __init__(self, run: Callable[..., None], *arguments: object) -> None:
        self._run = run
        self._arguments = arguments
        self._start()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def _start(self) -> None:
        self.pipe, theirs = FORKING.Pipe()
        self._process = FORKING.Process(target=self._run, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.said = self.hear()

    def hear(self) -> object:
        if not self.pipe.poll(_READY_S):
            raise TimeoutError(f"{self._run.__name__} said nothing for {_READY_S:g} s")
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if not self.pipe.closed:
            self._process.kill()
            self._process.join(_READY_S)
            self._process.close()
            self.pipe.close()

    def again(self) -> None:
        self.kill()
        self._start()


def source(pipe: Connection, checkpoint: str, registry: str, wrong: bool) -> None:
    """Loads from disk and serves; `wrong` flips a bit after the checksums were made."""
    report = modelexpress.load_checkpoint(
        checkpoint,
        strategies="disk",
        registry=registry,
        publish=True,
        revision="r",
        transports=TRANSPORTS,
        lease_ttl_s=2.0,
    )
    assert report.model is not None
    assert report.publication is not None
    if wrong:
        weight = next(iter(report.model.parameters())).detach().flatten().view(torch.uint8)
        weight[len(weight) // 2] ^= 1
    pipe.send(report.publication.record.name)
    pipe.poll(None)


def infer(pipe: Connection, checkpoint: str, registry: str, transport: str, most_connections: int) -> None:
    """Serves, and does a piece of work of its own in a loop; `times` is answered with what each took since the last."""
    tcp_transport._MOST_CONNECTIONS = most_connections
    report = modelexpress.load_checkpoint(
        checkpoint, strategies="disk", registry=registry, publish=True, revision="r", transports=transport
    )
    assert report.publication is not None
    torch.set_num_threads(1)
    one = torch.ones(256, 256)
    times: list[float] = []
    pipe.send(report.publication.record.name)
    while True:
        began = time.perf_counter()
        one @ one
        times.append(time.perf_counter() - began)
        time.sleep(0.001)
        if pipe.poll():
            if pipe.recv() == "end":
                break
            pipe.send(times)
            times = []
    report.publication.withdraw()
    pipe.send("withdrawn")


def readers(pipe: Connection, checkpoint: str, registry: str, transport: str, count: int) -> None:
    """Loads in `count` threads at once when it is told to; says what each got, or why it did not."""

    def load(_: int) -> tuple[str, float]:
        began = time.perf_counter()
        try:
            report = modelexpress.load_checkpoint(
                checkpoint, strategies="rdma", registry=registry, revision="r", transports=transport, threads=1
            )
        except ModelExpressError as exc:
            return str(exc), time.perf_counter() - began
        assert report.model is not None
        return digest_of(report.model), time.perf_counter() - began

    with ThreadPoolExecutor(count) as pool:
        pipe.send("there")
        pipe.recv()
        pipe.send(list(pool.map(load, range(count))))
        pipe.poll(None)


def service(pipe: Connection, path: str) -> None:
    """A memory service on the host."""
    Path(path).unlink(missing_ok=True)
    with GmsServer(Path(path), HostMemory(), quota_nbytes=None, frame_timeout_s=5.0) as server:
        pipe.send("serving")
        server.serve_forever()
