"""The memory service as its clients and its killers see it: a real process, spoken to in the bare protocol."""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
import struct
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from modelexpress.errors import ConfigError
from modelexpress.gms import store
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.protocol import (
    Allocate,
    Commit,
    Committed,
    Done,
    Drop,
    Granted,
    Hello,
    Refused,
    Release,
    Status,
    receive_fds,
    send_message,
)
from modelexpress.gms.server import MAX_SESSIONS, GmsServer
from tests.support.gms_process import (
    NAMESPACE,
    allocate,
    answer,
    ask,
    asking,
    committed,
    connect,
    read,
    read_now,
    running,
    soon,
    stage,
)

PAGE = mmap.PAGESIZE
CONTENTS = [os.urandom(5000), os.urandom(3 * PAGE)]
FRAME_TIMEOUT_S = 2.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gms.sock"


@pytest.fixture
def server(path):
    """A service of its own process. Fails when a session left memory, a thread or a descriptor behind."""
    with running("serve", path, 0, FRAME_TIMEOUT_S) as process:
        process.baseline = resources(process)
        yield process
        assert process.poll() is None
        for key in status(path).keys:
            if key.generation is not None:
                with connect(path) as sock:
                    assert ask(sock, Drop(key.namespace, key.key)) == Done()
        until(lambda: resources(process) == process.baseline)
        assert status(path).used_nbytes == 0


@contextmanager
def serving(path, backend=None, *, quota_nbytes=None, frame_timeout_s=FRAME_TIMEOUT_S):
    """A service in a thread of this process."""
    threads = threading.active_count()
    before = len(os.listdir("/proc/self/fd"))
    with GmsServer(
        path, backend or HostMemory(), quota_nbytes=quota_nbytes, frame_timeout_s=frame_timeout_s
    ) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        yield service
    thread.join()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == before


def resources(process):
    """Descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{process.pid}/fd")), len(os.listdir(f"/proc/{process.pid}/task"))


def with_segments(baseline, segments):
    """What those resources are while so many segments are held."""
    return baseline[0] + segments, baseline[1]


def segments_of(process):
    """How many segments a process holds."""
    links = []
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            links.append(os.readlink(each))
        except FileNotFoundError:
            continue  # closed meanwhile
    return sum("memfd:modelexpress" in link for link in links)


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.005)


def status(path):
    with connect(path) as sock:
        return ask(sock, Status())


def key_status(path, key="k"):
    return next((each for each in status(path).keys if each.key == key), None)


# Who is granted what


def test_what_a_writer_commits_every_reader_gets(path, server):
    with committed(path, CONTENTS, body=b"\0about") as (_, generation):
        assert read_now(path) == (generation, b"\0about", CONTENTS)

    assert read_now(path) == (1, b"\0about", CONTENTS)  # it outlives the writer


def test_readers_cannot_change_what_they_get(path, server):
    with committed(path, CONTENTS), asking(path, "RO") as (sock, _):
        layout = answer(sock)
        for fd, nbytes in zip(receive_fds(sock, 2, deadline=soon()), layout.segments, strict=True):
            assert HostMemory().is_sealed(fd, nbytes)
            os.close(fd)


def test_nothing_committed_is_said_at_once(path, server):
    refused = read_now(path, "some key")

    assert refused.kind == "missing"
    assert "tests/some key" in refused.reason


def test_a_second_writer_is_told_who_is_first(path, server):
    with running("stage", path, "k", 1, PAGE) as writer:
        for request in ("RW", "RO", "RW_OR_RO"):
            with asking(path, request) as (_, refused):
                assert refused.kind == "busy"
                assert f"pid {writer.pid}" in refused.reason


@pytest.mark.parametrize(("request_", "kind"), [("RO", "busy"), ("RW", "busy"), ("RW_OR_RO", "busy")])
def test_a_wait_in_vain_ends_at_its_deadline(path, server, request_, kind):
    with asking(path, "RW"), asking(path, request_, wait_s=0.3) as (sock, refused):
        assert refused.kind == kind
        assert "after 0.3 s" in refused.reason
        assert answer(sock) is None


def test_waiting_for_a_writer_that_never_comes_ends_too(path, server):
    began = time.monotonic()
    with asking(path, "RO", wait_s=0.3) as (_, refused):
        assert refused.kind == "missing"
    assert 0.3 <= time.monotonic() - began < 3


@pytest.mark.parametrize("request_", ["RO", "RW_OR_RO"])
def test_who_waits_reads_what_is_committed(path, server, request_):
    with connect(path) as waiter, asking(path, "RW") as (writer, _):
        send_message(waiter, Hello(request_, NAMESPACE, "k", 10.0), deadline=soon())
        until(lambda: key_status(path).waiting == 1)
        stage(writer, CONTENTS)
        ask(writer, Commit("", b"body"))

        assert answer(waiter).mode == "read"
        assert read(waiter) == (b"body", CONTENTS)


def test_with_something_committed_who_may_do_either_reads(path, server):
    with committed(path, CONTENTS), asking(path, "RW_OR_RO") as (sock, granted):
        assert granted.mode == "read"
        assert read(sock) == (b"body", CONTENTS)


def test_readers_keep_their_generation_while_it_is_replaced(path, server):
    newer = [os.urandom(100)]
    with committed(path, CONTENTS), asking(path, "RO") as (old, granted):
        layout = answer(old)
        with committed(path, newer, body=b"newer"):
            assert read_now(path) == (2, b"newer", newer)
            fds = receive_fds(old, len(layout.segments), deadline=soon())
            assert [os.pread(fd, PAGE * 9, 0) for fd in fds] == CONTENTS
            for fd in fds:
                os.close(fd)
            assert granted.generation == 1
            assert key_status(path).superseded == 1
    until(lambda: segments_of(server) == 1)
    assert read_now(path) == (2, b"newer", newer)


def test_a_writer_that_aborts_leaves_the_old_generation(path, server):
    with committed(path, CONTENTS):
        pass
    with asking(path, "RW") as (sock, granted):
        assert granted.generation == 2
        stage(sock, [b"half"])
        assert read_now(path) == (1, b"body", CONTENTS)
    until(lambda: segments_of(server) == len(CONTENTS))
    assert read_now(path) == (1, b"body", CONTENTS)
    with asking(path, "RW", wait_s=5) as (_, granted):
        assert granted.generation == 3


def test_a_segment_that_is_released_is_not_committed_and_costs_nothing(path, server):
    with asking(path, "RW") as (sock, _):
        stage(sock, [b"first", bytes(3 * PAGE), b"last"])
        assert ask(sock, Release(1)) == Done()
        assert status(path).used_nbytes == 2 * PAGE
        assert segments_of(server) == 2
        ask(sock, Commit("", b"body"))

    assert read_now(path) == (1, b"body", [b"first", b"last"])


def test_only_staged_segments_can_be_released(path, server):
    with asking(path, "RW") as (sock, _):
        stage(sock, [b"only"])
        for wrong in (1, -1, 1 << 40):
            refused = ask(sock, Release(wrong))
            assert (refused.kind, refused.reason) == ("protocol", f"segment {wrong} of 1 cannot be released")
        ask(sock, Commit("", b"body"))
        assert ask(sock, Release(0)).kind == "protocol"

    assert read_now(path) == (1, b"body", [b"only"])


def test_a_number_is_not_reused_after_all_is_forgotten(path, server):
    with asking(path, "RW") as (_, first):
        assert first.generation == 1
    until(lambda: status(path).keys == ())

    with asking(path, "RW") as (_, second):
        assert second.generation == 2
        assert second.instance == first.instance


def test_keys_and_namespaces_do_not_meet(path, server):
    with committed(path, CONTENTS, "a"), committed(path, [b"b"], "b"):
        assert read_now(path, "a")[2] == CONTENTS
        assert read_now(path, "b")[2] == [b"b"]
        with connect(path) as sock:
            assert ask(sock, Hello("RO", "other", "a", 0.0)).kind == "missing"


def test_what_is_dropped_is_not_found_and_stays_with_its_readers(path, server):
    with committed(path, CONTENTS) as (reader, _):
        with connect(path) as sock:
            assert ask(sock, Drop(NAMESPACE, "k")) == Done()
        assert read_now(path).kind == "missing"
        assert segments_of(server) == 2
        with connect(path) as sock:
            assert ask(sock, Drop(NAMESPACE, "k")).kind == "missing"
        reader.close()
        until(lambda: segments_of(server) == 0)


def test_the_status_says_what_there_is(path, server):
    with committed(path, CONTENTS, label="a model"), asking(path, "RO"), asking(path, "RW"):
        until(lambda: status(path).sessions == 4)
        said = status(path)

    assert (said.pid, said.device, said.quota_nbytes, said.used_nbytes) == (server.pid, "cpu", 0, 5 * PAGE)
    [key] = said.keys
    assert (key.namespace, key.key, key.label, key.phase) == (NAMESPACE, "k", "a model", "committed, staged")
    assert (key.generation, key.nbytes, key.segments) == (1, 5 * PAGE, 2)
    assert (key.readers, key.waiting, key.superseded) == (2, 0, 0)


# Death


def test_the_first_who_waits_is_promoted_when_the_writer_is_killed(path, server):
    with running("stage", path, "k", 3, PAGE) as writer, connect(path) as waiter:
        send_message(waiter, Hello("RW_OR_RO", NAMESPACE, "k", 20.0), deadline=soon())
        until(lambda: key_status(path).waiting == 1)
        writer.kill()

        granted = answer(waiter)
        assert (granted.mode, granted.generation) == ("stage", 2)
        until(lambda: segments_of(server) == 0)


def test_the_dead_are_granted_nothing(path, server):
    with running("stage", path, "k", 1, PAGE) as writer, connect(path) as alive:
        with running("wait", path, "k", "RW"), running("wait", path, "k", "RW_OR_RO"):
            until(lambda: key_status(path).waiting == 2)
        send_message(alive, Hello("RW", NAMESPACE, "k", 20.0), deadline=soon())
        writer.kill()

        assert answer(alive).generation == 2  # 3, if a dead one had been granted anything


def test_the_dead_wait_for_nothing(path, server):
    with asking(path, "RW"):
        with running("wait", path, "k", "RO"):
            until(lambda: key_status(path).waiting == 1)
        until(lambda: key_status(path).waiting == 0)


@pytest.mark.parametrize("segments", [1, 4, 7])
@pytest.mark.parametrize("before", [True, False])
def test_a_writer_killed_half_way_leaves_nothing(path, server, segments, before):
    if before:
        with committed(path, CONTENTS):
            pass
    until(lambda: resources(server) == with_segments(server.baseline, len(CONTENTS) * before))
    with running("stage", path, "k", segments, 1_000_000) as writer:
        assert segments_of(server) == segments + len(CONTENTS) * before
        writer.kill()
        until(lambda: resources(server) == with_segments(server.baseline, len(CONTENTS) * before))

    expected = (1, b"body", CONTENTS) if before else None
    found = read_now(path)
    assert found == expected if before else found.kind == "missing"
    with committed(path, [b"new"]):
        assert read_now(path)[1:] == (b"body", [b"new"])


def test_two_hundred_killed_readers_cost_nothing(path, server):
    with committed(path, [os.urandom(PAGE) for _ in range(300)], body=bytes(100_000)):
        pass
    with running("herd", path, "k", 20) as herd:
        herd.wait(60)
    until(lambda: resources(server) == with_segments(server.baseline, 300))
    rss = psutil.Process(server.pid).memory_info().rss
    with running("herd", path, "k", 200) as herd:
        assert herd.stdout.readline() == "done\n"

    until(lambda: resources(server) == with_segments(server.baseline, 300))
    assert psutil.Process(server.pid).memory_info().rss < rss + 8_000_000
    assert read_now(path)[0] == 1


def test_a_stopped_service_ends_every_session_and_frees_all(path):
    with running("serve", path, 0, 30) as server, ExitStack() as stack:
        reader, _ = stack.enter_context(committed(path, CONTENTS))
        writer, _ = stack.enter_context(asking(path, "RW"))
        stage(writer, CONTENTS)
        waiter, silent, half, deaf = (stack.enter_context(connect(path)) for _ in range(4))
        send_message(waiter, Hello("RW", NAMESPACE, "k", 60.0), deadline=soon())
        half.sendall(b"\0")
        send_message(deaf, Hello("RO", NAMESPACE, "k", 60.0), deadline=soon())
        until(lambda: key_status(path).waiting == 1)

        server.send_signal(signal.SIGTERM)

        assert server.wait(5) == 0
        assert [answer(each) for each in (reader, writer, waiter, silent)] == [None] * 4
        assert os.listdir(path.parent) == []


def test_stop_comes_before_during_and_after(path):
    service = GmsServer(path, HostMemory(), quota_nbytes=None)
    service.stop()
    service.serve_forever()
    service.stop()
    service.serve_forever()
    assert os.listdir(path.parent) == []


def test_a_service_that_never_served_leaves_nothing(path):
    with GmsServer(path, HostMemory(), quota_nbytes=None):
        assert path.is_socket()
    assert os.listdir(path.parent) == []


# Memory


def test_a_quota_is_kept_and_given_back(path):
    with serving(path, quota_nbytes=10 * PAGE):
        with committed(path, [bytes(4 * PAGE)]), asking(path, "RW") as (sock, _):
            stage(sock, [bytes(5 * PAGE + 1)])
            refused = ask(sock, Allocate(1))
            assert refused == Refused(
                "memory",
                "a segment of 1 bytes does not fit: 0 of the quota of 40,960 bytes are free; "
                "drop a key, or raise the quota",
            )
            assert ask(sock, Commit("", b"")) == Committed(2)  # it could go on
        until(lambda: status(path).used_nbytes == 6 * PAGE)
        with asking(path, "RW") as (sock, _):
            stage(sock, [bytes(4 * PAGE)])


def test_who_is_promoted_finds_the_memory_of_the_dead(path):
    """The quota has room for one generation; the next writer allocates in the moment it is granted."""
    nbytes = 256 * 1024 * 1024
    with serving(path, quota_nbytes=nbytes):
        for _ in range(5):
            with connect(path) as waiter:
                with asking(path, "RW", wait_s=10) as (writer, _):
                    os.close(allocate(writer, nbytes))
                    send_message(waiter, Hello("RW", NAMESPACE, "k", 20.0), deadline=soon())
                assert answer(waiter).mode == "stage"
                os.close(allocate(waiter, nbytes))


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 64) - 1])
def test_more_than_the_machine_has_is_refused_with_numbers(path, server, nbytes):
    with asking(path, "RW") as (sock, _):
        refused = ask(sock, Allocate(nbytes))
        assert refused.kind == "memory"
        assert f"{nbytes:,} bytes does not fit in" in refused.reason
        stage(sock, CONTENTS)
        assert ask(sock, Commit("", b"")) == Committed(1)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_segment_has_at_least_a_byte(path, server, nbytes):
    with asking(path, "RW") as (sock, _):
        assert ask(sock, Allocate(nbytes)).kind == "protocol"
        stage(sock, CONTENTS)


def test_the_number_of_segments_is_bounded(path, monkeypatch):
    monkeypatch.setattr(store, "MAX_SEGMENTS", 3)
    with serving(path), asking(path, "RW") as (sock, _):
        stage(sock, [b"1", b"2", b"3"])
        assert "at most 3 segments" in ask(sock, Allocate(1)).reason
        assert ask(sock, Commit("", b"")) == Committed(1)


def test_more_segments_than_a_message_carries(path, server):
    contents = [struct.pack("I", number) for number in range(2 * 253 + 10)]
    with committed(path, contents):
        assert read_now(path) == (1, b"body", contents)


def test_a_generation_without_segments(path, server):
    with committed(path, []):
        assert read_now(path) == (1, b"body", [])


def test_what_somebody_can_still_write_is_not_committed(path, server):
    with asking(path, "RW") as (sock, _):
        stage(sock, CONTENTS)
        fd = allocate(sock, PAGE)
        with mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as view:
            view[:] = b"x" * PAGE
            refused = ask(sock, Commit("", b"body"))
            assert refused.kind == "memory"
            assert "maps it writable" in refused.reason
            assert read_now(path).kind == "busy"
        os.close(fd)
        assert ask(sock, Commit("", b"body")) == Committed(1)
        assert read_now(path) == (1, b"body", [*CONTENTS, b"x" * PAGE])


def test_what_a_writer_cut_is_not_committed(path, server):
    with asking(path, "RW") as (sock, _):
        fd = allocate(sock, PAGE)
        os.ftruncate(fd, 1)
        os.close(fd)

        assert "1 of 4,096 bytes are left" in ask(sock, Commit("", b"")).reason
    assert read_now(path).kind in ("missing", "busy")


# The hostile and the broken


@contextmanager
def hostile_sessions(path):
    """Connections that do all but what they should; each is open until the service ends it."""
    with ExitStack() as stack:

        def opened(*data):
            sock = stack.enter_context(connect(path))
            for each in data:
                sock.sendall(each)
            return sock

        yield [
            opened(),
            opened(b"\0\0"),
            opened(b"\xff\xff\xff\xff" + b"x" * 1000),
            opened(struct.pack(">I", 4097)),
            opened(struct.pack(">I", 100) + b"x" * 50),
            opened(struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1"),
            opened(b"GET / HTTP/1.1\r\n\r\n"),
            opened(frame(Allocate(PAGE))),
            opened(frame(Hello("RW", NAMESPACE, "", 0.0))),
            opened(frame(Hello("RW", NAMESPACE, "x" * 201, 0.0))),
            opened(frame(Hello("RW", NAMESPACE, "line\nbreak", 0.0))),
            opened(frame(Hello("RO", NAMESPACE, "k", float("nan")))),
            opened(frame(Hello("RO", NAMESPACE, "k", -1.0))),
            opened(frame(Hello("RO", NAMESPACE, "k", 0.0))),  # granted 600 segments, and takes none
            opened(frame(Hello("RO", NAMESPACE, "nothing", 9e9)), frame(Status())),
            opened(frame(Hello("RW", NAMESPACE, "a", 0.0)), frame(Allocate(PAGE)), b"\0\0"),
            opened(frame(Hello("RW", NAMESPACE, "b", 0.0)), frame(Allocate(PAGE)), struct.pack(">I", 60_000_000)),
            opened(frame(Hello("RW", NAMESPACE, "c", 0.0)), frame(Status())),
            opened(frame(Hello("RW", NAMESPACE, "d", 0.0)), frame(Commit("x" * 201, b"")), b"x"),
            opened(frame(Hello("RW", NAMESPACE, "e", 0.0)), frame(Commit("", b"")), frame(Status())),
        ]


def frame(message):
    data = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(data)) + data


def test_hostile_sessions_end_and_nobody_else_waits(path, server):
    contents = [struct.pack("I", number) for number in range(600)]
    with committed(path, contents):
        pass
    with hostile_sessions(path) as hostile:
        slowest, began = 0.0, time.monotonic()
        while any(not is_over(sock) for sock in hostile):
            at = time.monotonic()
            assert read_now(path)[2] == contents
            with asking(path, "RW", "good", wait_s=5) as (sock, granted):
                assert granted.mode == "stage"
                stage(sock, CONTENTS)
            slowest = max(slowest, time.monotonic() - at)
            assert time.monotonic() < began + 15, [is_over(sock) for sock in hostile]
        assert slowest < 3
    until(lambda: status(path).sessions == 1)


def is_over(sock):
    """Whether the other end closed, without reading what it said before."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


def test_there_is_a_limit_to_sessions(path, server):
    with committed(path, [b"x"]), ExitStack() as stack:
        for _ in range(MAX_SESSIONS - 1):
            _, granted = stack.enter_context(asking(path, "RO"))
            assert isinstance(granted, Granted)
        with connect(path) as sock:
            assert f"{MAX_SESSIONS} sessions" in answer(sock).reason
        stack.pop_all().close()
        until(lambda: isinstance(status_or_refusal(path), store.StatusReply))


def status_or_refusal(path):
    with connect(path) as sock:
        try:
            send_message(sock, Status(), deadline=soon())
        except store.GmsError:
            return None
        return answer(sock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_other_users_are_refused_even_if_they_reach_the_socket(path, server):
    path.parent.chmod(0o711)
    path.chmod(0o666)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(path.parent)
            os.setresuid(65534, 65534, 65534)
            with connect(path.name) as sock:
                code = 0 if "uid 65534 may not use the service of uid 0" in answer(sock).reason else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class FailingMemory(HostMemory):
    def allocate(self, nbytes):
        if nbytes == 13:
            raise RuntimeError("a bug")
        return super().allocate(nbytes)


def test_a_bug_costs_one_session(path, caplog):
    with serving(path, FailingMemory(), quota_nbytes=10 * PAGE), committed(path, CONTENTS, "other"):
        with asking(path, "RW") as (sock, _):
            assert ask(sock, Allocate(13)) is None
        with asking(path, "RW", wait_s=5) as (sock, _):
            stage(sock, CONTENTS)
        assert read_now(path, "other") == (1, b"body", CONTENTS)
    assert "a bug" in caplog.text


def test_a_service_without_descriptors_recovers(path):
    """Its limit is reached while clients come; they are served when others have left."""
    with running("serve", path, 0, 30) as server:
        psutil.Process(server.pid).rlimit(psutil.RLIMIT_NOFILE, (20, 20))
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(connect(path))
            time.sleep(0.3)
            assert psutil.Process(server.pid).cpu_percent(0.3) < 50
        until(lambda: isinstance(status_or_refusal(path), store.StatusReply))


def test_refusals_commits_and_ends_are_logged(path, caplog):
    caplog.set_level(logging.INFO)
    with serving(path):
        with committed(path, CONTENTS, label="a model"):
            read_now(path, "missing")
        with connect(path) as sock:
            ask(sock, Drop(NAMESPACE, "k"))

    assert "committed generation 1 (a model), 2 segments" in caplog.text
    assert f"refused pid {os.getpid()}: nothing is committed for tests/missing" in caplog.text
    assert "tests/k: dropped" in caplog.text
    assert "freed generation 1" in caplog.text


@pytest.mark.parametrize("quota", [0, -5])
def test_a_quota_is_positive(path, quota):
    with pytest.raises(ConfigError, match="quota"):
        GmsServer(path, HostMemory(), quota_nbytes=quota)
    assert os.listdir(path.parent) == []
