"""What every transport does, on real bytes. The oracle is made here, by `pattern`."""

import ctypes
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from modelexpress.errors import NotAvailable, TransferFailed
from modelexpress.host_transport import HostTransport
from modelexpress.manifest import PIECE_NBYTES, Manifest
from modelexpress.peer_transport import PeerTransport
from modelexpress.plan import plan_transfer
from modelexpress.tcp_transport import TcpTransport
from modelexpress.transport import LocalTransport, Work
from tests.support.nixl_peer import manifest_over, pattern

SIZES = [1, 3, 4096, 65537, 1_000_003]
GUARD = 64


def local_transport():
    return LocalTransport()


def nixl_transport():
    pytest.importorskip("nixl")
    from modelexpress.nixl_transport import NixlTransport

    return NixlTransport(lanes=2, connect_timeout_s=2)


def host_transport():
    return HostTransport(lanes=2)


def tcp_transport():
    return TcpTransport(lanes=2, connect_timeout_s=2, listen="127.0.0.1")


def peer_transport():
    return PeerTransport({"host": host_transport})


def both_transports():
    return PeerTransport({"host": host_transport, "nixl": nixl_transport})


def second_of_two():
    """The source offers itself by both, and the first does not reach it."""

    class Unreachable(HostTransport):
        def connect(self, endpoint, *, deadline, stop=None):
            raise NotAvailable("not from here")

    return PeerTransport({"host": lambda: Unreachable(lanes=1), "nixl": nixl_transport})


with_nixl = [pytest.param(each, marks=pytest.mark.nixl) for each in (nixl_transport, both_transports, second_of_two)]


@pytest.fixture(params=[local_transport, host_transport, tcp_transport, peer_transport, *with_nixl])
def transport(request):
    with closing(request.param()) as made:
        yield made


class Model:
    """Arrays of known bytes, each between guard bytes that nobody may touch."""

    def __init__(self, sizes, seed):
        self._whole = [np.full(nbytes + 2 * GUARD, 0xEE, dtype=np.uint8) for nbytes in sizes]
        self.arrays = [each[GUARD:-GUARD] for each in self._whole]
        for at, each in enumerate(self.arrays):
            each[:] = pattern(seed, at, each.nbytes)
        self.manifest = manifest_over(self.arrays)

    def holds(self, seed):
        return all(np.array_equal(each, pattern(seed, at, each.nbytes)) for at, each in enumerate(self.arrays))

    def guards_stand(self):
        return all((each[:GUARD] == 0xEE).all() and (each[-GUARD:] == 0xEE).all() for each in self._whole)


def soon(seconds=30.0):
    return time.monotonic() + seconds


def test_every_byte_arrives_and_no_other(transport):
    source, target = Model(SIZES, seed=1), Model(SIZES, seed=2)
    registration = transport.register(source.manifest)

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan_transfer(source.manifest, target.manifest), deadline=soon())

    assert target.holds(seed=1)
    assert target.guards_stand()
    assert source.holds(seed=1)


def test_each_chunk_is_announced_once_when_it_is_in_place(transport):
    source, target = Model([2 * PIECE_NBYTES + 5, 100], seed=1), Model([2 * PIECE_NBYTES + 5, 100], seed=2)
    plan = plan_transfer(source.manifest, target.manifest)
    registration = transport.register(source.manifest)
    seen = []

    def arrived(chunk):
        for part in chunk.ranges:
            there = ctypes.string_at(plan.source_address(part), part.nbytes)
            assert ctypes.string_at(plan.target_address(part), part.nbytes) == there
        seen.append(chunk)

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan, deadline=soon(), arrived=arrived)

    assert sorted(chunk.pieces[0][0] for chunk in seen) == [chunk.pieces[0][0] for chunk in plan.chunks]


def test_steps_cover_each_chunk_in_order_before_it_is_announced(transport):
    sizes = [2 * PIECE_NBYTES + 5, 100, 100]
    source, target = Model(sizes, seed=1), Model(sizes, seed=2)
    plan = plan_transfer(source.manifest, target.manifest)
    registration = transport.register(source.manifest)
    steps, seen = {}, []

    def moved(chunk, start, nbytes):
        assert start == steps.get(chunk.pieces[0][0], 0)
        steps[chunk.pieces[0][0]] = start + nbytes

    def arrived(chunk):
        seen.append(chunk)
        assert steps.get(chunk.pieces[0][0], chunk.nbytes) == chunk.nbytes

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan, deadline=soon(), arrived=arrived, moved=moved)

    assert len(seen) == len(plan.chunks)
    assert target.holds(seed=1)


def test_only_the_chunks_of_the_work_are_moved(transport):
    source, target = Model([3 * PIECE_NBYTES], seed=1), Model([3 * PIECE_NBYTES], seed=2)
    plan = plan_transfer(source.manifest, target.manifest)
    registration = transport.register(source.manifest)

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan, deadline=soon(), work=Work(plan.chunks[1:2]))

    middle = slice(PIECE_NBYTES, 2 * PIECE_NBYTES)
    assert np.array_equal(target.arrays[0][middle], source.arrays[0][middle])
    rest = np.r_[:PIECE_NBYTES, 2 * PIECE_NBYTES : 3 * PIECE_NBYTES]
    assert np.array_equal(target.arrays[0][rest], pattern(2, 0, 3 * PIECE_NBYTES)[rest])


def test_work_that_is_stopped_ends_a_read(transport):
    source, target = Model([8 * PIECE_NBYTES], seed=1), Model([8 * PIECE_NBYTES], seed=2)
    plan = plan_transfer(source.manifest, target.manifest)
    registration = transport.register(source.manifest)
    work, seen = Work(plan.chunks), []

    def arrived(chunk):
        seen.append(chunk)
        work.stop()

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection, suppress(TransferFailed):
        connection.read(plan, deadline=soon(), arrived=arrived, work=work)

    assert 1 <= len(seen) < 8
    assert work.take() is None


def test_a_registration_says_how_it_is_reached(transport):
    registration = transport.register(Model(SIZES, seed=1).manifest)

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        assert registration.transport == transport.name
        assert connection.transport in transport.name.split(",")


def test_what_arrived_raises_ends_the_read_and_goes_up(transport):
    source, target = Model([3 * PIECE_NBYTES], seed=1), Model([3 * PIECE_NBYTES], seed=2)
    registration = transport.register(source.manifest)
    seen = []

    def arrived(chunk):
        seen.append(chunk)
        raise KeyError("mine")

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        with pytest.raises(KeyError, match="mine"):
            connection.read(plan_transfer(source.manifest, target.manifest), deadline=soon(), arrived=arrived)
        assert 1 <= len(seen) < 3  # another lane may have been in the middle of a chunk

        connection.read(plan_transfer(source.manifest, target.manifest), deadline=soon())

    assert target.holds(seed=1)


def test_a_deadline_in_the_past_writes_nothing(transport):
    source, target = Model(SIZES, seed=1), Model(SIZES, seed=2)
    registration = transport.register(source.manifest)

    with (
        closing(transport.connect(registration.endpoint, deadline=soon())) as connection,
        pytest.raises(TransferFailed, match="after 0 of 1 chunks"),
    ):
        connection.read(plan_transfer(source.manifest, target.manifest), deadline=time.monotonic() - 1)

    assert target.holds(seed=2)


def test_one_connection_reads_more_than_once(transport):
    source, targets = Model(SIZES, seed=1), [Model(SIZES, seed=2), Model(SIZES, seed=3)]
    registration = transport.register(source.manifest)

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        for target in targets:
            connection.read(plan_transfer(source.manifest, target.manifest), deadline=soon())

    assert all(target.holds(seed=1) for target in targets)


def test_two_sources_do_not_mix(transport):
    sources = [Model(SIZES, seed=1), Model(SIZES, seed=2)]
    targets = [Model(SIZES, seed=3), Model(SIZES, seed=4)]
    registrations = [transport.register(each.manifest) for each in sources]
    connections = [transport.connect(each.endpoint, deadline=soon()) for each in registrations]

    for source, target, connection in zip(sources, targets, connections, strict=True):
        connection.read(plan_transfer(source.manifest, target.manifest), deadline=soon())

    assert [target.holds(seed) for seed, target in enumerate(targets, start=1)] == [True, True]


def test_a_closed_registration_cannot_be_reached(transport):
    registration = transport.register(Model(SIZES, seed=1).manifest)
    registration.close()
    registration.close()

    with pytest.raises(NotAvailable):
        transport.connect(registration.endpoint, deadline=soon())


def test_closing_a_registration_ends_its_readers(transport):
    source, target = Model(SIZES, seed=1), Model(SIZES, seed=2)
    registration = transport.register(source.manifest)

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        if connection.transport == "nixl":
            pytest.skip(
                "UCX may abort a process that is the source and its reader; test_nixl_transport has two processes"
            )
        registration.close()
        with pytest.raises(TransferFailed):
            connection.read(plan_transfer(source.manifest, target.manifest), deadline=soon())


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:-1] + b"\xff\xff"])
def test_a_damaged_endpoint_is_refused_and_leaves_no_trace(transport, damage):
    source, target = Model(SIZES, seed=1), Model(SIZES, seed=2)
    registration = transport.register(source.manifest)

    with pytest.raises(NotAvailable):
        transport.connect(damage(registration.endpoint), deadline=soon())

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan_transfer(source.manifest, target.manifest), deadline=soon())
    assert target.holds(seed=1)


def test_a_model_without_bytes_is_read(transport):
    nothing = Manifest((), ())
    registration = transport.register(nothing)

    with closing(transport.connect(registration.endpoint, deadline=soon())) as connection:
        connection.read(plan_transfer(nothing, nothing), deadline=soon())


def test_everything_closes_twice(transport):
    registration = transport.register(Model(SIZES, seed=1).manifest)
    connection = transport.connect(registration.endpoint, deadline=soon())

    for each in (connection, registration, transport):
        each.close()
        each.close()
