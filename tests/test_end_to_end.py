"""Real processes, real NIXL: a checkpoint served by one process is loaded by another, or by disk when that fails."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import modelexpress
from benchmarks.peer_process import PeerProcess
from modelexpress.errors import LoadFailed
from modelexpress.registry.directory import DirectoryRegistry
from tests.support.redis_server import RedisServer
from tests.support.safetensors_writer import SIZES, Raw, raw, write_file, write_sharded
from tests.support.tensors import bytes_of

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(90)]

TENSORS = {f"layers.{at}.weight": raw("BF16", 64, 1000, seed=at) for at in range(12)}
SOURCE = Path(__file__).parent.parent / "benchmarks" / "layout_source.py"


@pytest.fixture
def registry(tmp_path):
    return f"file://{tmp_path}/registry"


@pytest.fixture
def checkpoint(tmp_path):
    names = list(TENSORS)
    shards = {
        f"model-0000{at + 1}-of-00003.safetensors": {name: TENSORS[name] for name in names[at::3]} for at in range(3)
    }
    folder = write_sharded(tmp_path / "model", shards)
    (folder / "config.json").write_text("{}")
    return folder


def loaded_bytes(report):
    return {name: bytes_of(each) for name, each in report.model.named_parameters()}


def expected(tensors=TENSORS):
    return {name: each.data for name, each in tensors.items()}


def outcomes(report):
    """What was tried; what nobody set up is "off"."""
    return [(each.strategy, each.outcome) for each in report.attempts if each.outcome != "off"]


def without_shards(checkpoint):
    """What a replica has that downloaded only the configuration."""
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    return checkpoint


def test_a_peer_delivers_what_the_files_hold(checkpoint, registry):
    with PeerProcess.serve(checkpoint, registry):
        report = modelexpress.load_checkpoint(checkpoint, registry=registry)

    assert (report.strategy, outcomes(report)) == ("rdma", [("rdma", "loaded")])
    assert loaded_bytes(report) == expected()
    assert report.nbytes == sum(len(each.data) for each in TENSORS.values())


def test_with_a_revision_the_files_need_not_exist(checkpoint, registry):
    """A35: not one shard byte is read, because there is none."""
    with PeerProcess.serve(checkpoint, registry, "--revision", "r1"):
        report = modelexpress.load_checkpoint(without_shards(checkpoint), registry=registry, revision="r1")

    assert report.strategy == "rdma"
    assert loaded_bytes(report) == expected()


def test_another_revision_is_not_served(checkpoint, registry):
    with PeerProcess.serve(checkpoint, registry, "--revision", "r1"), pytest.raises(LoadFailed, match="revision r2"):
        modelexpress.load_checkpoint(without_shards(checkpoint), registry=registry, revision="r2")


def test_another_content_is_not_served(checkpoint, registry, tmp_path):
    """Same names, same shapes, other bytes: the digest tells them apart."""
    other = {name: raw("BF16", 64, 1000, seed=100 + at) for at, name in enumerate(TENSORS)}
    file = write_file(tmp_path / "other.safetensors", other)
    with PeerProcess.serve(checkpoint, registry):
        report = modelexpress.load_checkpoint(file, registry=registry)

    assert outcomes(report) == [("rdma", "unavailable"), ("disk", "loaded")]
    assert loaded_bytes(report) == expected(other)


def test_no_registry_means_disk_and_the_report_says_so(checkpoint):
    report = modelexpress.load_checkpoint(checkpoint, strict=True)

    assert [(each.strategy, each.error) for each in report.attempts if each.outcome == "off"] == [
        ("rdma", "no registry is set"),
        ("gms", "no memory service is set"),
    ]
    assert outcomes(report) == [("disk", "loaded")]
    assert loaded_bytes(report) == expected()


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_killed_peer_is_left_for_the_next_way(checkpoint, registry, moment):
    """A21: each stage dies with another error, and none of them ends the chain."""
    with PeerProcess.serve(checkpoint, registry) as peer:
        if moment == "before":
            peer.kill()
        watcher = threading.Thread(target=kill_when_read, args=(peer, registry)) if moment == "during" else None
        if watcher is not None:
            watcher.start()
        report = modelexpress.load_checkpoint(
            checkpoint, registry=registry, progress=(lambda _: peer.kill()) if moment == "after" else None
        )
        if watcher is not None:
            watcher.join()

    assert outcomes(report)[-1] == ("disk", "loaded")
    assert outcomes(report)[0][0] == "rdma"
    assert next(each.error for each in report.attempts if each.strategy == "rdma")
    assert loaded_bytes(report) == expected()


def kill_when_read(peer, registry):
    with closing(DirectoryRegistry(Path(registry.removeprefix("file://")), signing_key=None)) as opened:
        while not any(each.readers for each in opened.find(None)):
            time.sleep(0.001)
    peer.kill()


def test_a_stopped_peer_is_left_at_the_deadline_and_cannot_write_later(checkpoint, registry, monkeypatch):
    """A20: SIGSTOP after the source was found; what wakes up later changes nothing in the accepted model."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("MX_TRANSPORTS", "nixl")  # the host's own way needs nothing of the source
    with PeerProcess.serve(checkpoint, registry) as peer:
        os.kill(peer.pid, signal.SIGSTOP)
        started = time.monotonic()
        report = modelexpress.load_checkpoint(checkpoint, registry=registry, transfer_timeout_s=4, connect_timeout_s=2)
        took = time.monotonic() - started
        os.kill(peer.pid, signal.SIGCONT)
        time.sleep(1)

        assert outcomes(report)[-1] == ("disk", "loaded")
        assert loaded_bytes(report) == expected()
        assert took < 4 + 5


def test_the_second_peer_is_tried_when_the_first_is_killed(checkpoint, registry):
    with PeerProcess.serve(checkpoint, registry) as one, PeerProcess.serve(checkpoint, registry) as two:
        killed = []

        def kill_whoever_is_read(_):
            if not killed:
                with closing(DirectoryRegistry(Path(registry.removeprefix("file://")), signing_key=None)) as opened:
                    read = next(each.record.pid for each in opened.find(None) if each.readers)
                killed.append(read)
                (one if one.pid == read else two).kill()

        report = modelexpress.load_checkpoint(checkpoint, registry=registry, progress=kill_whoever_is_read)

    assert outcomes(report) == [("rdma", "failed"), ("rdma", "loaded")]
    assert loaded_bytes(report) == expected()


def test_a_loaded_model_is_found_by_the_next_replica(checkpoint, registry):
    """A target that loaded becomes a source, in the layout it holds."""
    with PeerProcess([sys.executable, str(SOURCE), str(checkpoint), registry]):
        report = modelexpress.load_checkpoint(checkpoint, registry=registry, strategies="rdma")

    assert loaded_bytes(report) == expected()


def test_publish_true_serves_what_was_loaded_until_it_is_withdrawn(checkpoint, registry):
    first = modelexpress.load_checkpoint(checkpoint, registry=registry, publish=True)
    second = modelexpress.load_checkpoint(checkpoint, registry=registry, strategies="rdma")
    first.publication.withdraw()

    assert (first.strategy, second.strategy) == ("disk", "rdma")
    assert loaded_bytes(second) == expected()
    with pytest.raises(LoadFailed, match="no source"):
        modelexpress.load_checkpoint(checkpoint, registry=registry, strategies="rdma")


def test_two_models_load_in_one_process(checkpoint, registry, tmp_path):
    """A26: the second load meets no port, name or agent of the first."""
    other = write_file(tmp_path / "draft.safetensors", {"w": raw("F32", 10, 10)})
    with PeerProcess.serve(checkpoint, registry), PeerProcess.serve(other, registry):
        reports = [modelexpress.load_checkpoint(each, registry=registry) for each in (checkpoint, other)]

    assert [each.strategy for each in reports] == ["rdma", "rdma"]
    assert loaded_bytes(reports[0]) == expected()
    assert loaded_bytes(reports[1]) == {"w": raw("F32", 10, 10).data}


def test_every_dtype_and_odd_offsets_travel(registry, tmp_path):
    """A05, A06, A07: an unpadded header, a tensor of 3 bytes first, NaN payloads, scalars, no elements."""
    tensors = {"first": raw("U8", 3), **{f"t.{dtype}": raw(dtype, 3, 5) for dtype in SIZES}}
    tensors |= {"scalar": raw("F32"), "none": raw("BF16", 0, 8), "bool": Raw("BOOL", (3,), b"\x01\x00\x01")}
    file = write_file(tmp_path / "odd.safetensors", tensors)
    with PeerProcess.serve(file, registry, "--revision", "r1"):
        peer = modelexpress.load_checkpoint(file, registry=registry, strategies="rdma")
    disk = modelexpress.load_checkpoint(file, strategies="disk")

    assert loaded_bytes(peer) == loaded_bytes(disk) == expected(tensors)
    described = {name: (each.dtype, each.shape) for name, each in disk.model.named_parameters()}
    assert {name: (each.dtype, each.shape) for name, each in peer.model.named_parameters()} == described


def test_a_signed_fleet_ignores_an_unsigned_source(checkpoint, registry, monkeypatch):
    with PeerProcess.serve(checkpoint, registry):
        report = modelexpress.load_checkpoint(checkpoint, registry=registry, signing_key="fleet secret")
        assert outcomes(report) == [("rdma", "unavailable"), ("disk", "loaded")]
    monkeypatch.setenv("MX_SIGNING_KEY", "fleet secret")
    with PeerProcess.serve(checkpoint, registry):
        assert modelexpress.load_checkpoint(checkpoint, registry=registry).strategy == "rdma"


@pytest.mark.redis
def test_redis_works_as_the_directory_does(checkpoint, tmp_path):
    with RedisServer(tmp_path) as server, PeerProcess.serve(checkpoint, server.url, "--lease-ttl-s", "2") as peer:
        report = modelexpress.load_checkpoint(checkpoint, registry=server.url)
        peer.kill()
        time.sleep(2.5)
        later = modelexpress.load_checkpoint(checkpoint, registry=server.url)

    assert outcomes(report) == [("rdma", "loaded")]
    assert outcomes(later) == [("rdma", "unavailable"), ("disk", "loaded")]
    assert loaded_bytes(report) == loaded_bytes(later) == expected()


@pytest.mark.redis
def test_a_redis_that_is_emptied_while_a_peer_is_read_costs_no_read(checkpoint, tmp_path):
    """The source is back in it within a third of its lease. One that is killed meanwhile is not, and its bytes go."""

    def loaded(lose):
        return modelexpress.load_checkpoint(checkpoint, registry=server.url, lease_ttl_s=2, progress=lose)

    def once(*losses):
        left = list(losses)
        return lambda _: left and left.pop()()

    with (
        RedisServer(tmp_path) as server,
        PeerProcess.serve(checkpoint, server.url, "--lease-ttl-s", "2") as peer,
        closing(server.client) as client,
    ):
        report = loaded(once(client.flushall))
        later = loaded(once(client.flushall, peer.kill))

    assert outcomes(report) == [("rdma", "loaded")]
    assert outcomes(later) == [("rdma", "failed"), ("disk", "loaded")]
    assert loaded_bytes(report) == loaded_bytes(later) == expected()


def test_a_load_leaves_nothing_behind(checkpoint, registry):
    """Invariant 4: no thread, no descriptor, nothing in /dev/shm, after success and after failure."""

    def load_and_fail():
        failures = [RuntimeError("broken off")]

        def break_off_once(_):
            if failures:
                raise failures.pop()

        assert modelexpress.load_checkpoint(checkpoint, registry=registry).strategy == "rdma"
        assert modelexpress.load_checkpoint(checkpoint, registry=registry, progress=break_off_once).strategy == "disk"

    with PeerProcess.serve(checkpoint, registry):
        load_and_fail()
        before = leftovers()
        for _ in range(3):
            load_and_fail()

        assert_no_more_than(before)


def leftovers():
    """Descriptors, kernel threads, Python threads, and shared memory of this process."""
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    counts = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
    return [*counts, threading.active_count(), len(shared)]


def assert_no_more_than(before):
    """A thread that was joined may still be listed for a moment."""
    give_up = time.monotonic() + 5
    while any(now > then for now, then in zip(leftovers(), before, strict=True)) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(leftovers(), before, strict=True)), (leftovers(), before)


WITHOUT_PTRACE = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all"]
LOADING = """
import json, sys, torch, modelexpress
try:
    open(f"/proc/{sys.argv[3]}/mem", "rb").close()
    forbidden = False
except PermissionError:
    forbidden = True
report = modelexpress.load_checkpoint(sys.argv[1], registry=sys.argv[2], strategies="rdma", connect_timeout_s=20.0)
found = report.model.named_parameters()
print(json.dumps([forbidden, {name: bytes(each.view(torch.uint8).flatten().tolist()).hex() for name, each in found}]))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="takes a capability away from root")
def test_a_reader_that_may_not_look_into_other_processes_gets_the_right_bytes(registry, tmp_path):
    """A27: containers forbid cross-memory attach, which UCX takes first on one host."""
    tensors = {f"w{at}": raw("BF16", 64, 100, seed=at) for at in range(4)}
    file = write_file(tmp_path / "model.safetensors", tensors)
    with PeerProcess.serve(file, registry) as peer:
        command = [*WITHOUT_PTRACE, sys.executable, "-c", LOADING, file, registry, str(peer.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=80)

    assert done.returncode == 0, done.stderr
    forbidden, found = json.loads(done.stdout)
    assert forbidden
    assert found == {name: each.data.hex() for name, each in tensors.items()}


def test_20000_tensors_travel(registry, tmp_path):
    """A22: a mixture of experts has tens of thousands of tensors."""
    data = os.urandom(20_000 * 256)
    tensors = {f"e.{at}": Raw("U8", (256,), data[256 * at : 256 * (at + 1)]) for at in range(20_000)}
    file = write_file(tmp_path / "many.safetensors", tensors)
    with PeerProcess.serve(file, registry):
        report = modelexpress.load_checkpoint(file, registry=registry, strategies="rdma")

    assert loaded_bytes(report) == expected(tensors)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_tensor_of_3_gib_travels(registry, tmp_path):
    """A22: one read call moves at most 2,147,479,552 bytes."""
    size = 3 << 30
    header = f'{{"big":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    file = tmp_path / "big.safetensors"
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + size)
        out.seek(8 + len(header) + (1 << 31) - 3)
        out.write(b"middle")
        out.seek(-4, os.SEEK_END)
        out.write(b"last")
    with PeerProcess.serve(file, registry):
        big = modelexpress.load_checkpoint(file, registry=registry, strategies="rdma").model.get_parameter("big")

    assert bytes(big[(1 << 31) - 3 : (1 << 31) + 3].tolist()) == b"middle"
    assert bytes(big[-4:].tolist()) == b"last"
    assert int(torch.count_nonzero(big)) == 10
    shutil.rmtree(tmp_path, ignore_errors=True)
