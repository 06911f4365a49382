"""What a peer says: endpoints, bytes on a TCP connection of either end, and sources that contradict each other."""

import ctypes
import gc
import hashlib
import hmac
import ipaddress
import queue
import socket
import struct
import threading
import time
from contextlib import closing, suppress

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from modelexpress import host_transport, tcp_transport
from modelexpress.digest import checksums_of
from modelexpress.errors import LoadFailed, NotAvailable, TransferFailed
from modelexpress.frame import framed, unframed
from modelexpress.host_transport import HostTransport
from modelexpress.model_root import ModelRoot
from modelexpress.offer import Offer
from modelexpress.peer_transport import PeerTransport
from modelexpress.plan import plan_transfer
from modelexpress.registry.base import SourceRecord
from modelexpress.registry.directory import DirectoryRegistry
from modelexpress.strategies.base import LoadTarget
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.rdma import RdmaFromPeer
from modelexpress.tcp_transport import TcpTransport
from tests.fuzz.inputs import allocates_less_than, bytes_near, fuzzed, packed_near
from tests.support.nixl_peer import manifest_over, pattern
from tests.support.tensors import TinyModel, randomize, snapshot
from tests.test_peer_loading import Fleet

SIZES = [4096, 1000, 1]
GUARD = 64  # bytes before and after each target tensor
SOON_S = 5.0


class Served:
    """Memory of this process, registered with a transport; and what is drawn around it, made once."""

    def __init__(self, transport, magic, kind):
        self.transport = transport
        self.arrays = [pattern(1, at, nbytes) for at, nbytes in enumerate(SIZES)]
        self.manifest = manifest_over(self.arrays)
        self.registration = transport.register(self.manifest)
        self.endpoint = self.registration.endpoint
        self.endpoints = endpoints_near(magic, kind, self.endpoint)
        self.streams = streams_near(self.manifest)


class Target:
    """Memory to be read into, between guards."""

    def __init__(self):
        self._all = [np.full(nbytes + 2 * GUARD, 0xA5, dtype=np.uint8) for nbytes in SIZES]
        self.arrays = [each[GUARD:-GUARD] for each in self._all]

    def check(self):
        assert all((each[:GUARD] == 0xA5).all() and (each[-GUARD:] == 0xA5).all() for each in self._all)

    def holds(self, arrays):
        return all(np.array_equal(one, other) for one, other in zip(self.arrays, arrays, strict=True))


def tcp(connect_timeout_s=SOON_S):
    return TcpTransport(lanes=1, connect_timeout_s=connect_timeout_s, listen="127.0.0.1")


@pytest.fixture(scope="module")
def by_host():
    with closing(HostTransport(lanes=1)) as transport:
        yield Served(transport, host_transport._MAGIC, host_transport._Endpoint)


@pytest.fixture(scope="module")
def by_tcp():
    with closing(tcp()) as transport:
        yield Served(transport, tcp_transport._MAGIC, tcp_transport._Endpoint)


@pytest.fixture(scope="module")
def impatient():
    """Whose reader has soon had enough of a source that says nothing: each of them costs the fuzzer that time."""
    with pytest.MonkeyPatch.context() as patched, closing(tcp(connect_timeout_s=0.03)) as transport:
        patched.setattr(tcp_transport, "_LOOK_S", 0.01)
        yield transport


def soon(seconds=SOON_S):
    return time.monotonic() + seconds


def sealed(magic, body):
    """A frame whose length and checksum are right, around any bytes."""
    return framed(magic, msgspec.Raw(body))


def endpoints_near(magic, kind, valid):
    """Endpoints whose frame is right and whose body is not, and some whose frame is damaged."""
    body = unframed(magic, valid, kind, what="")
    return st.one_of(
        *[packed_near(body).filter(bool).map(lambda data: sealed(magic, data))] * 3, bytes_near(valid), st.just(valid)
    )


def connect_and_read(served, transport, endpoint):
    """Connect as a reader does that found this endpoint, and read what the manifest says."""
    target = Target()
    with allocates_less_than(200_000 + 64 * len(endpoint)):
        try:
            connection = transport.connect(endpoint, deadline=soon())
        except NotAvailable:
            return
    with closing(connection), suppress(TransferFailed):
        connection.read(plan_transfer(served.manifest, manifest_over(target.arrays)), deadline=soon())
        assert target.holds(served.arrays)
    target.check()


# Endpoints


@fuzzed
@given(data=st.data())
def test_an_endpoint_of_a_process_is_refused_or_leads_to_its_source(by_host, data):
    connect_and_read(by_host, by_host.transport, data.draw(by_host.endpoints))


def test_a_word_of_zeros_proves_nothing(by_host):
    """It lies in much memory, and where every registration that was closed had its own."""
    zeros = ctypes.create_string_buffer(16)
    endpoint = unframed(host_transport._MAGIC, by_host.endpoint, host_transport._Endpoint, what="")
    hostile = msgspec.structs.replace(endpoint, proof=bytes(16), proof_address=ctypes.addressof(zeros))

    with pytest.raises(NotAvailable, match="impossible"):
        by_host.transport.connect(framed(host_transport._MAGIC, hostile), deadline=soon())


def on_this_host(endpoint):
    """The fuzzer knocks at no other machine."""
    try:
        found = unframed(tcp_transport._MAGIC, endpoint, tcp_transport._Endpoint, what="")
        address = ipaddress.ip_address(found.address)
    except (NotAvailable, ValueError):
        return True
    return address.is_loopback or address.is_unspecified or address.is_multicast


@fuzzed
@given(data=st.data())
def test_an_endpoint_of_an_address_is_refused_or_leads_to_its_source(by_tcp, data):
    endpoint = data.draw(by_tcp.endpoints)
    assume(on_this_host(endpoint))
    with closing(tcp(connect_timeout_s=0.2)) as transport:
        connect_and_read(by_tcp, transport, endpoint)


@pytest.mark.parametrize("address", ["::1%\u00e9", "::1%a\0b", "::1%" + "x" * 300, "::1%nosuch", "fe80::1%\u00fc"])
def test_a_zone_that_this_host_does_not_have_is_refused(by_tcp, address):
    """A TypeError of the socket went up."""
    endpoint = unframed(tcp_transport._MAGIC, by_tcp.endpoint, tcp_transport._Endpoint, what="")
    hostile = framed(tcp_transport._MAGIC, msgspec.structs.replace(endpoint, address=address))

    with pytest.raises(NotAvailable, match="the source's endpoint names"):
        by_tcp.transport.connect(hostile, deadline=soon())


# A reader that means harm


def asking(*ranges, count=None):
    return struct.pack("<I", len(ranges) if count is None else count) + b"".join(struct.pack("<QQ", *r) for r in ranges)


def served_for(served, stream):
    """What a source has to answer to a stream of requests, and nothing else: worked out from its words."""
    places = {each.address: array for each, array in zip(served.manifest.storages, served.arrays, strict=True)}
    answer = b""
    while len(stream) >= 4:
        (count,) = struct.unpack_from("<I", stream)
        if count > tcp_transport._MOST_RANGES or len(stream) < 4 + 16 * count:
            break
        asked = list(struct.iter_unpack("<QQ", stream[4 : 4 + 16 * count]))
        parts = []
        for address, nbytes in asked:
            for start, array in places.items():
                if start <= address and 0 < nbytes <= start + array.nbytes - address:
                    parts.append(array[address - start : address - start + nbytes].tobytes())
        if len(parts) < count:
            break
        answer += b"".join(parts)
        stream = stream[4 + 16 * count :]
    return answer


def streams_near(manifest):
    first, second, _ = (each.address for each in manifest.storages)
    good = asking((first, 4096), (second, 10)) + asking((second + 990, 10)) + asking()
    beside = st.tuples(
        st.sampled_from([first, first - 1, first + 4095, first + 4096, second, 0, (1 << 64) - 1]),
        st.sampled_from([0, 1, 2, 4096, 4097, 1 << 40, (1 << 64) - 1]),
    )
    return st.one_of(
        bytes_near(good),
        st.lists(beside, max_size=3).map(lambda ranges: asking(*ranges)),
        st.lists(beside, max_size=2).map(lambda ranges: good + asking(*ranges) + good),
        st.sampled_from([0, 1, 2047, 2048, 2049, 1 << 31, (1 << 32) - 1]).map(lambda n: asking(count=n) + bytes(100)),
        st.binary(max_size=80),
    )


def listen_until_closed(stranger):
    received = b""
    with suppress(ConnectionError):
        while part := stranger.recv(1 << 16):
            received += part
    return received


@fuzzed
@given(data=st.data())
def test_no_stream_of_a_reader_gets_more_than_what_is_served(by_tcp, data):
    stream = data.draw(by_tcp.streams)
    shaken = data.draw(st.sampled_from(["right", "right", "right", "right", "wrong", "none"]))
    endpoint = unframed(tcp_transport._MAGIC, by_tcp.endpoint, tcp_transport._Endpoint, what="")
    with socket.create_connection((endpoint.address, endpoint.port), timeout=SOON_S) as stranger:
        theirs = stranger.recv(16, socket.MSG_WAITALL)
        proof = hmac.digest(endpoint.secret, b"reader" + theirs + bytes(16), hashlib.sha256)
        hello = {"right": bytes(16) + proof, "wrong": bytes(16) + proof[::-1], "none": b""}[shaken]
        with suppress(OSError):  # refused before all of it was said
            stranger.sendall(hello + stream)
            stranger.shutdown(socket.SHUT_WR)
        received = listen_until_closed(stranger)

    if shaken == "right":
        # The connection is reset where words are left that nobody reads: then the end of an answer may be lost.
        ours = hmac.digest(endpoint.secret, b"source" + theirs + bytes(16), hashlib.sha256)
        assert ours.startswith(received[:32])
        assert served_for(by_tcp, stream).startswith(received[32:])
    else:
        assert received == b""


def test_after_all_of_that_the_source_serves(by_tcp):
    target = Target()
    give_up = time.monotonic() + SOON_S
    while by_tcp.registration._connections and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not by_tcp.registration._connections
    with closing(by_tcp.transport.connect(by_tcp.endpoint, deadline=soon())) as connection:
        connection.read(plan_transfer(by_tcp.manifest, manifest_over(target.arrays)), deadline=soon())
    assert target.holds(by_tcp.arrays)


# A source that means harm


class Hostile:
    """Listens like a source, and answers each connection with what it was told to: bytes, and how it ends."""

    def __init__(self):
        self.secret = bytes(range(32))
        self._arrays = [pattern(1, at, nbytes) for at, nbytes in enumerate(SIZES)]
        self.manifest = manifest_over(self._arrays)
        self.scripts = queue.Queue()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = framed(
            tcp_transport._MAGIC,
            tcp_transport._Endpoint("127.0.0.1", self._listener.getsockname()[1], self.secret),
        )
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while (script := self.scripts.get()) is not None:
            connection, _ = self._listener.accept()
            with connection, suppress(OSError):
                connection.settimeout(SOON_S)
                self._answer(connection, *script)

    def _answer(self, connection, nonce, proof, answer, end):
        connection.sendall(nonce)
        if len(nonce) >= 16:  # else the reader says nothing yet
            said = connection.recv(48, socket.MSG_WAITALL)
            right = hmac.digest(self.secret, b"source" + nonce[:16] + said[:16], hashlib.sha256)
            connection.sendall(right if proof is None else proof)
            if proof is None:
                connection.recv(4 + 16 * len(SIZES), socket.MSG_WAITALL)
                connection.sendall(answer)
        if end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif end == "silence":
            connection.recv(1)  # until the reader has had enough

    def close(self):
        self.scripts.put(None)
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def hostile():
    with closing(Hostile()) as made:
        yield made


ANSWER = b"".join(pattern(1, at, nbytes).tobytes() for at, nbytes in enumerate(SIZES))
NONCES = st.sampled_from([bytes(16)] * 30 + [b"", b"x", bytes(15), bytes(17), bytes(5000)])
PROOFS = st.sampled_from([None] * 30 + [b"", bytes(32), bytes(31), bytes(100_000)])
ANSWERS = st.one_of(
    *[bytes_near(ANSWER)] * 3,
    st.integers(0, len(ANSWER)).map(lambda n: ANSWER[:n]),
    st.tuples(st.binary(max_size=64), st.integers(0, 50)).map(lambda more: ANSWER * more[1] + more[0]),
)
ENDS = st.sampled_from(["close"] * 20 + ["reset"] * 10 + ["silence"])  # whose end is waited for


@fuzzed
@given(nonce=NONCES, proof=PROOFS, answer=ANSWERS, end=ENDS)
@example(nonce=bytes(16), proof=None, answer=ANSWER * 50, end="silence")
@example(nonce=bytes(16), proof=None, answer=ANSWER[:-1], end="silence")
@example(nonce=b"", proof=None, answer=b"", end="silence")
def test_no_source_writes_beside_its_chunks_or_keeps_a_reader(hostile, impatient, nonce, proof, answer, end):
    target = Target()
    hostile.scripts.put((nonce, proof, answer, end))
    try:
        connection = impatient.connect(hostile.endpoint, deadline=soon())
    except NotAvailable:
        target.check()
        return
    with closing(connection):
        try:
            connection.read(plan_transfer(hostile.manifest, manifest_over(target.arrays)), deadline=soon(0.05))
        except TransferFailed:
            pass
        else:
            flat = b"".join(each.tobytes() for each in target.arrays)
            assert (proof or b"", flat) == (b"", answer[: len(ANSWER)])
    target.check()


# Sources that contradict each other


class Contradicting:
    """A true source, and its registry, in which the records and offers of others are a bit wrong."""

    def __init__(self, folder):
        self.fleet = Fleet(folder / "registry")
        self.model = randomize(TinyModel(), 3)
        adapter = self.fleet.adapter()
        manifest = adapter.manifest(self.model)
        self.transport = self._open()
        registration = self.transport.register(manifest)
        self.offer = Offer(manifest, registration.endpoint, checksums_of(manifest, threads=1))
        self.offers = st.one_of(packed_near(self.offer), st.just(self.offer.encode()))
        self.key = adapter.identity().key
        self.kept = (self.model, registration)

    def close(self):
        self.transport.close()

    def _open(self):
        return PeerTransport({"host": lambda: HostTransport(lanes=1), "tcp": tcp})

    def record(self, number, offer, **changes):
        return SourceRecord(
            **{
                "source_id": f"{number:032x}",
                "generation": 1,
                "keys": (self.key,),
                "kind": "layout",
                "label": "tiny",
                "host": "host",
                "pid": 1,
                "transport": "host,tcp",
                "nbytes": offer.manifest.nbytes if isinstance(offer, Offer) else 1,
                "tensors": 1,
                "offer_digest": "",
                "published_at": 0.0,
            }
            | changes
        )

    def load(self):
        adapter = self.fleet.adapter()
        target = LoadTarget(adapter, ModelRoot(adapter.initialize()))
        with closing(self.fleet.open_registry()) as registry:
            strategy = RdmaFromPeer(
                registry, self._open, verify="on", transfer_timeout_s=5, max_sources=3, max_readers=1
            )
            return LoadStrategyChain([strategy]).run(target)


@pytest.fixture(scope="module")
def contradicting(tmp_path_factory):
    """Its true source is published; the others come and go."""
    with (
        closing(Contradicting(tmp_path_factory.mktemp("contradicting"))) as made,
        closing(made.fleet.open_registry()) as registry,
    ):
        registry.publish(made.record(0, made.offer), made.offer.encode())
        yield made


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "transport": st.sampled_from(["host", "tcp", "nixl", "", "host,,tcp", ",", "x" * 100]),
        "kind": st.sampled_from(["layout", "checkpoint"]),
        "generation": st.sampled_from([0, 1, 2, (1 << 63) - 1]),
        "nbytes": st.sampled_from([0, 1, (1 << 63) - 1]),
        "host": st.sampled_from(["host", "", "\u202e", "x" * 200]),
        "pid": st.sampled_from([0, 1, (1 << 63) - 1]),
    },
)


@fuzzed
@given(data=st.data(), records=st.lists(CHANGES, min_size=2, max_size=2))
def test_sources_that_contradict_each_other_do_not_keep_the_true_one_from_serving(contradicting, data, records):
    hostile = [data.draw(contradicting.offers) for _ in records]
    before = threading.active_count()
    with closing(DirectoryRegistry(contradicting.fleet.path, signing_key=None)) as registry:
        for number, (changes, offer) in enumerate(zip(records, hostile, strict=True), start=1):
            registry.publish(contradicting.record(number, offer, **changes), offer)
        try:
            report = contradicting.load()
        except LoadFailed as exc:
            pytest.fail(f"the true source was not read: {exc}")
    if all(offer == contradicting.offer.encode() for offer in hostile):
        assert snapshot(report.model) == snapshot(contradicting.model)
    give_up = time.monotonic() + SOON_S
    while threading.active_count() > before and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.001)
    assert threading.active_count() <= before + 1  # the thread of a connection that was just closed


def test_a_record_with_the_name_of_another_does_not_hide_it(tmp_path):
    """Of records with one host, process and beginning of an id only the first was read."""
    with closing(Contradicting(tmp_path)) as made, closing(made.fleet.open_registry()) as registry:
        for number, offer in enumerate([b"", b"", made.offer.encode()]):
            record = registry.publish(made.record(number, offer), offer)
        report = made.load()

        assert record.name == "host/1/00000000"
        assert report.attempts[-1].outcome == "loaded"
        assert snapshot(report.model) == snapshot(made.model)
