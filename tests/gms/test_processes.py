"""Real processes: an engine publishes and dies, the next one imports; the service is killed and the chain goes on."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from benchmarks.peer_process import PeerProcess
from modelexpress.config import Config
from modelexpress.gms import client
from modelexpress.gms.memory import HostMemory
from modelexpress.identity import module_identity
from tests.support.safetensors_writer import raw, write_sharded

pytestmark = pytest.mark.timeout(120)

TENSORS = {f"layers.{at}.weight": raw("BF16", 64, 500, seed=at) for at in range(8)}

# What an engine does: build, load with the service configured, answer, and live on until it is killed, or exit.
ENGINE = """
import hashlib, json, signal, sys
import torch
from torch import nn
import modelexpress

checkpoint, socket, publish, rows, then = sys.argv[1:]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(500, int(rows), bias=False, dtype=torch.bfloat16) for _ in range(8))

    def forward(self, x):
        return sum(layer(x).float().nan_to_num(0).sign().sum() for layer in self.layers)

report = modelexpress.load(Model, checkpoint, gms=socket, publish=publish == "publish")
weights = hashlib.sha256(b"".join(p.detach().view(torch.uint8).numpy() for p in report.model.parameters())).hexdigest()
answer = float(report.model(torch.ones(1, 500, dtype=torch.bfloat16)))
print("ready", json.dumps({"strategy": report.strategy, "weights": weights, "answer": answer,
                           "attempts": [[a.strategy, a.outcome, a.error] for a in report.attempts]}), flush=True)
if then == "stay":
    signal.pause()
"""


@pytest.fixture
def checkpoint(tmp_path):
    return write_sharded(tmp_path / "model", {"model.safetensors": TENSORS})


@pytest.fixture
def socket(tmp_path):
    return str(tmp_path / "gms" / "service.sock")


def service(socket, *options):
    return PeerProcess([sys.executable, "-m", "modelexpress", "gms", "serve", "--socket", socket, *options])


class Engine(PeerProcess):
    def __init__(self, checkpoint, socket, publish="publish", *, rows=64, then="stay"):
        super().__init__([sys.executable, "-c", ENGINE, str(checkpoint), socket, publish, str(rows), then])

    @property
    def said(self):
        return json.loads(self.ready_line.removeprefix("ready "))


def eventually(condition, *, within_s=5):
    """A service hears of a client's end a moment later."""
    give_up = time.monotonic() + within_s
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.02)
    return condition()


def modelexpress(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "modelexpress", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_the_next_engine_imports_what_a_killed_one_published(checkpoint, socket):
    with service(socket):
        with Engine(checkpoint, socket) as first:
            oracle = first.said
            first.kill()
        with Engine(checkpoint, socket) as second:
            imported = second.said

    assert (oracle["strategy"], imported["strategy"]) == ("disk", "gms")
    assert imported["weights"] == oracle["weights"]
    assert imported["answer"] == oracle["answer"]


def test_a_replica_does_not_wait_for_a_writer_that_died(checkpoint, socket):
    """It would for `transfer_timeout_s`, five minutes here, though nobody stages any more. tests/faults, seed 14."""
    key = module_identity(checkpoint, Config()).key
    with service(socket), ExitStack() as staged:
        writer = client.open_session(client.Where(socket, key), "RW", HostMemory(), wait_s=5)
        staged.callback(writer.close)
        replica = Engine(checkpoint, socket, "import")
        replica.start()
        assert eventually(lambda: any(each.waiting for each in client.status(socket).keys), within_s=30)
        writer.close()
        with replica:
            said = replica.said

    assert [tuple(each[:2]) for each in said["attempts"][1:]] == [("gms", "unavailable"), ("disk", "loaded")]
    assert "nobody stages it" in said["attempts"][1][2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gigabyte_outlives_the_engine_that_exits(tmp_path, socket):
    rows = 125_000
    tensors = {f"layers.{at}.weight": raw("BF16", rows, 500, seed=at) for at in range(8)}
    oracle = hashlib.sha256(b"".join(each.data for each in tensors.values())).hexdigest()
    checkpoint = write_sharded(tmp_path / "model", {"model.safetensors": tensors})
    with service(socket):
        with Engine(checkpoint, socket, rows=rows, then="exit") as first:
            assert first.wait() == 0
        with Engine(checkpoint, socket, rows=rows, then="exit") as second:
            assert second.wait() == 0

    assert (first.said["strategy"], second.said["strategy"]) == ("disk", "gms")
    assert first.said["weights"] == second.said["weights"] == oracle
    assert first.said["answer"] == second.said["answer"]


def test_engines_that_start_together_load_once(checkpoint, socket):
    """The first claims, the others wait for its commit and import."""
    with service(socket), ExitStack() as engines:
        started = [Engine(checkpoint, socket) for _ in range(3)]
        for each in started:
            each.start()
        for each in started:
            engines.enter_context(each)
        strategies = sorted(each.said["strategy"] for each in started)
        assert len({each.said["weights"] for each in started}) == 1

    assert strategies == ["disk", "gms", "gms"]


def test_a_killed_service_is_a_clear_reason_and_the_chain_goes_on(checkpoint, socket):
    with service(socket) as server:
        with Engine(checkpoint, socket) as first:
            server.kill()
            with Engine(checkpoint, socket) as second:
                said = second.said
            assert first.poll() is None  # an engine on a dead service's memory lives on
            assert said["weights"] == first.said["weights"]
        with service(socket), Engine(checkpoint, socket) as third:
            assert third.said["strategy"] == "disk"

    assert said["strategy"] == "disk"
    assert said["attempts"][1][:2] == ["gms", "unavailable"]
    assert "no memory service is running" in said["attempts"][1][2]


def test_without_publish_an_engine_reads_and_leaves_nothing(checkpoint, socket):
    with service(socket):
        with Engine(checkpoint, socket, "read only") as engine:
            assert engine.said["strategy"] == "disk"
        assert eventually(lambda: client.status(socket).keys == ())


def test_a_checkpoint_published_without_an_engine_is_imported_by_one(checkpoint, socket):
    with service(socket):
        published = modelexpress("gms", "publish", checkpoint, "--socket", socket)
        with Engine(checkpoint, socket, "read only") as engine:
            said = engine.said
        listed = json.loads(modelexpress("gms", "status", "--socket", socket, "--json").stdout)
        key = listed["keys"][0]["key"]
        checked = modelexpress("gms", "check", key[:8], "--socket", socket)
        dropped = modelexpress("gms", "drop", key[:8], "--socket", socket)
        assert eventually(lambda: client.status(socket).used_nbytes == 0)
        assert client.status(socket).keys == ()

    assert published.returncode == 0, published.stderr
    assert said["strategy"] == "gms"
    assert checked.returncode == dropped.returncode == 0, checked.stderr + dropped.stderr


def test_the_quota_refuses_and_the_engine_keeps_its_weights(checkpoint, socket):
    """A32: need and quota are named, and both sides live on."""
    with service(socket, "--quota", "100000") as server:
        with Engine(checkpoint, socket) as engine:
            assert engine.said["strategy"] == "disk"
        assert eventually(lambda: client.status(socket).used_nbytes == 0)
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() == 0
    assert not os.path.exists(socket)


def test_a_missing_service_costs_milliseconds_and_one_line(checkpoint, tmp_path):
    done = modelexpress("load", checkpoint, "--gms", tmp_path / "none.sock", "--json")

    rows = json.loads(done.stdout)["attempts"]
    assert [(each["strategy"], each["outcome"]) for each in rows] == [
        ("rdma", "off"), ("gms", "unavailable"), ("disk", "loaded")
    ]  # fmt: skip
    assert rows[1]["seconds"] < 0.01


def test_a_stopped_service_costs_its_time_limit_and_no_more(checkpoint, socket):
    with service(socket) as server:
        os.kill(server.pid, signal.SIGSTOP)
        done = modelexpress("load", checkpoint, "--gms", socket, "--connect-timeout-s", "1", "--json")
        os.kill(server.pid, signal.SIGCONT)

    rows = {each["strategy"]: each for each in json.loads(done.stdout)["attempts"]}
    assert (rows["gms"]["outcome"], rows["disk"]["outcome"]) == ("failed", "loaded")
    assert rows["gms"]["seconds"] < 1 + 5


def test_a_strict_engine_starts_a_cold_host(checkpoint, socket, monkeypatch):
    monkeypatch.setenv("MX_STRICT", "true")
    with service(socket), Engine(checkpoint, socket) as first:
        assert first.said["strategy"] == "disk"
        with Engine(checkpoint, socket) as second:
            assert second.said["strategy"] == "gms"


def test_a_killed_writer_frees_its_memory_and_the_next_one_takes_over(checkpoint, socket):
    staging = [sys.executable, "-m", "tests.support.gms_process", "stage", socket, "k", "3", "1000000"]
    with service(socket):
        writer = PeerProcess(staging, ready="")
        with writer:
            assert client.status(socket).used_nbytes >= 3_000_000
            writer.kill()
        assert eventually(lambda: client.status(socket).used_nbytes == 0)


KEEPING = """
import os, subprocess, sys, tempfile
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", "/dev/shm"], check=True)
from modelexpress import api
from tests.gms.service import serving
from tests.support.safetensors_writer import raw, write_file
from tests.support.tensors import bytes_of
with tempfile.TemporaryDirectory() as folder:
    tensor = raw("U8", 100_000_000)
    file = write_file(Path(folder, "model.safetensors"), {"w": tensor})
    with serving(Path(folder, "gms.sock")) as path:
        options = {"gms": path, "revision": "r", "connect_timeout_s": 30.0}
        api.keep_checkpoint(file, **options)
        found = api.load_checkpoint(file, strategies="gms", **options).model.get_parameter("w")
        assert found.numpy().tobytes() == tensor.data
    assert os.listdir("/dev/shm") == []
print("kept")
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a /dev/shm of its own")
def test_a_small_dev_shm_does_not_matter():
    """A32: containers give 64 MB of it. Segments are memfds, which no mount bounds, and their memory is reserved."""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", KEEPING], capture_output=True, text=True, timeout=100
    )

    assert done.stdout == "kept\n", done.stderr
