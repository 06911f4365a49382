"""A Unix socket that is private, replaces what a killed server left, and is never taken from a live one.

The owner of a path holds a lock on `<path>.lock` for as long as it lives; the kernel lets go of it however the
owner dies. Only the holder of the lock may remove or bind the socket, so two servers that start at once cannot
take the path from each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from modelexpress.errors import ConfigError, GmsError

# sun_path has 108 bytes and ends with a zero: unix(7).
MAX_PATH_NBYTES = 107
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, the file that it made, and the lock on its path."""

    path: Path
    sock: socket.socket
    file: os.stat_result
    lock_fd: int

    def close(self) -> None:
        """Remove the socket, then the lock. What somebody else has put at the path meanwhile stays there."""
        with self.sock, suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), self.file):
                self.path.unlink()
        _lock_path(self.path).unlink(missing_ok=True)
        os.close(self.lock_fd)


def listen(path: Path) -> Listener:
    """Own this path, and accept connections there. Makes the directory, mode 0700, when there is none.

    Raises:
        ConfigError: the path is too long, its directory is open to other users, or a file that is no socket is
            in the way.
        GmsError: a live server has it, or the system refuses; names the reason.
    """
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_PATH_NBYTES:
        raise ConfigError(f"the socket path {path} has {nbytes} bytes; a Unix socket takes at most {MAX_PATH_NBYTES}")
    try:
        _prepare_directory(path.parent)
        lock_fd = _lock(path)
        try:
            _remove_stale(path)
            return Listener(path, _bind(path), path.lstat(), lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise
    except OSError as exc:
        raise GmsError(f"cannot serve at {path}: {exc.strerror or exc}") from exc


def _prepare_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{directory} belongs to uid {found.st_uid}; a socket there could be replaced by that user")
    if found.st_mode & 0o022:
        raise ConfigError(
            f"{directory} has mode {stat.S_IMODE(found.st_mode):04o}, so that other users can replace a socket there; "
            "use a directory with mode 0700"
        )


def _lock(path: Path) -> int:
    lock_path = _lock_path(path)
    while True:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last owner may have removed the file between our open and our lock: then it locks nobody out.
            if _is_at(fd, lock_path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d" % os.getpid(), 0)
                return fd
        except BlockingIOError as exc:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace") or "unknown"
            os.close(fd)
            raise GmsError(f"{path} is served already, by pid {pid}; stop it first, or use another path") from exc
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is there already and is no socket; remove it, or use another path")
    # A program that knows nothing of our lock may listen there.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(os.fsencode(path)) != errno.ECONNREFUSED:
            raise GmsError(f"another program listens at {path}; stop it first, or use another path")
    path.unlink()


def _bind(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The file gets the mode of its socket, so it is private before it can be seen, and without a umask, which
        # would be every thread's. Seen in tests/gms/test_listener.py::test_the_socket_and_its_directory_are_private.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(os.fsencode(path))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
