"""What a registry holds is foreign: records are used whole and well-formed, or not at all, and hide nobody else."""

import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import socket
import threading
from contextlib import closing, suppress

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelexpress.errors import ConfigError, ModelExpressError, NotAvailable, RegistryError
from modelexpress.registry.base import encode_record
from modelexpress.registry.open import open_registry, redact
from tests.fuzz.inputs import anything_near, bytes_near, fuzzed, packed_near
from tests.support.redis_server import RedisServer
from tests.support.registry_process import KEY, TIMEOUT_S, record_of

SOURCE_ID = "ab" * 16
OTHER_ID = "cd" * 16
RECORD = msgspec.structs.replace(record_of(SOURCE_ID), offer_digest=hashlib.sha256(b"offer").hexdigest())
LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*")
SIGNED = st.sampled_from([None, b"secret"])


def opened(url, signing_key=None):
    return closing(open_registry(url, signing_key=signing_key, timeout_s=TIMEOUT_S, lease_ttl_s=30.0))


def find(registry, signing_key):
    """What is found for KEY: only what is well-formed, and the good source; with a key, only what its holder signed."""
    found = registry.find(KEY)
    for each in found:
        record = each.record
        assert signing_key is None, "nobody signed this"
        assert re.fullmatch("[0-9a-f]{32}", record.source_id)
        texts = (record.label, record.host, record.transport, record.offer_digest, *record.keys)
        assert all(LINE.fullmatch(text) for text in texts)
        assert min(record.generation, record.pid, record.nbytes, record.tensors, each.readers) >= 0
        assert KEY in record.keys
        assert len(encode_record(record)) <= 16 * 1024 + 100
    if signing_key is None:
        assert OTHER_ID in {each.record.source_id for each in found}
    return found


# A directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A registry's directory with one good source in it, of which the header of a locked file is copied, too."""
    folder = tmp_path_factory.mktemp("registry")
    with opened(f"file://{folder}") as registry:
        registry.publish(record_of(OTHER_ID), b"good")
        [path] = folder.glob("*.record")
        yield folder, path.read_bytes()[:56]


@fuzzed
@given(payload=packed_near(RECORD), signing_key=SIGNED, damage=st.just(None) | bytes_near(bytes(56)))
@example(payload=b"\x91" * 10_000, signing_key=None, damage=None)
@example(payload=b"\x8d\xa4keys\xdd\xff\xff\xff\xff", signing_key=None, damage=None)
def test_records_in_a_directory(folder, payload, signing_key, damage):
    place, header = folder
    path = place / f"{SOURCE_ID}.{hashlib.sha256(payload).hexdigest()[:16]}.record"
    path.write_bytes((header if damage is None else damage) + payload)
    try:
        with open(path) as held, opened(f"file://{place}", signing_key) as registry:
            fcntl.flock(held, fcntl.LOCK_EX)
            for each in find(registry, signing_key):
                with suppress(NotAvailable):
                    assert registry.offer(each.record) == b"good"
                registry.confirms(each.record) if each.record.source_id == OTHER_ID else registry.stands(each.record)
    finally:
        path.unlink(missing_ok=True)


# Redis


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    """A client of a server with one good source in it, and a registry for each signing key; these keep no records."""
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as server,
        server.client as client,
        opened(server.url) as registry,
        opened(server.url, b"secret") as signed,
    ):
        registry.publish(record_of(OTHER_ID), b"good")
        client.persist(f"mx1:record:{OTHER_ID}")  # a long run outlasts the lease
        client.persist(f"mx1:offer:{OTHER_ID}:{hashlib.sha256(b'good').hexdigest()[:16]}")
        client.persist(f"mx1:index:{KEY}")
        client.zadd(f"mx1:index:{KEY}", {OTHER_ID: 9e15})
        yield client, {None: registry, b"secret": signed}


@pytest.mark.redis
@fuzzed
@given(
    payload=packed_near(RECORD),
    offer=anything_near(b"offer"),
    member=st.sampled_from([SOURCE_ID.encode()] * 4) | st.binary(max_size=40),
    signing_key=SIGNED,
)
def test_records_in_redis(redis, payload, offer, member, signing_key):
    client, registries = redis
    keys = [f"mx1:record:{SOURCE_ID}", f"mx1:offer:{SOURCE_ID}:{RECORD.offer_digest[:16]}"]
    with client.pipeline() as pipeline:
        pipeline.set(keys[0], payload).set(keys[1], offer).zadd(f"mx1:index:{KEY}", {member: 9e15}).execute()
    try:
        registry = registries[signing_key]
        for each in find(registry, signing_key):
            with suppress(NotAvailable):
                assert registry.offer(each.record) in (b"good", b"offer")
    finally:
        with client.pipeline() as pipeline:
            pipeline.delete(*keys).zrem(f"mx1:index:{KEY}", member).execute()


ENCODED = encode_record(RECORD)
REPLIES = st.one_of(
    *(
        anything_near(each)
        for each in (
            b"*1\r\n$32\r\n" + SOURCE_ID.encode() + b"\r\n",
            b"*2\r\n$%d\r\n%s\r\n:0\r\n" % (len(ENCODED), ENCODED),
            b"$5\r\noffer\r\n",
            b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n",
            b":1\r\n",
            b"-ERR no\r\n",
        )
    )
)


class Impostor:
    """Answers every command with the next of its replies, and then hangs up; a polite one lets a client in first."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.replies = []
        self.polite = False
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock, suppress(OSError):
                    sock.settimeout(1)
                    replies = iter(tuple(self.replies))
                    while said := sock.recv(1 << 20):
                        greetings = said.count(b"SETINFO") if self.polite else 0
                        reply = b"+OK\r\n" * greetings or next(replies, None)
                        if reply is None:
                            break
                        sock.sendall(reply)

    def close(self):
        self._listener.close()


@pytest.fixture(scope="module")
def impostor():
    """Each connection of redis-py looks up its own version on disk, which takes longer than everything else here."""
    with closing(Impostor()) as server, pytest.MonkeyPatch.context() as patched:
        patched.setattr(importlib.metadata, "version", functools.cache(importlib.metadata.version))
        yield server


CALLS = {
    "find": lambda registry: registry.find(KEY),
    "offer": lambda registry: registry.offer(RECORD),
    "stands": lambda registry: registry.stands(RECORD),
    "readers": lambda registry: registry.readers(RECORD),
    "publish": lambda registry: registry.publish(RECORD, b"offer"),
}
ALL = tuple(CALLS)


@fuzzed
@given(
    replies=st.lists(REPLIES, min_size=1, max_size=3),
    calls=st.sampled_from(ALL).map(lambda call: (call,)),  # one: an answer that never ends is waited for
    polite=st.sampled_from([True, True, True, False]),
)
@example(replies=[b"*1\r\n" * 5000], calls=ALL, polite=False)  # a RecursionError of redis-py went up
@example(replies=[b"+OK\r\n"], calls=ALL, polite=False)  # a TypeError of ours went up: a list was expected
@example(replies=[b"*2\r\n:-5\r\n:1\r\n"], calls=ALL, polite=False)
@example(
    replies=[b"*1\r\n$32\r\n" + SOURCE_ID.encode() + b"\r\n", b"*2\r\n$1\r\nx\r\n$1\r\nx\r\n"],
    calls=ALL,
    polite=True,
)
@example(replies=[b":" + b"9" * 5000 + b"\r\n"], calls=ALL, polite=False)
@example(replies=[b":" + b"9" * 5000 + b"\r\n"], calls=ALL, polite=True)
def test_a_server_that_is_no_redis_is_a_registry_error(impostor, replies, calls, polite):
    impostor.replies, impostor.polite = replies, polite
    url = f"redis://127.0.0.1:{impostor.port}/0"
    registry = open_registry(url, signing_key=None, timeout_s=0.03, lease_ttl_s=5.0)
    for call in calls:
        with suppress(RegistryError, NotAvailable):
            CALLS[call](registry)
    with suppress(RegistryError):
        registry.close()


# URLs

URLS = st.one_of(
    st.sampled_from(
        ["redis://user:hush@host:1/0", "rediss://:hush@host/1?ssl_ca_certs=/x", "redis://host/0?password=hush",
         "unix://:hush@/run/redis.sock?db=1", "redis://:hush@[::1]:6379/0", "redis+unix://u:hush@/s",
         "redis://:hush@host:port/0", "redis://:hush@host/nodb", "redis://:hush@host/0?socket_timeout=1"]
    ),
    st.tuples(st.sampled_from(["redis", "rediss", "unix", "redis+unix", "REDIS", "http", ""]),
              st.text("u:@/?#[]%.5 \\", max_size=9),
              st.text("h@/:?#[]%.\\&=passwordPASSWORD", max_size=20)).map(lambda t: f"{t[0]}://{t[1]}:hush@{t[2]}"),
)  # fmt: skip


@fuzzed
@given(url=URLS)
def test_no_url_shows_its_password(url):
    assert "hush" not in redact(url)
    try:
        open_registry(url, signing_key=None, timeout_s=0.01, lease_ttl_s=1.0).close()
    except (ConfigError, RegistryError) as exc:
        shown = f"{exc} {exc.__cause__} {'' if exc.__suppress_context__ else exc.__context__}"
        assert "hush" not in shown


@fuzzed
@given(url=st.text(max_size=30) | st.text("file:/redis%.[]@?#0\0\n ", max_size=30))
def test_any_url_is_opened_or_refused_with_a_reason(url, tmp_path_factory):
    if url.lower().startswith("file:"):
        return  # would be made
    with suppress(ModelExpressError):
        open_registry(url, signing_key=None, timeout_s=0.01, lease_ttl_s=1.0).close()


def test_the_good_source_was_found():
    """The key of the other tests is the one under which sources are published."""
    assert KEY in record_of(OTHER_ID).keys
    assert os.environ.get("MX_REGISTRY") is None
