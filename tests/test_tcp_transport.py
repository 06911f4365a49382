"""TcpTransport between real processes, which are killed, stopped, and asked by strangers."""

import gc
import hmac
import os
import signal
import socket
import struct
import threading
import time
from contextlib import closing, suppress

import msgspec
import numpy as np
import psutil
import pytest

from modelexpress import tcp_transport
from modelexpress.errors import NotAvailable, TransferFailed
from modelexpress.frame import framed, unframed
from modelexpress.manifest import PIECE_NBYTES, Manifest, StorageSpec
from modelexpress.plan import plan_transfer
from modelexpress.tcp_transport import TcpTransport
from tests.support.nixl_peer import Peer, manifest_over, pattern

CHUNKS = [PIECE_NBYTES] * 4


def transport_with(**options):
    return TcpTransport(**{"lanes": 2, "connect_timeout_s": 5, "listen": "127.0.0.1"} | options)


@pytest.fixture
def transport():
    with closing(transport_with()) as made:
        yield made


@pytest.fixture(scope="module")
def peer():
    """One that is only read."""
    with Peer(CHUNKS, transport="tcp") as made:
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


def endpoint_of(peer):
    return unframed(tcp_transport._MAGIC, peer.endpoint, tcp_transport._Endpoint, what="TCP transport")


def endpoint_like(peer, **changes):
    """The peer's endpoint with some fields changed, well framed."""
    return framed(tcp_transport._MAGIC, msgspec.structs.replace(endpoint_of(peer), **changes))


# Bytes that arrive


@pytest.mark.parametrize("sizes", [CHUNKS, [1], [256] * 20_000, [PIECE_NBYTES + 1, 3, 70_001]], ids=len)
def test_reads_another_process(transport, sizes):
    with Peer(sizes, transport="tcp") as peer:
        assert holds(load(transport, peer))


def test_lanes_share_the_work(transport, peer, monkeypatch):
    monkeypatch.setattr(tcp_transport, "_LANE_NBYTES", PIECE_NBYTES)
    movers, both = set(), threading.Barrier(2)

    def arrived(chunk):
        if threading.get_ident() not in movers:
            movers.add(threading.get_ident())
            both.wait(20)

    assert holds(load(transport, peer, arrived=arrived))
    assert len(movers) == 2


def test_ipv6(transport):
    source = [pattern(1, 0, 100_000)]
    try:
        registration = transport_with(listen="::1").register(manifest_over(source))
    except NotAvailable as exc:
        pytest.skip(str(exc))
    target = [np.zeros(100_000, dtype=np.uint8)]
    with closing(registration), closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan_transfer(manifest_over(source), manifest_over(target)), deadline=soon())
    assert holds(target)


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


# Sources that go away or stop


def test_a_killed_source_is_not_available(transport):
    with Peer(CHUNKS, transport="tcp") as peer:
        peer.kill()
        with pytest.raises(NotAvailable, match=r"nobody answers at 127\.0\.0\.1 port \d+: .*refused"):
            transport.connect(peer.endpoint, deadline=soon())


def test_a_source_killed_while_it_is_read(transport):
    with Peer([PIECE_NBYTES] * 16, transport="tcp") as peer:
        target = target_for(peer)
        connection = transport.connect(peer.endpoint, deadline=soon())
        with pytest.raises(TransferFailed, match=r"after \d+ of 16 chunks"):
            connection.read(plan_into(peer, target), deadline=soon(), arrived=lambda chunk: peer.kill())
        connection.close()

        before = [each.copy() for each in target]
        time.sleep(0.2)
        assert all(np.array_equal(old, new) for old, new in zip(before, target, strict=True))


def test_a_source_that_closes_and_frees_its_memory_lives_and_its_readers_fail(transport):
    """Where UCX over TCP ends the process."""
    told = []

    def close(chunk):
        if not told:  # once, whichever lane is first
            told.append(chunk)
            peer.tell("close")
            peer.tell("free")

    with Peer([PIECE_NBYTES] * 16, transport="tcp") as peer:
        with pytest.raises(TransferFailed, match="went away"):
            load(transport, peer, arrived=close)

        assert peer.tell("still here") == "still here"


def test_a_source_outlives_readers_that_vanish(transport, peer):
    for _ in range(5):
        target = target_for(peer)
        connection = transport.connect(peer.endpoint, deadline=soon())
        with pytest.raises(KeyError):
            connection.read(plan_into(peer, target), deadline=soon(), arrived=raise_key_error)
        connection.close()

    assert holds(load(transport, peer))


def raise_key_error(chunk):
    raise KeyError(chunk.nbytes)


def test_a_stopped_source_is_not_available():
    with Peer(CHUNKS, transport="tcp") as peer, closing(transport_with(connect_timeout_s=0.5)) as transport:
        peer.signal(signal.SIGSTOP)
        with pytest.raises(NotAvailable, match="stopped, overloaded or out of reach"):
            transport.connect(peer.endpoint, deadline=soon())

        peer.signal(signal.SIGCONT)
        assert holds(load(transport, peer))


def test_a_connection_that_is_not_wanted_any_more_is_given_up(transport):
    with Peer([1], transport="tcp") as peer:
        peer.signal(signal.SIGSTOP)
        stop = threading.Event()
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        started = time.monotonic()
        with pytest.raises(NotAvailable):
            transport.connect(peer.endpoint, deadline=soon(), stop=stop)
        timer.join()
        assert time.monotonic() - started < 4


def test_nothing_arrives_from_a_stopped_source_that_goes_on_after_the_deadline(transport):
    """The late write."""
    with Peer([PIECE_NBYTES] * 16, transport="tcp") as peer:
        target = target_for(peer)
        connection = transport.connect(peer.endpoint, deadline=soon())
        with pytest.raises(TransferFailed, match=r"deadline passed after \d+ of 16 chunks"):
            connection.read(plan_into(peer, target), deadline=soon(0.8), arrived=lambda _: peer.signal(signal.SIGSTOP))
        before = [each.copy() for each in target]
        assert not holds(target)

        peer.signal(signal.SIGCONT)
        time.sleep(0.5)

        assert all(np.array_equal(old, new) for old, new in zip(before, target, strict=True))


# Strangers


def shake_hands(peer, secret, *, asked=b""):
    """What a source answers to who says so; empty when it closes the connection."""
    endpoint = endpoint_of(peer)
    with socket.create_connection((endpoint.address, endpoint.port), timeout=10) as stranger:
        theirs = stranger.recv(16, socket.MSG_WAITALL)
        ours = bytes(16)
        stranger.sendall(ours + hmac.digest(secret, b"reader" + theirs + ours, "sha256"))
        proof = stranger.recv(32, socket.MSG_WAITALL)
        if not proof or not asked:
            return proof
        assert proof == hmac.digest(secret, b"source" + theirs + ours, "sha256")
        stranger.sendall(asked)
        with suppress(ConnectionError):
            return stranger.recv(64)
        return b""


def test_who_does_not_know_the_secret_gets_nothing(peer):
    assert shake_hands(peer, bytes(32)) == b""
    assert shake_hands(peer, endpoint_of(peer).secret) != b""


def test_the_proof_of_one_connection_is_no_use_on_another(peer):
    endpoint = endpoint_of(peer)
    with socket.create_connection((endpoint.address, endpoint.port), timeout=10) as first:
        nonce = first.recv(16, socket.MSG_WAITALL)
        proof = hmac.digest(endpoint.secret, b"reader" + nonce + bytes(16), "sha256")
        with socket.create_connection((endpoint.address, endpoint.port), timeout=10) as second:
            second.recv(16, socket.MSG_WAITALL)
            second.sendall(bytes(16) + proof)
            assert second.recv(32) == b""


@pytest.mark.parametrize(
    "beside",
    [
        lambda first: (first.address - 1, 1),
        lambda first: (first.address, first.nbytes + 1),
        lambda first: (first.address + first.nbytes, 1),
        lambda first: (first.address, (1 << 64) - 1),
        lambda first: (first.address, 0),
        lambda first: (0, 1),
    ],
)
def test_only_served_memory_is_sent(beside):
    with Peer([4096], transport="tcp") as peer:
        [first] = peer.manifest.storages
        secret = endpoint_of(peer).secret
        good = struct.pack("<IQQ", 1, first.address, 64)
        assert shake_hands(peer, secret, asked=good) == pattern(1, 0, 4096)[:64].tobytes()

        assert shake_hands(peer, secret, asked=struct.pack("<IQQ", 1, *beside(first))) == b""
        assert peer.tell("still here") == "still here"


def test_a_request_of_too_many_ranges_is_refused(peer):
    assert shake_hands(peer, endpoint_of(peer).secret, asked=struct.pack("<I", 0xFFFFFFFF)) == b""


def test_who_says_nothing_is_dropped_and_hinders_nobody(transport, monkeypatch):
    monkeypatch.setattr(tcp_transport, "_PROVING_S", 0.2)
    monkeypatch.setattr(tcp_transport, "_MOST_CONNECTIONS", 2)
    source = [pattern(1, 0, 1000)]
    registration = transport.register(manifest_over(source))
    endpoint = unframed(tcp_transport._MAGIC, registration.endpoint, tcp_transport._Endpoint, what="")

    silent = [socket.create_connection((endpoint.address, endpoint.port), timeout=10) for _ in range(4)]
    for each in silent:
        with suppress(ConnectionError):
            while each.recv(16):
                pass
        each.close()

    target = [np.zeros(1000, dtype=np.uint8)]
    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan_transfer(manifest_over(source), manifest_over(target)), deadline=soon())
    assert holds(target)


def test_another_process_that_listens_there_is_not_the_source(transport, peer):
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(16))
                connection.recv(48, socket.MSG_WAITALL)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(NotAvailable, match="another process listens"):
            transport.connect(endpoint_like(peer, port=impostor.getsockname()[1]), deadline=soon())
        thread.join()


@pytest.mark.parametrize(
    "changes",
    [{"address": "example.org"}, {"address": "0.0.0.0"}, {"address": "ff02::1"}, {"port": 0}, {"secret": b""}],
    ids=str,
)
def test_an_endpoint_that_names_no_host_is_refused(transport, peer, changes):
    with pytest.raises(NotAvailable, match="the source's endpoint"):
        transport.connect(endpoint_like(peer, **changes), deadline=soon())


def test_a_manifest_that_names_memory_the_source_never_registered(transport, peer):
    first = StorageSpec(peer.manifest.storages[0].nbytes, 4096, "cpu")
    lying = Manifest((first, *peer.manifest.storages[1:]), peer.manifest.tensors)
    target = target_for(peer)

    with (
        closing(transport.connect(peer.endpoint, deadline=soon())) as connection,
        pytest.raises(TransferFailed, match="the source went away"),
    ):
        connection.read(plan_transfer(lying, manifest_over(target)), deadline=soon())


def test_an_address_of_another_host_cannot_be_listened_at():
    with pytest.raises(NotAvailable, match=r"cannot listen at 192\.0\.2\.1"):
        transport_with(listen="192.0.2.1").register(Manifest((), ()))


def test_memory_of_a_device_is_left_to_other_transports(transport):
    with pytest.raises(NotAvailable, match="on cuda:0"):
        transport.register(Manifest((StorageSpec(8, 4096, "cuda:0"),), ()))


def test_nothing_is_left_after_close(peer):
    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    with closing(transport_with()) as transport:
        registration = transport.register(manifest_over([np.ones(100, dtype=np.uint8)]))
        load(transport, peer)
        with pytest.raises(KeyError):
            load(transport, peer, arrived=raise_key_error)
        transport.connect(registration.endpoint, deadline=soon())

    assert held() == before
