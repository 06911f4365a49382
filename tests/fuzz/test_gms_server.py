"""Whatever bytes a client sends cost its own session: the service lives, and what is committed stays what it is."""

import array
import os
import socket
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelexpress.gms import store
from modelexpress.gms.client import status
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.protocol import Allocate, Commit, Committed, Drop, Hello, Refused, Release, Status
from modelexpress.gms.server import GmsServer
from tests.fuzz.inputs import anything_near, frame, fuzzed, packed_near
from tests.support.gms_process import ask, asking, committed, connect, read_now

CONTENTS = [b"first" * 100, b"second"]
QUOTA_NBYTES = 64 * 1024 * 1024

FIRST = st.one_of(
    *(
        packed_near(message)
        for message in (
            Hello("RW", "tests", "a", 0.0),
            Hello("RO", "tests", "good", 0.0),
            Hello("RW_OR_RO", "tests", "b", 0.0),
            Drop("tests", "a"),
            Status(),
        )
    )
)
# Most sessions get past their first message, so that what comes then is heard.
HELLO = st.sampled_from([msgspec.msgpack.encode(Hello(r, "tests", k, 0.0)) for r in ("RW", "RW_OR_RO") for k in "ab"])
LATER = st.one_of(
    packed_near(Allocate(4096)),
    packed_near(Allocate(1)),
    packed_near(Release(0)),
    packed_near(Commit("label", b"body")),
    st.sampled_from([msgspec.msgpack.encode(each) for each in (Allocate(4096), Commit("label", b"body"))]),
)
STREAMS = st.one_of(
    st.tuples(FIRST, st.lists(LATER, max_size=2)).map(lambda parts: b"".join(map(frame, (parts[0], *parts[1])))),
    st.tuples(HELLO, st.lists(LATER, max_size=4)).map(lambda parts: b"".join(map(frame, (parts[0], *parts[1])))),
    anything_near(frame(msgspec.msgpack.encode(Hello("RW", "tests", "a", 0.0)))),
    st.binary(max_size=60),
)


@pytest.fixture(scope="module")
def service():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gms.sock")
        with GmsServer(path, HostMemory(), quota_nbytes=QUOTA_NBYTES, frame_timeout_s=5.0) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            with committed(path, CONTENTS, "good"):
                pass
            yield path
            server.stop()
            thread.join(20)


def talk(path, stream, fds):
    """Send everything, with descriptors that nobody asked for, and listen until the service hangs up."""
    with connect(path) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sock.sendmsg([stream or b"\0"], ancillary)
            sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while sock.recv(1 << 20):
                pass


@fuzzed
@given(stream=STREAMS, fds=st.sampled_from([0, 0, 0, 1, 3]))
@example(stream=frame(b"\xdd\xff\xff\xff\xff"), fds=0)
@example(stream=frame(b"\x91" * 4000), fds=0)
@example(stream=b"\xff\xff\xff\xff", fds=3)
@example(stream=frame(msgspec.msgpack.encode(Hello("RW", "tests", "a", float("inf")))) + b"\0", fds=1)
def test_no_stream_of_bytes_harms_the_service(service, stream, fds):
    talk(service, stream, [0] * fds)

    found = status(str(service))

    assert found.used_nbytes <= QUOTA_NBYTES
    good = next(key for key in found.keys if key.key == "good" and key.namespace == "tests")
    assert good.generation is not None
    if good.nbytes == 8192:  # nobody committed another under its name: then it is what it was
        assert read_now(service, "good")[2] == CONTENTS


def test_at_the_end_nothing_is_held(service):
    """After all of the above: one session, and only what is committed costs memory."""
    found = status(str(service))

    assert found.sessions == 1
    assert found.used_nbytes == sum(key.nbytes for key in found.keys)
    assert all(key.phase == "committed" for key in found.keys)
    assert len(os.listdir("/proc/self/fd")) < 60 + 2 * sum(key.segments for key in found.keys)


@contextmanager
def limits(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setattr(store, name, value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gms.sock")
        with GmsServer(path, HostMemory(), quota_nbytes=None) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield path
            server.stop()
            thread.join(20)


def test_keys_are_bounded(monkeypatch):
    """A key without segments costs no quota: a client could make them until the service had no memory."""
    with limits(monkeypatch, MAX_KEYS=3) as path:
        for number in range(3):
            with committed(path, [], f"k{number}"):
                pass
        with asking(path, "RW", "one-more") as (_, said):
            assert isinstance(said, Refused)
            assert "3 keys" in said.reason
        assert read_now(path, "k0")[2] == []  # those that are there go on


def test_what_writers_say_about_their_segments_is_bounded(monkeypatch):
    """A body of 64 MiB costs no quota either."""
    with limits(monkeypatch, MAX_BODIES_NBYTES=1000) as path:
        with committed(path, [b"x"], "a", body=b"x" * 600):
            pass
        with asking(path, "RW", "b") as (sock, _):
            assert "take 1,100 bytes" in ask(sock, Commit("", b"x" * 500)).reason
            assert isinstance(ask(sock, Commit("", b"x" * 400)), Committed)
