"""HostTransport between real processes, which are killed, stopped, and not allowed."""

import gc
import os
import signal
import threading
import time
from contextlib import closing

import msgspec
import numpy as np
import psutil
import pytest

from modelexpress import host_transport, lanes
from modelexpress.errors import NotAvailable, RecoveryFailed, TransferFailed
from modelexpress.frame import framed, unframed
from modelexpress.host_transport import HostTransport
from modelexpress.manifest import PIECE_NBYTES, Manifest, StorageSpec
from modelexpress.plan import plan_transfer
from tests.support.nixl_peer import Peer, manifest_over, pattern

CHUNKS = [PIECE_NBYTES] * 4


@pytest.fixture
def transport():
    with closing(HostTransport(lanes=2)) as made:
        yield made


@pytest.fixture(scope="module")
def peer():
    """One that is only read."""
    with Peer(CHUNKS, transport="host") as made:
        yield made


def target_for(peer):
    return [np.zeros(each.nbytes, dtype=np.uint8) for each in peer.manifest.storages]


def plan_into(peer, target):
    return plan_transfer(peer.manifest, manifest_over(target))


def holds(target, seed=1):
    return all(np.array_equal(each, pattern(seed, at, each.nbytes)) for at, each in enumerate(target))


def soon(seconds=20.0):
    return time.monotonic() + seconds


def load(transport, peer, *, deadline=None, **options):
    target = target_for(peer)
    with closing(transport.connect(peer.endpoint, deadline=soon())) as connection:
        connection.read(plan_into(peer, target), deadline=deadline or soon(60), **options)
    return target


def endpoint_like(peer, **changes):
    """The peer's endpoint with some fields changed, well framed."""
    endpoint = unframed(host_transport._MAGIC, peer.endpoint, host_transport._Endpoint, what="host transport")
    return framed(host_transport._MAGIC, msgspec.structs.replace(endpoint, **changes))


# Bytes that arrive


@pytest.mark.parametrize("sizes", [CHUNKS, [1], [256] * 20_000, [PIECE_NBYTES + 1, 3, 70_001]], ids=len)
def test_reads_another_process(transport, sizes):
    with Peer(sizes, transport="host") as peer:
        assert holds(load(transport, peer))


def test_lanes_share_the_work(transport, peer):
    movers, both = set(), threading.Barrier(2)

    def arrived(chunk):
        if threading.get_ident() not in movers:
            movers.add(threading.get_ident())
            both.wait(20)

    assert holds(load(transport, peer, arrived=arrived))
    assert len(movers) == 2


def test_a_stopped_source_is_read(transport):
    """Nothing is asked of it."""
    with Peer(CHUNKS, transport="host") as peer:
        peer.signal(signal.SIGSTOP)
        assert holds(load(transport, peer))


def test_memory_beyond_the_target_is_small(transport, peer):
    target = target_for(peer)
    for each in target:
        each[:] = 1  # touched
    process = psutil.Process()
    before, most = process.memory_info().rss, []

    with closing(transport.connect(peer.endpoint, deadline=soon())) as connection:
        connection.read(
            plan_into(peer, target), deadline=soon(), arrived=lambda chunk: most.append(process.memory_info().rss)
        )

    assert holds(target)
    assert max(most) - before < PIECE_NBYTES


# Sources that go away


def test_a_killed_source_is_not_available(transport):
    with Peer(CHUNKS, transport="host") as peer:
        peer.kill()
        with pytest.raises(NotAvailable, match=r"went away: process \d+ has ended"):
            transport.connect(peer.endpoint, deadline=soon())


def test_a_source_killed_between_connecting_and_reading(transport):
    with (
        Peer(CHUNKS, transport="host") as peer,
        closing(transport.connect(peer.endpoint, deadline=soon())) as connection,
    ):
        target = target_for(peer)
        peer.kill()
        with pytest.raises(TransferFailed, match=r"after 0 of 4 chunks \(0.00 of 0.07 GB\)"):
            connection.read(plan_into(peer, target), deadline=soon())


def test_a_source_killed_while_it_is_read(transport):
    with Peer([PIECE_NBYTES] * 16, transport="host") as peer:
        target = target_for(peer)
        connection = transport.connect(peer.endpoint, deadline=soon())
        with pytest.raises(TransferFailed, match=r"after \d+ of 16 chunks"):
            connection.read(plan_into(peer, target), deadline=soon(), arrived=lambda chunk: peer.kill())

        before = [each.copy() for each in target]
        time.sleep(0.2)
        assert all(np.array_equal(old, new) for old, new in zip(before, target, strict=True))


@pytest.mark.parametrize("commands", [["close"], ["close", "free"]], ids=str)
def test_a_registration_closed_while_it_is_read_fails_the_read(transport, commands):
    told = []

    def close(chunk):
        if not told:  # once, whichever lane is first
            told.append(chunk)
            for each in commands:
                peer.tell(each)

    with Peer([PIECE_NBYTES] * 16, transport="host") as peer, pytest.raises(TransferFailed, match="source"):
        load(transport, peer, arrived=close)


def test_a_chunk_is_announced_only_when_the_source_was_open_after_it(transport, peer, monkeypatch):
    """The copy succeeds, and the word is gone: whatever was copied may have been changed before."""
    seen, closed = [], threading.Event()
    real = host_transport._copy

    def copy(pid, runs):
        if runs[0][2] == host_transport._PROOF_NBYTES and closed.is_set():
            raise NotAvailable("the source has closed its registration")
        real(pid, runs)

    def moved(chunk, start, nbytes):
        closed.set()

    monkeypatch.setattr(host_transport, "_copy", copy)
    with pytest.raises(TransferFailed, match="cannot be trusted after 0 of 4 chunks"):
        load(transport, peer, arrived=seen.append, moved=moved)
    assert seen == []


# Time


def test_the_deadline_ends_a_read_between_two_steps(transport, peer):
    def slowly(chunk, start, nbytes):
        time.sleep(0.02)

    with pytest.raises(TransferFailed, match=r"deadline passed after \d of 4 chunks"):
        load(transport, peer, deadline=soon(0.1), moved=slowly)


def test_a_lane_that_never_comes_back_makes_the_memory_unusable(transport, peer, monkeypatch):
    woken = threading.Event()
    monkeypatch.setattr(lanes, "GRACE_S", 0.3)
    target = target_for(peer)
    connection = transport.connect(peer.endpoint, deadline=soon())
    monkeypatch.setattr(host_transport, "_copy", lambda *_: woken.wait(60))

    with pytest.raises(RecoveryFailed, match=r"2 of 2 lanes did not come back.*must not be used again"):
        connection.read(plan_into(peer, target), deadline=soon(0.1))
    woken.set()


# Who is asked


@pytest.mark.parametrize("changes", [{"kernel": "another"}, {"processes": "4:1"}], ids=str)
def test_a_source_on_another_host_or_in_another_container(transport, peer, changes):
    with pytest.raises(NotAvailable, match="on another host, or in a container"):
        transport.connect(endpoint_like(peer, **changes), deadline=soon())


def test_a_process_number_that_was_used_again(transport, peer):
    with pytest.raises(NotAvailable, match="has ended"):
        transport.connect(endpoint_like(peer, started=1), deadline=soon())


def test_another_registration_of_the_same_process(transport, peer):
    with pytest.raises(NotAvailable, match="closed its registration, or another process"):
        transport.connect(endpoint_like(peer, proof=bytes(range(16))), deadline=soon())


def test_a_word_at_no_address(transport, peer):
    with pytest.raises(NotAvailable, match="cannot be read"):
        transport.connect(endpoint_like(peer, proof_address=4096), deadline=soon())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_process_that_may_not_be_read(transport, peer):
    """What a container without CAP_SYS_PTRACE meets."""
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            transport.connect(peer.endpoint, deadline=soon())
        except NotAvailable as exc:
            os._exit(0 if "kernel.yama.ptrace_scope 0, or give CAP_SYS_PTRACE" in str(exc) else 2)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_manifest_that_names_memory_that_is_not_there(transport, peer):
    first = StorageSpec(peer.manifest.storages[0].nbytes, 4096, "cpu")
    lying = Manifest((first, *peer.manifest.storages[1:]), peer.manifest.tensors)
    target = target_for(peer)

    with (
        closing(transport.connect(peer.endpoint, deadline=soon())) as connection,
        pytest.raises(TransferFailed, match="cannot be read"),
    ):
        connection.read(plan_transfer(lying, manifest_over(target)), deadline=soon())


def test_memory_of_a_device_is_left_to_other_transports(transport, peer):
    on_device = Manifest((StorageSpec(8, 4096, "cuda:0"),), ())
    with pytest.raises(NotAvailable, match="on cuda:0"):
        transport.register(on_device)

    lying = Manifest(tuple(StorageSpec(each.nbytes, each.address, "cuda:0") for each in peer.manifest.storages), ())
    lying = Manifest(lying.storages, peer.manifest.tensors)
    target = target_for(peer)
    with (
        closing(transport.connect(peer.endpoint, deadline=soon())) as connection,
        pytest.raises(TransferFailed, match="storage on cuda:0"),
    ):
        connection.read(plan_transfer(lying, manifest_over(target)), deadline=soon())


def test_nothing_is_left_after_close(peer):
    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    with closing(HostTransport(lanes=2)) as transport:
        transport.register(manifest_over([np.ones(100, dtype=np.uint8)]))
        load(transport, peer)
        with pytest.raises(KeyError):
            load(transport, peer, arrived=raise_key_error)

    assert held() == before


def raise_key_error(chunk):
    raise KeyError(chunk.nbytes)
