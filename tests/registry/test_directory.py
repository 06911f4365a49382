"""The directory registry: who is dead, what is garbage, who may write."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from modelexpress.errors import RegistryError
from modelexpress.registry import locked_file
from modelexpress.registry.locked_file import create
from tests.registry.conftest import DirectoryStore
from tests.support.registry_process import KEY, record_of, running

DIGEST = "0" * 16


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "registry")


def run(code, *argv):
    """Run a script that fails by itself when something is wrong."""
    subprocess.run([sys.executable, "-c", code, *argv], check=True, timeout=60)


def test_killed_publisher_is_not_found_from_then_on(store, other, record):
    with running("publish", store.url, record.source_id) as (process, _):
        [found] = other.find(KEY)
        process.kill()
        process.wait(10)

        assert not other.stands(found.record)
        assert other.find(KEY) == []
        assert list(store.folder.iterdir()) == []


def test_killed_and_not_reaped_publisher_is_not_found(store, other, record):
    with running("publish", store.url, record.source_id) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert other.find(KEY) == []


def test_child_that_outlives_its_publisher_does_not_keep_it_alive(store, other, record):
    with running("fork", store.url, record.source_id) as (process, child):
        try:
            [found] = other.find(KEY)
            process.kill()
            process.wait(10)

            os.kill(int(child), 0)
            assert not other.stands(found.record)
            assert other.find(KEY) == []
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_stopped_publisher_is_alive(store, other, record):
    with running("publish", store.url, record.source_id) as (process, _):
        os.kill(process.pid, signal.SIGSTOP)

        assert len(other.find(KEY)) == 1


def test_killed_readers_lease_ends_at_once(store, registry, record):
    sealed = registry.publish(record, b"offer")
    with running("read", store.url, "-") as (process, _):
        assert registry.readers(sealed) == 1
        process.kill()
        process.wait(10)

        assert registry.readers(sealed) == 0
    assert list(store.folder.glob("*.lease")) == []


def test_withdrawn_source_is_gone_even_if_a_child_holds_its_locks(store, other, record):
    with running("fork", store.url, record.source_id) as (_, child):
        [found] = other.find(KEY)
        other.withdraw(found.record)
        os.kill(int(child), signal.SIGKILL)

        assert other.find(None) == []


def test_finders_never_remove_a_live_source(store, connect):
    """Finders clean up after dead publishers while a live one comes, goes and comes back."""
    publisher = connect(store.url)
    ended = threading.Event()
    failures = []

    def look():
        finder = connect(store.url)
        while not ended.is_set():
            finder.find(None)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for generation in range(100):
            litter(store.folder)
            sealed = publisher.publish(record_of("1" * 32, generation=generation), b"offer")
            if not publisher.stands(sealed) or publisher.offer(sealed) != b"offer":
                failures.append(generation)
    finally:
        ended.set()
        for thread in threads:
            thread.join(10)
    assert failures == []
    assert [each.record for each in publisher.find(None)] == [sealed]
    assert len(list(store.folder.iterdir())) == 2


def test_finder_is_not_taken_for_a_publisher(store, connect, other, record):
    """Both hold a lock on the same dead record for a moment."""
    publisher = connect(store.url)
    publisher.publish(record, b"offer")
    [path] = store.folder.glob("*.record")
    data = path.read_bytes()
    publisher.close()
    path.write_bytes(data)

    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert other.find(None) == []
    assert list(store.folder.iterdir()) == []


def test_link_to_a_live_record_is_not_followed(store, connect, tmp_path, other, record):
    elsewhere = DirectoryStore(tmp_path / "elsewhere")
    connect(elsewhere.url).publish(record, b"offer")
    for path in elsewhere.folder.iterdir():
        (store.folder / path.name).symlink_to(path)

    assert other.find(None) == []
    assert len(list(elsewhere.folder.iterdir())) == 2


def test_finder_that_opened_a_lost_file_leaves_the_new_one_of_that_name(store, registry, other, record, monkeypatch):
    """The publisher loses its files and makes them again between a finder's open and its look at the lock."""
    sealed = registry.publish(record, b"offer")

    def open_then_lose(path):
        fd = open_foreign(path)
        monkeypatch.setattr(locked_file, "_open_foreign", open_foreign)
        store.lose()
        registry.renew(sealed, b"offer")
        return fd

    open_foreign = locked_file._open_foreign
    monkeypatch.setattr(locked_file, "_open_foreign", open_then_lose)
    other.find(None)

    assert [each.record for each in other.find(None)] == [sealed]


def litter(folder):
    for kind in ("record", "offer", "lease"):
        (folder / f"{secrets.token_hex(16)}.{DIGEST}.{kind}").write_bytes(b"x" * 100)


def test_removing_a_lost_file_leaves_the_new_one_of_that_name(tmp_path):
    path = tmp_path / "file"
    lost = create(path, b"1")
    path.unlink()
    new = create(path, b"2")

    lost.remove()

    assert new.in_place()
    new.remove()
    assert not path.exists()


def test_garbage_is_ignored_and_hangs_nobody(store, registry, other, record, caplog, monkeypatch):
    monkeypatch.chdir(store.folder)  # the path of a socket is short
    sealed = registry.publish(record, b"offer")
    names = iter(store.folder / f"{secrets.token_hex(16)}.{DIGEST}.{kind}" for kind in ("record", "offer", "lease") * 5)
    for _ in range(3):
        os.mkfifo(next(names))
        next(names).mkdir()
        next(names).symlink_to("/dev/zero")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(next(names).name)
    (store.folder / "notes.txt").write_text("mine")

    with caplog.at_level(logging.DEBUG):
        assert [each.record for each in other.find(None)] == [sealed]
    assert (store.folder / "notes.txt").exists()
    assert "not a regular file" in caplog.text
    assert "notes.txt" in caplog.text


def test_huge_record_is_not_read(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    huge = create(store.folder / f"{secrets.token_hex(16)}.{DIGEST}.record", b"")
    os.truncate(huge.path, 1 << 40)

    assert [each.record for each in other.find(None)] == [sealed]
    huge.remove()


def test_file_under_another_name_is_not_used(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    [path] = store.folder.glob("*.record")
    os.link(path, store.folder / f"{'2' * 32}.{path.name.split('.')[1]}.record")
    os.link(path, store.folder / f"{record.source_id}.{DIGEST}.record")

    assert [each.record for each in other.find(None)] == [sealed]


def test_unfinished_files_are_removed_when_they_are_old(store, registry):
    fresh, old = (store.folder / f".{number}.record.tmp" for number in range(2))
    for path in (fresh, old):
        path.write_bytes(b"part")
    os.utime(old, (time.time() - 3600,) * 2)

    assert registry.find(None) == []
    assert list(store.folder.iterdir()) == [fresh]


def test_only_its_user_can_read_it(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    with other.reading(sealed, lease_s=30):
        modes = {path.name.rpartition(".")[2]: stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()}

    assert modes == {"record": 0o600, "offer": 0o600, "lease": 0o600}
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_directory_that_others_can_write_to_needs_a_signing_key(store, connect, record, mode):
    store.folder.mkdir()
    store.folder.chmod(mode)

    with pytest.raises(RegistryError, match="signing key"):
        connect(store.url)
    signed = connect(store.url, signing_key=b"secret")
    signed.publish(record, b"offer")
    assert len(signed.find(None)) == 1


def test_directory_that_others_can_write_to_later_is_not_used(store, registry, record):
    registry.publish(record, b"offer")
    store.folder.chmod(0o777)

    with pytest.raises(RegistryError, match="mode 0777"):
        registry.find(None)


def test_directory_that_went_away_is_made_again(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    store.lose()
    store.folder.rmdir()

    assert other.find(None) == []
    registry.renew(sealed, b"offer")
    assert [each.record for each in other.find(None)] == [sealed]


@pytest.mark.parametrize("place", ["file", "file/below", "loop"])
def test_what_is_no_directory_is_named(tmp_path, connect, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(RegistryError, match=str(tmp_path / place)):
        connect(f"file://{tmp_path / place}")


def test_full_disk_and_full_tables_are_registry_errors(store):
    run(
        """
import os, resource, sys
from modelexpress.errors import RegistryError
from modelexpress.registry.open import open_registry
from tests.support.registry_process import record_of
registry = open_registry(sys.argv[1], signing_key=None, timeout_s=1, lease_ttl_s=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    registry.publish(record_of("1" * 32), bytes(10_000))
    sys.exit("published")
except RegistryError as exc:
    assert "too large" in str(exc) and str(registry.path) in str(exc), exc
assert os.listdir(registry.path) == []
record = registry.publish(record_of("1" * 32), b"offer")
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
for call in (lambda: registry.find(None), lambda: registry.stands(record), lambda: registry.readers(record)):
    try:
        sys.exit(f"answered {call()}")
    except RegistryError as exc:
        assert "open files" in str(exc), exc
registry.close()
""",
        store.url,
    )


def test_failed_publication_leaves_nothing(store, registry, record):
    """Here the record cannot be stored after the offer was."""
    sealed = registry.publish(record, b"offer")
    [path] = store.folder.glob("*.record")
    registry.withdraw(sealed)
    (path / "in the way").mkdir(parents=True)

    with pytest.raises(RegistryError, match="directory"):
        registry.publish(record, b"offer")
    assert list(store.folder.iterdir()) == [path]


def test_parents_are_created(tmp_path, connect, record):
    registry = connect(f"file://{tmp_path}/a/b/c")
    registry.publish(record, b"offer")

    assert stat.S_IMODE(Path(tmp_path, "a").stat().st_mode) & 0o022 == 0
