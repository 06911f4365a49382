"""What a standby does, against a small server in the place of SGLang's; the whole is in test_failover.py."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from modelexpress.config import Config
from modelexpress.engines.sglang.failover import Watch, claim, server_of, watch
from modelexpress.errors import ConfigError, NotAvailable
from modelexpress.gms.client import Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.takeover_lock import TakeoverLock, look
from tests.sglang.sources import keeping
from tests.support.takeover_process import wanting

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(60)]

SOON_S = 15.0
FALL_ASLEEP = ["/pause_generation", "/release_memory_occupation", "/continue_generation"]
WAKE = "/resume_memory_occupation"


def soon(happened):
    give_up = time.monotonic() + SOON_S
    while not (found := happened()):
        assert time.monotonic() < give_up
        time.sleep(0.005)
    return found


class Standin(ThreadingHTTPServer):
    """Answers the routes that a standby uses, and remembers in what order it was asked, and with which key."""

    daemon_threads = True

    def __init__(self, *, starts_up_for=0, refused=None, tls=None):
        super().__init__(("127.0.0.1", 0), Answer)
        self.asleep = False
        self.half_awake = False  # the first rank woke, and the server says that it failed
        self.starts_up_for = starts_up_for  # health checks
        self.refused = refused or {}
        self.asked = []
        self.keys = set()
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    @property
    def moves(self):
        """What changed something; health checks do not."""
        return [path for path in self.asked if path != "/health"]

    def arguments(self, **more):
        return {"host": "127.0.0.1", "port": self.server_address[1], "served_model_name": "m", **more}


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.starts_up_for -= 1
        self._answer(200 if self.server.starts_up_for < 0 else 503)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in self.server.refused:
            if self.path == WAKE and self.server.half_awake:
                self.server.asleep = False
            self._answer(503, self.server.refused[self.path])
            return
        if "memory" in self.path:
            assert body == {"tags": ["weights"]}
            self.server.asleep = self.path != WAKE
        self._answer(200)

    def _answer(self, status, said=""):
        self.server.asked.append(self.path)
        self.server.keys.add(self.headers["Authorization"])
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving(**options):
    with Standin(**options) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def standing_by(path, server, *, taken=None, refuses=None, **arguments):
    lock = TakeoverLock(path)
    if look(path).held:
        assert not lock.try_take()  # as `claim` did
    watching = Watch(
        lock,
        server_of(server.arguments(**arguments)),
        serves="m",
        refuses=refuses or (lambda: "asleep" if server.asleep else None),
        taken=taken,
        patience_s=5.0,
    ).start()
    try:
        yield watching
    finally:
        watching.stop()
        lock.release()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.lock"


# --- asleep, and awake when the owner dies


def test_it_sleeps_when_the_server_is_ready_and_wakes_when_the_owner_is_killed(path, caplog):
    caplog.set_level(logging.INFO)
    taken = threading.Event()
    with (
        wanting("take", path) as owner,
        serving(starts_up_for=2) as server,
        standing_by(path, server, taken=taken.set) as watching,
    ):
        soon(lambda: "stands by" in caplog.text)
        assert server.asked == ["/health"] * 3 + FALL_ASLEEP
        assert server.asleep
        owner.kill()
        soon(lambda: not watching.watching)

        assert server.moves == [*FALL_ASLEEP, WAKE]
        assert server.asked[-1] == "/health"
        assert taken.is_set()
        seen = look(path)

    assert (seen.held, seen.owner.pid, seen.owner.serves) == (True, os.getpid(), "m")
    assert seen.owner.url == f"http://127.0.0.1:{server.server_address[1]}"
    assert seen.owner.took_over_from == f"{socket.gethostname()}/{owner.pid}"
    assert 0 < seen.owner.weights_s < seen.owner.answered_s
    assert f"took over from {seen.owner.took_over_from}: weights after" in caplog.text


def test_of_two_standbys_one_takes_over_and_the_other_when_that_one_is_gone(path):
    with (
        wanting("take", path) as owner,
        serving() as one,
        serving() as two,
        standing_by(path, one) as first,
        standing_by(path, two) as second,
    ):
        soon(lambda: one.asleep and two.asleep)
        owner.kill()
        soon(lambda: not first.watching or not second.watching)
        time.sleep(0.2)

        assert one.asleep != two.asleep
        assert first.watching != second.watching
        awake = second if first.watching else first
        awake._lock.release()
        soon(lambda: not first.watching and not second.watching)
        assert not one.asleep
        assert not two.asleep


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ({}, None),
        ({"api_key": "k"}, "Bearer k"),
        ({"admin_api_key": "a"}, "Bearer a"),
        ({"api_key": "k", "admin_api_key": "a"}, "Bearer a"),
    ],
)
def test_the_key_of_the_server_is_sent_and_never_shown(arguments, sent, path, caplog):
    caplog.set_level(logging.DEBUG)
    with wanting("take", path), serving() as server, standing_by(path, server, **arguments):
        soon(lambda: server.asleep)

    assert server.keys == {sent}
    assert "Bearer" not in caplog.text
    assert "'k'" not in repr(server_of(server.arguments(**arguments)))


def test_https_with_a_certificate_that_the_server_signed_itself(path, tmp_path):
    import ssl

    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=m"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    subprocess.run([*made, *names, *files], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    certificate = str(tmp_path / "certificate")
    for arguments in ({"ssl_certfile": certificate}, {"ssl_certfile": certificate, "ssl_ca_certs": certificate}):
        with wanting("take", path), serving(tls=tls) as server, standing_by(path, server, **arguments):
            soon(lambda server=server: server.asleep)


def test_a_release_that_is_refused_is_tried_again(path, caplog):
    caplog.set_level(logging.INFO)
    with wanting("take", path), serving(refused={FALL_ASLEEP[1]: "busy"}) as server, standing_by(path, server):
        soon(lambda: server.asked.count(FALL_ASLEEP[1]) > 2)
        assert server.asked.count("/continue_generation") >= 2
        server.refused.clear()
        soon(lambda: server.asleep)

    assert caplog.text.count("/release_memory_occupation answered 503: busy") == 1


def test_a_file_that_cannot_be_written_does_not_keep_a_standby_from_serving(path, caplog):
    """As on a full disk: nothing can be written from here on."""
    with wanting("take", path) as owner, serving() as server, standing_by(path, server) as watching:
        soon(lambda: server.asleep)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            owner.kill()
            soon(lambda: not watching.watching)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        assert not server.asleep
        assert look(path).held
        assert "could not say so" in caplog.text


@pytest.mark.parametrize("startup", [10**9, 0])
def test_stopped_it_ends_whatever_it_waits_for(startup, path):
    with wanting("take", path), serving(starts_up_for=startup) as server, standing_by(path, server) as watching:
        soon(lambda: server.asked)
        watching.stop()

        assert not watching.watching
        assert not [each for each in threading.enumerate() if each.name == "mx-standby"]


# --- a takeover that fails


def test_a_refused_takeover_gives_the_lock_back_and_another_standby_gets_it(path, caplog):
    with (
        wanting("take", path) as owner,
        serving(refused={WAKE: "generation 1 is gone"}) as stale,
        standing_by(path, stale) as first,
    ):
        soon(lambda: stale.asleep)
        owner.kill()
        soon(lambda: not first.watching)

        assert "could not take over, and gave" in caplog.text
        assert "answered 503: generation 1 is gone" in caplog.text
        assert stale.asleep
        assert (look(path).held, look(path).owner) == (False, None)
        with serving() as good, standing_by(path, good) as second:
            soon(lambda: not second.watching)
            assert look(path).owner.took_over_from is None
        assert stale.moves == [*FALL_ASLEEP, WAKE]


def test_half_an_engine_goes_back_to_sleep(path, caplog):
    with wanting("take", path) as owner, serving(refused={WAKE: "rank 1 has no memory"}) as server:
        server.half_awake = True
        with standing_by(path, server) as watching:
            soon(lambda: server.asleep)
            owner.kill()
            soon(lambda: not watching.watching)

            assert server.moves == [*FALL_ASLEEP, WAKE, *FALL_ASLEEP]
            assert server.asleep
            assert not look(path).held


def test_a_server_that_says_it_resumed_and_has_no_weights_is_not_believed(path, caplog):
    with (
        wanting("take", path) as owner,
        serving() as server,
        standing_by(path, server, refuses=lambda: "the weights are lost" if server.moves else None) as watching,
    ):
        soon(lambda: server.asleep)
        owner.kill()
        soon(lambda: not watching.watching)

        assert "NotAvailable: the weights are lost" in caplog.text
        assert not look(path).held


# --- not what it seems


def test_a_server_of_somebody_else_on_the_port_is_left_alone(path, caplog, tmp_path):
    """An engine without a server of its own has a port in its arguments all the same."""
    caplog.set_level(logging.INFO)
    (tmp_path / "health").write_text("fine")
    program = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", tmp_path]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        try:
            port = int(other.stdout.readline().split(" port ")[1].split()[0])
            arguments = {"host": "127.0.0.1", "port": port}
            watching = Watch(
                TakeoverLock(path), server_of(arguments), serves="m", refuses=lambda: None, patience_s=5.0
            ).start()
            soon(
                lambda: f"pid {other.pid} listens on port {port}, and this process is not of that server" in caplog.text
            )
            time.sleep(0.5)
            watching.stop()
        finally:
            other.kill()
            _, requests = other.communicate()

    assert "POST" not in requests
    assert "GET" not in requests
    assert not look(path).held


def test_a_lock_that_becomes_something_else_is_named_and_waited_for(path, caplog):
    with wanting("take", path) as owner, serving() as server, standing_by(path, server) as watching:
        soon(lambda: server.asleep)
        path.unlink()
        path.mkdir()
        soon(lambda: "was deleted or replaced while its owner holds it" in caplog.text)
        owner.kill()
        soon(lambda: f"{path} is a directory" in caplog.text)
        assert watching.watching
        path.rmdir()
        soon(lambda: not watching.watching)

        assert look(path).owner.pid == os.getpid()


# --- who is what


KEY = "k" * 64


@pytest.fixture
def config(tmp_path, path):
    return Config(gms=str(tmp_path / "gms.sock"), takeover_lock=str(path), publish=True, transfer_timeout_s=20.0)


def arguments_of(**more):
    return lambda: {"host": "0.0.0.0", "port": 30000, "served_model_name": "m", **more}


def claimed(config, **more):
    return claim(config, lambda: KEY, arguments_of(**more))


def commit(path):
    with open_session(Where(path, KEY), "RW", HostMemory(), wait_s=0.0) as staging:
        staging.commit("m", b"").close()


def test_without_a_lock_there_is_no_role(config):
    assert claim(replace(config, takeover_lock=None), None, None) is None


def test_the_first_is_the_primary_and_loads_as_it_was_told(config, path):
    role = claimed(config)

    assert (role.kind, role.config, role.wanted) == ("primary", config, config)
    seen = look(path)
    assert (seen.held, seen.owner.pid) == (True, os.getpid())
    assert seen.owner.url == f"http://{socket.gethostname()}:30000"
    assert watch(role, refuses=None) is None
    role.lock.release()


def test_the_next_is_a_standby_of_what_is_committed(config, path, caplog):
    caplog.set_level(logging.INFO)
    with wanting("take", path) as owner, keeping(config.gms):
        commit(config.gms)
        role = claimed(config)

    assert role.kind == "standby"
    assert (role.config.strategies, role.config.publish, role.wanted) == (("gms",), False, config)
    assert f"standby of {socket.gethostname()}/{owner.pid}" in caplog.text


def test_a_standby_waits_for_the_commit(config, path):
    with wanting("take", path), keeping(config.gms):
        later = threading.Timer(0.5, commit, [config.gms])
        later.start()
        began = time.monotonic()
        role = claimed(config)
        later.join()

    assert role.kind == "standby"
    assert time.monotonic() - began > 0.4


def test_an_owner_that_dies_before_its_commit_is_followed_by_a_primary(config, path):
    with wanting("take", path) as owner:
        later = threading.Timer(0.3, owner.kill)
        later.start()
        role = claimed(config)
        later.join()

    assert role.kind == "primary"
    role.lock.release()


@pytest.mark.parametrize("service", [True, False])
def test_nothing_to_stand_by_with(service, config, path, tmp_path):
    config = replace(config, transfer_timeout_s=0.2)
    reason = "has no commit of kkkkkkkkkkkkkkkk" if service else "no memory service is running"
    with wanting("take", path) as owner:
        if service:
            with keeping(config.gms), pytest.raises(NotAvailable, match=reason) as caught:
                claimed(config)
        else:
            with pytest.raises(NotAvailable, match=reason) as caught:
                claimed(config)

    assert f"/{owner.pid} holds {path}" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"dp_size": 2}, "dp_size 2: the replicas of one server"),
        ({"nnodes": 2}, "nnodes above 1"),
        ({"speculative_algorithm": "EAGLE"}, "a draft model is not imported"),
        ({"grpc_mode": True}, "gRPC"),
        ({"smg_grpc_mode": True}, "gRPC"),
    ],
)
def test_servers_that_cannot_stand_by_end_before_they_lock(more, reason, config, path):
    with pytest.raises(ConfigError, match=reason):
        claimed(config, **more)
    assert not path.exists()


def test_settings_that_do_not_go_with_it(config, path, tmp_path):
    with pytest.raises(ConfigError, match="publish is not"):
        claimed(replace(config, publish=False))
    with pytest.raises(ConfigError, match="is a directory"):
        claimed(replace(config, takeover_lock=str(tmp_path)))
    assert not path.exists()


def test_replicas_inside_one_engine_are_one(config):
    role = claimed(config, dp_size=2, enable_dp_attention=True)

    assert role.kind == "primary"
    role.lock.release()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        (None, "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("::1", "http://[::1]:1"),
        ("[fe80::1]", "http://[fe80::1]:1"),
        ("host-a", "http://host-a:1"),
    ],
)
def test_the_address_of_the_server(host, url):
    assert server_of({"host": host, "port": 1}).url == url
