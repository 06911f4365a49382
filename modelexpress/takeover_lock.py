"""One file on a host that says which of several replicas serves: whoever holds its flock.

The kernel lets go of the lock however its owner dies, SIGKILL included, so that the next one knows at once. The
file holds one line of JSON about the owner, for people and routers: `cat` shows it.

The file stays when its owner ends, and is never removed here: a lock on a file that has lost its name says nothing to
those who open the name. Whoever waits keeps to the file that it opened until that one's owner is dead, and owns
nothing before it holds the file that the name means then.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from modelexpress.errors import ConfigError
from modelexpress.registry import locked_file
from modelexpress.registry.locked_file import Witness

logger = logging.getLogger(__name__)

_MAX_NBYTES = 64 * 1024
_TRIES = 3
_TORN_S = 0.001
_ANSWERS = {
    errno.ELOOP: "is a symlink; name the file itself",
    errno.EISDIR: "is a directory; name a file in it",
    errno.ENXIO: "is a socket or a pipe; name a new file",
    errno.ENOENT: "is in a directory that is not there; make it first",
    errno.ENOTDIR: "is in something that is no directory",
    errno.EACCES: "may not be written by this user; every replica has to run as the user that owns it",
    errno.EROFS: "is on a file system that cannot be written; name a file on another one",
}


class Owner(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="modelexpress takeover lock"):
    """Who has the lock, as the file says it.

    Attributes:
        owner: host and pid, the name of the process.
        since: when it got the lock, UTC.
        serves: the name of the model.
        url: where it answers.
        took_over_from: `owner` of the one before, when a standby took over.
        weights_s: seconds from getting the lock to weights that can be used, when a standby took over.
        answered_s: seconds from getting the lock to the first health check that was answered.
        boot, pid_namespace, start_ticks: tell the process from a later one with the same pid.
    """

    owner: str
    host: str
    pid: int
    since: str
    serves: str
    url: str
    took_over_from: str | None = None
    weights_s: float | None = None
    answered_s: float | None = None
    boot: str
    pid_namespace: int
    start_ticks: int


def this_process(*, serves: str, url: str, took_over_from: str | None = None) -> Owner:
    """The calling process as an owner from now on."""
    host, myself = socket.gethostname(), Witness.here().myself()
    return Owner(
        owner=f"{host}/{myself.pid}",
        host=host,
        pid=myself.pid,
        since=datetime.now(UTC).isoformat(timespec="milliseconds"),
        serves=serves,
        url=url,
        took_over_from=took_over_from,
        boot=myself.boot.hex(),
        pid_namespace=myself.pid_namespace,
        start_ticks=myself.start_ticks,
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at a lock found. `owner` without `held` is the last one, which is gone."""

    owner: Owner | None
    held: bool


def look(path: str | os.PathLike[str]) -> Seen:
    """Who has the lock, without taking it. Where there is no file yet, nobody.

    Raises:
        ConfigError: the path is no takeover lock, or cannot be read.
    """
    path = Path(path).absolute()
    try:
        fd = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return Seen(None, held=False)
    except OSError as exc:
        raise _refused(path, exc) from exc
    try:
        # A shared lock, for a moment: those who try meanwhile try again, and two who look do not see each other.
        held = not _flock(path, fd, fcntl.LOCK_SH)
        return Seen(_read(path, fd), held)
    finally:
        os.close(fd)


class TakeoverLock:
    """One process's end of the lock. Nothing is opened before `try_take`.

    The lock is not inherited: exec() closes the descriptor, and so does a child that Python forks. A child that other
    code forks without exec() would hold it until it ends; `stuck` says so.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the process may go elsewhere
        self._fd = -1
        self._held = False
        # Also held over a fork, so that a child cannot inherit a descriptor that is just being opened.
        self._busy = threading.RLock()
        os.register_at_fork(
            before=self._busy.acquire, after_in_parent=self._busy.release, after_in_child=self._forget_in_child
        )

    @property
    def held(self) -> bool:
        """Whether this process has the lock."""
        return self._held

    def try_take(self) -> bool:
        """Take the lock if nobody has it; True when it is ours. Never waits. Write who has it, next.

        Raises:
            ConfigError: the path cannot be a lock (a directory, a symlink, a file of another user or with another
                content, a file system without locks); names it. Nothing was changed.
        """
        with self._busy:
            for _ in range(_TRIES):
                if self._held:
                    return True
                if self._fd < 0:
                    self._fd = _open_own(self.path)
                try:
                    if not _flock(self.path, self._fd, fcntl.LOCK_EX):
                        return False
                    if self._in_place():
                        _read(self.path, self._fd)
                        self._held = True
                        return True
                except BaseException:
                    self._close()
                    raise
                self._close()  # the owner of a file that lost its name is dead; what counts is the name
            return False

    def write(self, owner: Owner) -> None:
        """Say who has the lock.

        Raises:
            ConfigError: this process does not have it, or the file cannot be written.
        """
        with self._busy:
            if not self._held:
                raise ConfigError(f"{self.path} is not locked by this process, so it says nothing about it")
            line = msgspec.json.encode(owner) + b"\n"
            try:
                # In place, since the lock is on this file. Readers stop at the first end of line.
                os.pwrite(self._fd, line, 0)
                os.ftruncate(self._fd, len(line))
            except OSError as exc:
                raise _refused(self.path, exc) from exc

    def stuck(self) -> str | None:
        """Why waiting may last, in words; None when nothing is strange. For a log, now and then."""
        with self._busy:
            if self._held or self._fd < 0:
                return None
            if not self._in_place():
                return (
                    f"{self.path} was deleted or replaced while its owner holds it: whoever starts now does not see "
                    "that owner; end the owner, and leave the file alone"
                )
            owner = _read(self.path, self._fd)
        if owner is not None and _is_dead(owner):
            return (
                f"{owner.owner} is dead, and {self.path} is still locked: by a child that it forked, or by another "
                "program; /proc/locks names the process"
            )
        return None

    def release(self) -> None:
        """Give the lock back; the file names nobody then. No error when it is not held."""
        with self._busy:
            if self._fd < 0:
                return
            try:
                if self._held:
                    os.ftruncate(self._fd, 0)
                # Closing is not enough: a child of other code's fork may hold the same lock.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            except OSError as exc:
                logger.warning("%s is given back by closing it: %s", self.path, exc.strerror)
            finally:
                self._close()

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._fd))
        except OSError:
            return False

    def _close(self) -> None:
        fd, self._fd, self._held = self._fd, -1, False
        os.close(fd)

    def _forget_in_child(self) -> None:
        if self._fd >= 0:
            self._close()
        self._busy.release()


def _open_own(path: Path) -> int:
    """Open or make the file of a lock; readable by everyone, so that everyone can see who serves."""
    try:
        _require_safe(path.parent)
        fd = _open(path, os.O_RDWR | os.O_CREAT)
    except OSError as exc:
        raise _refused(path, exc) from exc
    strange = _strange(os.fstat(fd))
    if strange is not None:
        os.close(fd)
        raise ConfigError(f"takeover_lock: {path} {strange}")
    return fd


def _strange(found: os.stat_result) -> str | None:
    """Why this file is not to be written to."""
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file; name a new one"
    if found.st_uid != os.geteuid():
        return (
            f"belongs to user {found.st_uid}, and this process runs as {os.geteuid()}; every replica has to run as "
            "the user that owns it"
        )
    if found.st_nlink > 1:
        return f"has {found.st_nlink} names, so it is another file too; name a new one"
    return None


def _open(path: Path, flags: int) -> int:
    # O_NONBLOCK: a pipe would hang open().
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC, 0o644)


def _require_safe(directory: Path) -> None:
    """Whoever may replace the file decides who serves."""
    found = directory.stat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid not in (0, os.geteuid()) or (others and not found.st_mode & stat.S_ISVTX):
        raise ConfigError(
            f"takeover_lock: other users can replace files in {directory} (user {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}); name a file in a directory of your own"
        )


def _flock(path: Path, fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise ConfigError(
            f"takeover_lock: {path} cannot be locked ({exc.strerror}); name a file on a local file system"
        ) from exc
    return True


def _read(path: Path, fd: int) -> Owner | None:
    """The owner that the file names; None when it is empty."""
    for _ in range(_TRIES):
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            break
        try:
            content = os.pread(fd, _MAX_NBYTES, 0)
        except OSError as exc:
            raise _refused(path, exc) from exc
        if not content:
            return None
        try:
            return msgspec.json.decode(content.partition(b"\n")[0], type=Owner)
        except (msgspec.DecodeError, UnicodeDecodeError):
            time.sleep(_TORN_S)  # the owner may be writing
    raise ConfigError(f"takeover_lock: {path} is there and is no takeover lock; name a new file")


def _is_dead(owner: Owner) -> bool:
    try:
        boot = bytes.fromhex(owner.boot)
    except ValueError:
        return False
    process = locked_file.Owner(boot, owner.pid_namespace, owner.pid, owner.start_ticks)
    return Witness.here().is_dead(process)


def _refused(path: Path, exc: OSError) -> ConfigError:
    reason = _ANSWERS.get(exc.errno or 0, f"cannot be used ({exc.strerror or exc}); name a file on a local file system")
    return ConfigError(f"takeover_lock: {path} {reason}")
