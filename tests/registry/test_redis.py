"""The Redis registry: leases that run out, servers that lose, stop, refuse and hold garbage."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

from modelexpress.errors import RegistryError
from modelexpress.registry.base import MAX_RECORD_NBYTES
from tests.registry.conftest import RedisStore
from tests.support.redis_server import RedisServer, free_port
from tests.support.registry_process import KEY, record_of, running

pytestmark = pytest.mark.redis

# A frozen or missing server is noticed within timeout_s; the rest is for two busy cores.
SLACK_S = 1.5


@pytest.fixture
def store(shared_redis, redis_client):
    return RedisStore(shared_redis.url, redis_client)


def wait_until(true, *, within_s):
    give_up = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < give_up, f"still false after {within_s} s"
        time.sleep(0.02)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_publisher_that_ends_without_a_word_is_found_until_its_lease_runs_out(store, other, record, end):
    with running("publish", store.url, record.source_id, lease_s=1.0) as (process, _):
        time.sleep(1.2)
        [found] = other.find(KEY)
        os.kill(process.pid, end)

        wait_until(lambda: other.find(KEY) == [], within_s=2.0)
        assert not other.stands(found.record)
        assert store.client.keys("mx1:*") == []


def test_killed_readers_lease_runs_out(store, registry, record):
    sealed = registry.publish(record, b"offer")
    with running("read", store.url, "-", lease_s=1.0) as (process, _):
        assert registry.readers(sealed) == 1
        process.kill()

        wait_until(lambda: registry.readers(sealed) == 0, within_s=2.0)


def test_renewing_keeps_a_source_beyond_its_lease(store, connect, other, record):
    publisher = connect(store.url, lease_ttl_s=0.5)
    sealed = publisher.publish(record, b"offer")

    for _ in range(8):
        time.sleep(0.1)
        publisher.renew(sealed, b"offer")

    assert other.stands(sealed)
    assert other.offer(sealed) == b"offer"
    assert len(other.find(KEY)) == 1


def test_publication_comes_back_after_its_lease_ran_out(store, connect, other, record):
    publisher = connect(store.url, lease_ttl_s=0.1)
    sealed = publisher.publish(record, b"offer")
    time.sleep(0.2)
    assert other.find(KEY) == []

    publisher.renew(sealed, b"offer")

    assert [each.record for each in other.find(KEY)] == [sealed]


def test_lost_offer_is_stored_again(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    store.client.delete(*store.client.keys("mx1:offer:*"))

    registry.renew(sealed, b"offer")

    assert other.offer(sealed) == b"offer"


def test_renew_writes_no_record(store, registry, record):
    sealed = registry.publish(record, b"offer")
    store.client.config_resetstat()

    registry.renew(sealed, b"offer")

    assert "cmdstat_set" not in store.client.info("commandstats")


def test_dead_members_leave_the_index(store, connect, registry, record):
    sealed = registry.publish(record, b"offer")
    connect(store.url, lease_ttl_s=0.1).publish(record_of("1" * 32), b"offer")
    time.sleep(0.2)
    registry.renew(sealed, b"offer")

    for index in (f"mx1:index:{KEY}", "mx1:sources"):
        assert store.client.zrange(index, 0, -1) == [record.source_id.encode()]


def test_publication_survives_a_restart_of_the_server(redis_server, connect, record):
    registry, other = connect(redis_server.url), connect(redis_server.url)
    sealed = registry.publish(record, b"offer")
    redis_server.restart()
    assert other.find(KEY) == []

    registry.renew(sealed, b"offer")

    assert [each.record for each in other.find(KEY)] == [sealed]
    assert other.offer(sealed) == b"offer"


def test_short_absence_of_the_server_is_waited_out(redis_server, connect):
    registry = connect(redis_server.url, timeout_s=15)
    redis_server.stop()
    back = threading.Timer(0.3, redis_server.start)
    back.start()

    assert registry.find(KEY) == []
    back.join(10)


@pytest.mark.parametrize("ending", ["stop", "freeze"])
def test_dead_server_is_an_error_in_time(redis_server, connect, record, ending):
    timeout_s = 0.9
    registry = connect(redis_server.url, timeout_s=timeout_s)
    sealed = registry.publish(record, b"offer")
    registry.withdraw(sealed)
    getattr(redis_server, ending)()

    for call in (lambda: registry.find(KEY), lambda: registry.stands(sealed), lambda: registry.offer(sealed)):
        begun = time.monotonic()
        with pytest.raises(RegistryError, match="see whether it runs"):
            call()
        assert time.monotonic() - begun < timeout_s + SLACK_S


def test_failed_withdrawal_says_how_long_the_source_may_be_found(redis_server, connect, record):
    registry = connect(redis_server.url, timeout_s=0.5, lease_ttl_s=17)
    sealed = registry.publish(record, b"offer")
    redis_server.freeze()

    with pytest.raises(RegistryError, match="may be found for another 17 s"):
        registry.withdraw(sealed)
    redis_server.thaw()
    registry.withdraw(sealed)
    assert registry.lease_ttl_s == 17
    assert not registry.stands(sealed)


def test_publication_that_was_given_up_never_appears_later(redis_server, connect, record):
    """The commands lie in the frozen server's socket, and it carries them out when it wakes."""
    registry, other = connect(redis_server.url, timeout_s=0.6), connect(redis_server.url)
    registry.find(KEY)
    redis_server.freeze()
    with pytest.raises(RegistryError):
        registry.publish(record, b"offer")
    redis_server.thaw()

    for _ in range(10):
        assert other.find(None) == []
        time.sleep(0.02)


def test_publish_script_that_comes_late_is_not_carried_out(redis_server, connect, record, monkeypatch):
    """As above, with the server frozen between its clock's answer and the script."""
    registry, other = connect(redis_server.url, timeout_s=0.6), connect(redis_server.url)
    clock = registry._redis.time

    def freeze_after_the_clock():
        answer = clock()
        redis_server.freeze()
        return answer

    monkeypatch.setattr(registry._redis, "time", freeze_after_the_clock)
    monkeypatch.setattr(registry, "_take_back", lambda _: None)
    with pytest.raises(RegistryError):
        registry.publish(record, b"offer")
    redis_server.thaw()
    time.sleep(0.2)

    assert other.find(None) == []


def test_lease_that_cannot_be_given_back_does_not_fail_the_read(redis_server, connect, record, caplog):
    registry = connect(redis_server.url, timeout_s=0.3)
    sealed = registry.publish(record, b"offer")

    with registry.reading(sealed, lease_s=5):
        redis_server.freeze()
    redis_server.thaw()

    assert "was not given back" in caplog.text
    registry.withdraw(sealed)


def test_closing_without_a_server_says_so_and_closes(redis_server, connect, record):
    registry = connect(redis_server.url, timeout_s=0.3)
    registry.publish(record, b"offer")
    redis_server.stop()

    with pytest.raises(RegistryError, match="may be found for another"):
        registry.close()
    with pytest.raises(RegistryError, match="closed"):
        registry.find(KEY)


@pytest.mark.parametrize("given", ["wr0ng", None])
def test_wrong_password_is_said_at_once_and_shown_nowhere(tmp_path, connect, caplog, given):
    caplog.set_level(logging.DEBUG)
    with RedisServer(tmp_path, password="s3cret") as server:
        begun = time.monotonic()
        with pytest.raises(RegistryError, match="user and password") as caught:
            connect(server.url_with(given), timeout_s=20).find(KEY)

        assert time.monotonic() - begun < 5
        assert connect(server.url).find(KEY) == []
    shown = caplog.text + "".join(traceback.format_exception(caught.value))
    assert "wr0ng" not in shown
    assert "s3cret" not in shown


def test_password_that_a_server_repeats_is_shown_nowhere(tmp_path, connect):
    """A server without AUTH answers "unknown command 'AUTH', with args beginning with: <password>"."""
    written, meant = "s3%2Fcret", "s3/cret"
    with (
        RedisServer(tmp_path, config=('rename-command AUTH ""',)) as server,
        pytest.raises(RegistryError, match="unknown command") as caught,
    ):
        connect(server.url_with(written)).find(KEY)

    shown = "".join(traceback.format_exception(caught.value))
    assert written not in shown
    assert meant not in shown


def test_user_without_permission_is_told_what_is_needed(store, shared_redis, connect):
    store.client.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~mx1:*", "+ping", "+get")
    try:
        guest = connect(f"redis://guest:pw@127.0.0.1:{shared_redis.port}/0")
        with pytest.raises(RegistryError, match="does not allow it"):
            guest.find(KEY)
    finally:
        store.client.execute_command("ACL", "DELUSER", "guest")


def test_documented_permissions_are_enough(store, shared_redis, connect, record):
    store.client.execute_command(
        "ACL SETUSER", "member", "on", ">pw", "~mx1:*", "+@read", "+@write", "+time", "+eval", "-@dangerous"
    )
    try:
        member = connect(f"redis://member:pw@127.0.0.1:{shared_redis.port}/0")
        sealed = member.publish(record, b"offer")
        with member.reading(sealed, lease_s=30):
            member.renew(sealed, b"offer")
            assert [each.readers for each in member.find(KEY)] == [1]
            assert member.offer(sealed) == b"offer"
        member.withdraw(sealed)
    finally:
        store.client.execute_command("ACL", "DELUSER", "member")


def test_full_server_is_an_error_that_says_so(redis_server, connect, record):
    registry = connect(redis_server.url)
    with redis_server.client as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(RegistryError, match="maxmemory"):
            registry.publish(record, b"offer")
        client.config_set("maxmemory", 0)
    assert registry.find(None) == []


def test_server_that_is_no_redis_is_an_error(connect):
    code = (
        "import socket\n"
        "with socket.create_server(('127.0.0.1', 0)) as s:\n"
        "    print(s.getsockname()[1], flush=True)\n"
        "    while True:\n"
        "        c, _ = s.accept(); c.recv(100); c.sendall(b'HTTP/1.1 400 Bad Request\\r\\n\\r\\n'); c.close()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            with pytest.raises(RegistryError, match=f"127.0.0.1:{port}"):
                connect(f"redis://127.0.0.1:{port}").find(KEY)
        finally:
            server.kill()


def test_values_of_other_types_are_ignored(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    [listed, huge, missing, odd] = ["1" * 32, "2" * 32, "3" * 32, "not an id"]
    store.client.rpush(f"mx1:record:{listed}", "x")
    store.client.set(f"mx1:record:{huge}", b"x" * (MAX_RECORD_NBYTES + 1))
    store.client.set(f"mx1:readers:{record.source_id}", "x")
    store.client.zadd("mx1:sources", dict.fromkeys([listed, huge, missing, odd], 9e15))

    found = other.find(None)

    assert [each.record for each in found] == [sealed]
    assert [each.readers for each in found] == [0]


@pytest.mark.parametrize("key", ["mx1:sources", "mx1:offer", "mx1:readers"])
def test_wrong_type_where_one_is_needed_is_a_registry_error(store, registry, record, key):
    sealed = registry.publish(record, b"offer")
    [name] = [key] if key == "mx1:sources" else store.client.keys(f"{key}:*") or [f"{key}:{record.source_id}"]
    store.client.delete(name)
    store.client.rpush(name, "x")
    calls = {
        "mx1:sources": lambda: registry.find(None),
        "mx1:offer": lambda: registry.offer(sealed),
        "mx1:readers": lambda: registry.readers(sealed),
    }

    with pytest.raises(RegistryError, match="WRONGTYPE"):
        calls[key]()
    store.client.delete(name)


def test_record_of_wrong_type_is_replaced_by_the_next_renewal(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    [key] = store.client.keys("mx1:record:*")
    store.client.delete(key)
    store.client.rpush(key, "x")
    assert not other.stands(sealed)

    registry.renew(sealed, b"offer")

    assert other.stands(sealed)


def test_unix_socket_works(tmp_path, connect, record):
    with RedisServer(tmp_path, config=(f"unixsocket {tmp_path}/s",)):
        for scheme in ("unix", "redis+unix"):
            registry = connect(f"{scheme}://{tmp_path}/s")
            sealed = registry.publish(record, b"offer")
            assert registry.stands(sealed)
            registry.withdraw(sealed)


def test_tls_works_and_checks_the_certificate(tmp_path, connect, record):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    making = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=mx -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*making.split(), "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    port = free_port()
    tls = (f"tls-port {port}", f"tls-cert-file {cert}", f"tls-key-file {key}", "tls-auth-clients no")
    with RedisServer(tmp_path, config=tls):
        registry = connect(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}")
        sealed = registry.publish(record, b"offer")
        assert registry.stands(sealed)
        registry.withdraw(sealed)
        with pytest.raises(RegistryError, match="certificate"):
            connect(f"rediss://127.0.0.1:{port}/0").find(KEY)


def test_tls_password_user_and_certificate_work_together(tmp_path, connect, record, caplog):
    """The whole door: the server's certificate and ours, a user of its own, and no other user left."""
    caplog.set_level(logging.DEBUG)
    made = {}
    for name in ("ca", "server", "reader"):
        key, cert = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        signed = [] if name == "ca" else ["-CA", made["ca"][1], "-CAkey", made["ca"][0]]
        making = (
            f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
        )
        subprocess.run(
            [*making.split(), *signed, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60
        )
        made[name] = (key, cert)
    (_, ca), (server_key, server), (reader_key, reader) = made.values()
    port = free_port()
    config = (
        f"tls-port {port}", f"tls-cert-file {server}", f"tls-key-file {server_key}", f"tls-ca-cert-file {ca}",
        "tls-auth-clients yes", "user fleet on >fl33t-s3cret ~mx1:* -@all +@scripting +@read +@write +time +ping",
    )  # fmt: skip
    options = f"?ssl_ca_certs={ca}&ssl_certfile={reader}&ssl_keyfile={reader_key}"
    with RedisServer(tmp_path, config=config) as running:
        with running.client as client:
            client.execute_command("ACL", "SETUSER", "default", "off")
        registry = connect(f"rediss://fleet:fl33t-s3cret@127.0.0.1:{port}/0{options}")
        sealed = registry.publish(record, b"offer")

        assert [each.record for each in registry.find(KEY)] == [sealed]
        assert registry.offer(sealed) == b"offer"
        with registry.reading(sealed, lease_s=5):
            assert registry.readers(sealed) == 1
        registry.withdraw(sealed)
        shown = []
        for url, match in (
            (f"rediss://fleet:wr0ng-s3cret@127.0.0.1:{port}/0{options}", "user and password"),
            (f"rediss://127.0.0.1:{port}/0{options}", "user and password"),
            (f"rediss://fleet:fl33t-s3cret@127.0.0.1:{port}/0?ssl_ca_certs={ca}", "no connection"),
            (f"rediss://fleet:fl33t-s3cret@127.0.0.1:{port}/0", "certificate"),
            (f"redis://fleet:fl33t-s3cret@127.0.0.1:{port}/0", "no connection|did not answer|answered"),
        ):
            with pytest.raises(RegistryError, match=match) as caught:
                connect(url).find(KEY)
            shown += traceback.format_exception(caught.value)
    assert "s3cret" not in caplog.text + "".join(shown)
