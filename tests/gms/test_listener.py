"""Who owns a socket path: private, replaced when its owner was killed, never stolen, never somebody else's file."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading

import pytest

from modelexpress.errors import ConfigError, GmsError
from modelexpress.gms.listener import MAX_PATH_NBYTES, listen
from tests.support.gms_process import read_now, running


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gms.sock"


def test_the_socket_and_its_directory_are_private(tmp_path):
    path = tmp_path / "new" / "gms.sock"
    before = os.umask(0)
    try:
        listener = listen(path)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((path.parent / "gms.sock.lock").lstat().st_mode) == 0o600
    listener.close()
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_directory_that_others_can_write_is_refused(tmp_path, mode):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)

    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        listen(tmp_path / "open" / "gms.sock")
    assert os.listdir(tmp_path / "open") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory somebody else's")
def test_a_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 65534, 65534)

    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        listen(tmp_path / "theirs" / "gms.sock")


def test_the_longest_path_works_and_one_more_byte_does_not(tmp_path):
    folder = os.fsencode(tmp_path)
    longest = os.fsdecode(folder + b"/" + b"x" * (MAX_PATH_NBYTES - len(folder) - 1))

    listen(tmp_path / longest).close()
    with pytest.raises(ConfigError, match="has 108 bytes; a Unix socket takes at most 107"):
        listen(tmp_path / (longest + "x"))


def test_a_file_that_is_no_socket_stays(path):
    path.write_text("precious")

    with pytest.raises(ConfigError, match="is no socket"):
        listen(path)
    assert path.read_text() == "precious"
    assert (path.parent / "gms.sock.lock").exists()  # nobody holds it: the next server may
    path.unlink()
    listen(path).close()


def test_a_socket_that_another_program_serves_is_left_alone(path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(GmsError, match="another program listens"):
            listen(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_what_a_killed_server_left_is_replaced(path):
    with running("serve", path, 0, 30) as killed:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert path.is_socket()

    with running("serve", path, 0, 30) as server:
        assert server.line == "serving"
        assert read_now(path).kind == "missing"


def test_a_second_server_names_the_first_and_does_not_harm_it(path):
    with running("serve", path, 0, 30) as first:
        with pytest.raises(GmsError, match=f"{path} is served already, by pid {first.pid}"):
            listen(path)

        assert read_now(path).kind == "missing"


def test_of_servers_that_start_at_once_one_wins(path):
    """Also over what a killed one left, and while winners close again."""
    winners, losers, overlaps = [], [], []
    serving = threading.Lock()

    def contend():
        for _ in range(100):
            try:
                listener = listen(path)
            except GmsError:
                losers.append(1)
                continue
            if not serving.acquire(blocking=False):
                overlaps.append(1)
            winners.append(path.is_socket())
            serving.release()
            listener.close()

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    assert all(winners)
    assert len(winners) + len(losers) == 400
    assert os.listdir(path.parent) == []


def test_what_was_put_there_meanwhile_is_not_removed(path):
    listener = listen(path)
    path.unlink()
    path.write_text("precious")

    listener.close()

    assert path.read_text() == "precious"
