"""The lock that says which replica serves: real processes, SIGKILL, forks, and files that cannot be a lock."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from modelexpress.errors import ConfigError
from modelexpress.takeover_lock import TakeoverLock, look, this_process
from tests.support.takeover_process import wanting

SOON_S = 10.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "llama.lock"


def take_soon(lock):
    """Whether the lock can be had; waits, since the kernel ends a killed process in its own time."""
    give_up = time.monotonic() + SOON_S
    while not (got := lock.try_take()) and time.monotonic() < give_up:
        time.sleep(0.005)
    return got


def owner_among(path, pids):
    """The pid of the owner when it is one of these."""
    give_up = time.monotonic() + SOON_S
    while (seen := look(path)).owner is None or seen.owner.pid not in pids or not seen.held:
        assert time.monotonic() < give_up
        time.sleep(0.005)
    return seen.owner.pid


def has_ended(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def test_the_second_process_does_not_get_it(path):
    with wanting("take", path) as first, wanting("take", path) as second:
        assert (first.line, second.line) == ("held", "not held")


def test_cat_shows_who_has_it(path):
    with wanting("take", path) as process:
        shown = json.loads(subprocess.run(["cat", path], capture_output=True, check=True).stdout)

    assert (shown["pid"], shown["host"]) == (process.pid, socket.gethostname())
    assert shown["owner"] == f"{socket.gethostname()}/{process.pid}"
    assert (shown["serves"], shown["url"]) == ("m", "http://here")
    assert shown["since"].startswith(time.strftime("%Y", time.gmtime()))


def test_the_next_one_has_it_when_the_owner_is_killed(path):
    with wanting("take", path) as owner, wanting("wait", path) as standby:
        assert look(path).owner.pid == owner.pid
        owner.kill()

        assert standby.stdout.readline() == "held\n"
        seen = look(path)
    assert (seen.owner.pid, seen.held) == (standby.pid, True)


def test_of_many_that_wait_one_gets_it_and_then_the_next(path):
    with ExitStack() as running:
        left = [running.enter_context(wanting("wait", path)) for _ in range(5)]
        while left:
            pid = owner_among(path, {each.pid for each in left})
            assert not TakeoverLock(path).try_take()
            os.kill(pid, signal.SIGKILL)
            left = [each for each in left if each.pid != pid]


def test_never_two_owners_at_a_time(path):
    """Each owner makes a file that must not be there, so a second one would end with an error."""
    with wanting("race", path) as one, wanting("race", path) as two:
        for _ in range(200):
            assert one.stdout.readline() == "held\n"
            assert two.stdout.readline() == "held\n"
        assert one.poll() is None
        assert two.poll() is None


def test_killed_and_not_reaped_owner_has_lost_it(path):
    with wanting("take", path) as owner:
        os.kill(owner.pid, signal.SIGKILL)
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)

        assert TakeoverLock(path).try_take()


def test_stopped_owner_still_has_it(path):
    with wanting("take", path) as owner:
        os.kill(owner.pid, signal.SIGSTOP)

        assert not TakeoverLock(path).try_take()
        assert look(path).held


@pytest.mark.parametrize("how", ["fork", "run"])
def test_a_child_that_outlives_the_owner_does_not_keep_it(how, path):
    with wanting(how, path) as owner:
        try:
            assert look(path).held
            owner.kill()
            owner.wait(SOON_S)

            assert take_soon(TakeoverLock(path))
            assert not has_ended(int(owner.line))
        finally:
            os.kill(int(owner.line), signal.SIGKILL)


def test_a_child_forked_behind_pythons_back_keeps_it_and_the_reason_is_known(path):
    with wanting("raw_fork", path) as owner:
        lock = TakeoverLock(path)
        assert not lock.try_take()
        assert lock.stuck() is None
        owner.kill()
        owner.wait(SOON_S)

        assert not lock.try_take()
        assert f"/{owner.pid} is dead" in lock.stuck()
        assert "still locked" in lock.stuck()
        os.kill(int(owner.line), signal.SIGKILL)
        assert take_soon(lock)


def test_given_back_it_names_nobody_and_can_be_had(path):
    lock = TakeoverLock(path)
    assert lock.try_take()
    lock.write(this_process(serves="m", url="u"))

    lock.release()

    assert path.read_bytes() == b""
    assert (look(path).owner, look(path).held) == (None, False)
    with wanting("take", path) as other:
        assert other.line == "held"
    lock.release()


def test_a_dead_owner_is_shown_as_the_last_one(path):
    with wanting("take", path) as owner:
        owner.kill()
        owner.wait(SOON_S)

    seen = look(path)
    assert (seen.owner.pid, seen.held) == (owner.pid, False)


def test_looking_changes_nothing_and_no_file_is_nobody(path):
    assert (look(path).owner, look(path).held) == (None, False)
    assert not path.exists()


def test_two_ends_in_one_process_are_two(path):
    first, second = TakeoverLock(path), TakeoverLock(path)

    assert first.try_take()
    assert first.try_take()
    assert not second.try_take()


def test_only_the_owner_writes(path):
    with wanting("take", path):
        lock = TakeoverLock(path)
        assert not lock.try_take()
        with pytest.raises(ConfigError, match="not locked by this process"):
            lock.write(this_process(serves="m", url="u"))


def test_readers_never_see_half_a_line(path):
    lock = TakeoverLock(path)
    assert lock.try_take()
    lock.write(this_process(serves="m", url="u"))
    program = (
        "import sys\nfrom modelexpress.takeover_lock import look\n"
        "print('looking', flush=True)\n"
        "for _ in range(5000): assert look(sys.argv[1]).owner.serves[0] == 'm'"
    )
    argv = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "looking\n"
        while reader.poll() is None:
            lock.write(this_process(serves="m" * 300, url="u"))
            lock.write(this_process(serves="m", url="u"))
    assert reader.returncode == 0


# --- a file that lost its name


def test_a_waiter_stays_with_the_file_whose_owner_lives(path):
    with wanting("take", path) as owner:
        lock = TakeoverLock(path)
        assert not lock.try_take()
        path.unlink()

        assert not lock.try_take()
        assert "deleted or replaced" in lock.stuck()
        owner.kill()
        assert take_soon(lock)
    assert path.exists()
    assert lock.stuck() is None


def test_a_waiter_does_not_own_a_replaced_file_before_it_owns_the_new_one(path):
    with wanting("take", path) as owner:
        lock = TakeoverLock(path)
        assert not lock.try_take()
        path.unlink()
        with wanting("take", path) as newcomer:
            assert newcomer.line == "held"
            owner.kill()
            owner.wait(SOON_S)

            assert not any(lock.try_take() for _ in range(100))
            newcomer.kill()
            assert take_soon(lock)
    lock.write(this_process(serves="m", url="u"))
    assert look(path).owner.pid == os.getpid()


# --- paths that cannot be a lock


def symlink(path):
    target = path.with_name("elsewhere")
    target.touch()
    path.symlink_to(target)


def hardlink(path):
    path.with_name("first").touch()
    path.hardlink_to(path.with_name("first"))


def listening_socket(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkdir, "is a directory"),
        (symlink, "is a symlink"),
        (hardlink, "has 2 names"),
        (os.mkfifo, "no regular file"),
        (listening_socket, "a socket"),
        (lambda path: path.write_text('{"architectures": []}\n'), "is no takeover lock; name a new file"),
        (lambda path: path.write_text("x" * 100_000), "is no takeover lock"),
        (lambda path: path.write_bytes(b"\xff\0\xfe"), "is no takeover lock"),
        (lambda path: path.parent.chmod(0o777), "other users can replace files"),
        (lambda path: path.parent.chmod(0o770), "other users can replace files"),
    ],
)
def test_what_is_no_lock_is_named_and_left_as_it_is(path, make, reason):
    make(path)
    before = path.read_bytes() if path.is_file() else None
    lock = TakeoverLock(path)

    for _ in range(2):
        with pytest.raises(ConfigError, match=reason) as caught:
            lock.try_take()

    assert str(path.parent) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not lock.held
    path.parent.chmod(0o700)


def test_a_missing_directory_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="is not there; make it first"):
        TakeoverLock(tmp_path / "none" / "lock").try_take()
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_and_directory(path):
    path.touch()
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        TakeoverLock(path).try_take()
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(ConfigError, match="other users can replace files"):
        TakeoverLock(path).try_take()


def test_a_file_system_without_locks_is_named(path, monkeypatch):
    """None is at hand: the answer of such a file system is made here."""

    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"llama\.lock cannot be locked \(No locks available\).*local file system"):
        TakeoverLock(path).try_take()


def test_a_relative_path_means_where_the_process_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lock = TakeoverLock("here.lock")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")

    assert lock.try_take()
    assert (tmp_path / "here.lock").exists()


def test_nothing_is_left_open(path):
    before = len(os.listdir("/proc/self/fd"))
    lock = TakeoverLock(path)
    assert lock.try_take()
    look(path)
    lock.release()
    path.write_text("no lock")
    with pytest.raises(ConfigError):
        lock.try_take()

    assert len(os.listdir("/proc/self/fd")) == before
