"""Whole servers as victims: the peer of a server that loads is killed, or stopped, and goes on when the other serves.

tests/faults has many more faults, among processes that start in a second.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

import pytest

from modelexpress.api import registry_of
from modelexpress.config import Config
from tests.sglang.sources import new_registry
from tests.sglang.test_servers import NAMED, ours, reports, sources_in
from tests.support.sglang_cpu.memory import anonymous_bytes
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.nixl, pytest.mark.fleet, pytest.mark.timeout(900)]

TRANSFER_S = 10.0


def signal_when_read(server: SglangServer, reader: SglangServer, registry: str, number: int, nbytes: int) -> int:
    """Signal the scheduler that serves the weights when so many bytes of them have arrived; returns its pid."""
    reader_pid = reader.scheduler_pids()[0]
    give_up = time.monotonic() + 120
    with closing(registry_of(Config(registry=registry))) as opened:
        [record] = [each.record for each in opened.find(None)]
        assert record.pid in server.scheduler_pids()
        while not opened.readers(record) and time.monotonic() < give_up:
            time.sleep(0.002)
        before = anonymous_bytes(reader_pid)
        while opened.readers(record) and anonymous_bytes(reader_pid) < before + nbytes:
            time.sleep(0.001)
        assert opened.readers(record), "it was read to the end before it could be hit"
        os.kill(record.pid, number)
    return int(record.pid)


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_whose_peer_fails_serves_right_weights(
    transport: str, number: int, models: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With 1.5 GB over TCP. A stopped peer is left at the deadline, and when it goes on it changes nothing."""
    registry, folder = new_registry(tmp_path_factory), models("llama_large")
    over_tcp = NAMED | ({"UCX_TLS": "tcp"} if transport == "nixl" else {})
    options = {"transports": transport, "transfer_timeout_s": TRANSFER_S}
    with SglangServer(folder, *ours(registry, publish=True, **options), env=over_tcp) as peer:
        peer.wait_ready()
        wanted, checksums = peer.generate(), peer.checksums()
        with SglangServer(folder, *ours(registry, **options), env=over_tcp) as reader:
            reader.wait_log("Load weight begin", timeout_s=240)
            pid = signal_when_read(peer, reader, registry, number, 200_000_000)
            reader.wait_ready()
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
                time.sleep(2)
            found, tokens = reader.checksums(), reader.generate()
            [report] = reports(reader)

    tried = [(each["strategy"], each["outcome"]) for each in report["attempts"] if each["outcome"] != "off"]
    assert tried == [("rdma", "failed"), ("disk", "loaded")], report
    assert report["seconds"] < TRANSFER_S + 5 + report["attempts"][-1]["seconds"]
    assert (found, tokens) == (checksums, wanted)
    assert sources_in(registry) == 0
