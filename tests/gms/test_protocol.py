"""Frames and descriptors over a real socket pair: what is malformed costs an error and a bounded time, never a leak."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time

import msgspec
import pytest

from modelexpress.errors import GmsError
from modelexpress.gms.protocol import (
    MAX_FDS,
    MAX_FRAME_NBYTES,
    Commit,
    Drop,
    Hello,
    Layout,
    Status,
    receive_fds,
    receive_message,
    send_fds,
    send_message,
    wait_until_taken,
)

HELLO = Hello("RW_OR_RO", "default", "a" * 64, 1.5)


@pytest.fixture
def pair():
    """Two ends; fails when the test leaves a descriptor behind."""
    before = open_fds()
    left, right = socket.socketpair()
    with left, right:
        yield left, right
    assert open_fds() == before


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def soon(timeout_s=5.0):
    return time.monotonic() + timeout_s


def frame(data):
    return struct.pack(">I", len(data)) + data


def receive_in_parallel(sock, count):
    """Descriptors as another thread receives them, closed at once; a function that waits for how many came."""
    counts = []

    def receive():
        fds = receive_fds(sock, count, deadline=soon(20))
        counts.append(len({os.fstat(fd).st_ino for fd in fds}))
        for fd in fds:
            os.close(fd)

    thread = threading.Thread(target=receive)
    thread.start()

    def wait():
        thread.join()
        return counts

    return wait


@pytest.mark.parametrize("message", [HELLO, Status(), Drop("n", "k"), Commit("label", b"\0\xff" * 100_000)])
def test_a_message_arrives_as_it_was_sent(pair, message):
    thread = threading.Thread(target=send_message, args=(pair[0], message), kwargs={"deadline": soon()})
    thread.start()

    assert receive_message(pair[1], Hello | Status | Drop | Commit, deadline=soon()) == message
    thread.join()


def test_messages_that_arrive_together_are_taken_one_by_one(pair):
    for key in ("a", "b"):
        send_message(pair[0], Drop("n", key), deadline=soon())

    assert [receive_message(pair[1], Drop, deadline=soon()).key for _ in range(2)] == ["a", "b"]


def test_a_close_between_messages_is_the_end(pair):
    pair[0].close()

    assert receive_message(pair[1], Hello | Status, deadline=soon()) is None


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\xff\xff\xff\xff" + b"x" * 100, "4,294,967,295"),
        (b"\0\0", "2 of 4"),
        (struct.pack(">I", 100) + b"x" * 7, "7 of 100"),
        (frame(b""), "no message"),
        (frame(b"\xc1"), "no message"),
        (frame(b"\x91" * 4000), "no message"),
        (frame(msgspec.msgpack.encode({"type": "hello"})), "no message"),
        (frame(msgspec.msgpack.encode({"type": "status", "more": 1})), "no message"),
        (frame(msgspec.msgpack.encode(Commit("", b""))), "no message"),
        (frame(msgspec.msgpack.encode(HELLO) + b"x"), "no message"),
        (frame(b"x" * 4097), "4,097"),
    ],
)
def test_what_is_no_message_is_an_error(pair, sent, said):
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)

    with pytest.raises(GmsError, match=said):
        receive_message(pair[1], Hello | Status, deadline=soon(), limit=4096)


@pytest.mark.parametrize("sent", [b"", b"\0\0", struct.pack(">I", 100) + b"x" * 7])
def test_half_a_message_costs_the_deadline(pair, sent):
    pair[0].sendall(sent)
    began = time.monotonic()

    with pytest.raises(GmsError, match="took too long"):
        receive_message(pair[1], Hello | Status, deadline=soon(0.2))
    assert 0.1 < time.monotonic() - began < 2


def test_a_trickle_does_not_move_the_deadline(pair):
    stop = threading.Event()

    def trickle():
        pair[0].sendall(struct.pack(">I", 4000))
        while not stop.wait(0.02):
            pair[0].sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(GmsError, match="took too long"):
        receive_message(pair[1], Hello | Status, deadline=soon(0.3))
    stop.set()
    thread.join()


def test_who_never_reads_costs_the_deadline(pair):
    with pytest.raises(GmsError, match="took too long"):
        send_message(pair[0], Commit("", bytes(10_000_000)), deadline=soon(0.2))


def test_a_message_over_the_limit_is_not_sent(pair):
    with pytest.raises(GmsError, match=f"{MAX_FRAME_NBYTES:,}"):
        send_message(pair[0], Layout(bytes(MAX_FRAME_NBYTES), ()), deadline=soon())


def test_descriptors_that_nobody_asked_for_do_not_arrive(pair):
    read, write = os.pipe()
    socket.send_fds(pair[0], [frame(msgspec.msgpack.encode(Status()))], [write])
    os.close(write)

    assert receive_message(pair[1], Hello | Status, deadline=soon()) == Status()

    assert os.read(read, 1) == b""  # nobody has the other end any more
    os.close(read)


@pytest.mark.parametrize("count", [0, 1, MAX_FDS, MAX_FDS + 1, 3 * MAX_FDS + 7])
def test_descriptors_arrive_in_batches(pair, count):
    received = receive_in_parallel(pair[1], count)
    fds = [os.memfd_create("test") for _ in range(count)]

    send_fds(pair[0], fds, deadline=soon(20))
    wait_until_taken(pair[0], deadline=soon())

    assert received() == [count]
    for fd in fds:
        os.close(fd)


def test_the_second_batch_waits_until_the_first_was_taken(pair):
    with pytest.raises(GmsError, match="waiting for the other end to read"):
        send_fds(pair[0], [pair[0].fileno()] * (MAX_FDS + 1), deadline=soon(0.2))


def test_waiting_for_a_reader_that_dies_ends_at_once(pair):
    send_fds(pair[0], [pair[0].fileno()], deadline=soon())
    threading.Timer(0.1, pair[1].close).start()
    began = time.monotonic()

    with pytest.raises(GmsError, match="went away"):
        wait_until_taken(pair[0], deadline=soon(10))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("carrier", "sent", "expected"), [(b"F", 5, 4), (b"G", 4, 4), (b"F", 0, 1)])
def test_other_descriptors_than_expected_are_closed(pair, carrier, sent, expected):
    socket.send_fds(pair[0], [carrier], [pair[0].fileno()] * sent)

    with pytest.raises(GmsError, match=f"expected {expected} descriptors and got {sent}"):
        receive_fds(pair[1], expected, deadline=soon(1))


def test_descriptors_that_end_too_early_are_closed(pair):
    socket.send_fds(pair[0], [b"F"], [pair[0].fileno()] * 3)
    pair[0].shutdown(socket.SHUT_WR)

    with pytest.raises(GmsError, match="expected 4 descriptors and got 3"):
        receive_fds(pair[1], 4, deadline=soon())


def test_descriptors_that_do_not_fit_the_limit_are_closed(pair):
    """Truncated by the kernel, because this process may not open so many."""
    socket.send_fds(pair[0], [b"F"], [pair[0].fileno()] * 50)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 5, hard))
    try:
        with pytest.raises(GmsError, match="is the descriptor limit too low"):
            receive_fds(pair[1], 50, deadline=soon())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_received_descriptors_are_not_inherited(pair):
    send_fds(pair[0], [pair[0].fileno()], deadline=soon())
    (fd,) = receive_fds(pair[1], 1, deadline=soon())

    assert not os.get_inheritable(fd)
    os.close(fd)
