"""A file that is alive exactly as long as the process that wrote it.

The owner holds an exclusive flock on its file until it removes it or dies: the kernel tells everyone else at
once, with no daemon and no clock. A file nobody holds is garbage, and whoever sees it may remove it.

A lock is inherited over fork(), so a child that outlives the owner would keep it. The header says who the
owner is; where that process is in our own pid namespace, it has to be there too.

A name is used once: when its owner is dead, so is the name, and to remove it can hit nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import secrets
import stat
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

# magic, boot id, inode of the pid namespace, pid, start time in clock ticks since boot, expiry in seconds of
# CLOCK_BOOTTIME. The payload follows.
_HEADER = struct.Struct("<8s16sQQQd")
_MAGIC = b"mxfile1\n"

# Read at once, with which a record needs no second call.
_START_NBYTES = 4096

# What open() says about things that are there and are no file of ours: a symlink, a socket, no permission.
_NOT_OURS = frozenset({errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENODEV})

_TEMP_SUFFIX = ".tmp"
_TEMP_ABANDONED_S = 60.0
_TRIES = 3


class Owner(NamedTuple):
    """A process, told apart from a later one with the same number."""

    boot: bytes
    pid_namespace: int
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Witness:
    """Tells whether owners are alive, as seen from this process now. For one look around; keep none."""

    boot: bytes
    pid_namespace: int
    _known: dict[Owner, bool] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Witness:
        """Seen from the calling process. Without /proc only locks decide."""
        try:
            boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
            return cls(boot, os.stat("/proc/self/ns/pid").st_ino)
        except OSError:
            return cls(bytes(16), 0)

    def myself(self) -> Owner:
        """The calling process."""
        found = _process_state(os.getpid())
        return Owner(self.boot, self.pid_namespace, os.getpid(), 0 if found is None else found[1])

    def is_dead(self, owner: Owner) -> bool:
        """Whether the owner is certainly gone. False where this process cannot know."""
        if self.pid_namespace == 0 or (owner.boot, owner.pid_namespace) != (self.boot, self.pid_namespace):
            return False
        if owner not in self._known:
            self._known[owner] = _is_gone(owner)
        return self._known[owner]


class LockedFile:
    """The owner's end: holds the lock. Made by `create`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._owner_pid = os.getpid()

    def in_place(self) -> bool:
        """Whether others still see this file under its name."""
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def remove(self) -> None:
        """Give up name and lock; the file is dead for everyone. In a forked child: only close our copy.

        Never raises: without its lock the file is dead even where its name cannot be removed.
        """
        if self._fd < 0:
            return
        try:
            if os.getpid() != self._owner_pid:
                return
            try:
                if self.in_place():
                    os.unlink(self.path)
            except OSError as exc:
                logger.warning("could not remove %s, left for the next look around: %s", self.path, exc.strerror)
            # Closing is not enough: a forked child may hold the same lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            os.close(self._fd)
            self._fd = -1


def create(path: Path, payload: bytes, *, expires_at: float = math.inf) -> LockedFile:
    """Write a file that appears whole and already locked, in place of whatever had its name.

    Args:
        expires_at: the file counts as dead from this `now()` on, even while its owner lives.

    Raises:
        OSError: nothing was left behind.
    """
    owner = Witness.here().myself()
    header = _HEADER.pack(_MAGIC, *owner, expires_at)
    for attempt in range(1, _TRIES + 1):
        temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMP_SUFFIX}")
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, header)
            _write(fd, payload)
            os.rename(temp, path)
        except (BlockingIOError, FileNotFoundError):
            # This process stood still between open and flock for so long that someone cleaned up its file.
            _discard(temp, fd)
            if attempt == _TRIES:
                raise
        except BaseException:
            _discard(temp, fd)
            raise
        else:
            return LockedFile(path, fd)
    raise AssertionError("unreachable")


def read_live(path: str | Path, witness: Witness, *, max_nbytes: int) -> bytes | None:
    """The payload of a file whose owner is alive; None, and the file removed, when the owner is dead.

    Anything else under that name is ignored with a log line, unread: a directory, a pipe, a symlink, a file
    of another format or with more than `max_nbytes` of payload. Never waits.

    Raises:
        OSError: this process cannot look (out of descriptors, disk error).
    """
    fd = _open_foreign(path)
    if fd is None:
        return None
    try:
        nbytes, start = _look(path, fd, witness)
        if start is None:
            return None
        if nbytes > max_nbytes:
            logger.warning("ignored %s: it has %s bytes; the limit is %s", path, nbytes, max_nbytes)
            return None
        payload = start[_HEADER.size :]
        return payload if len(payload) >= nbytes else payload + _read(fd, len(start), nbytes - len(payload))
    finally:
        os.close(fd)


def is_live(path: str | Path, witness: Witness) -> bool:
    """Whether the owner is alive; removes and ignores as `read_live` does."""
    fd = _open_foreign(path)
    if fd is None:
        return False
    try:
        return _look(path, fd, witness)[1] is not None
    finally:
        os.close(fd)


def remove_abandoned_temp(path: str | Path) -> None:
    """Remove what a writer left that died before its file got its name."""
    if not str(path).endswith(_TEMP_SUFFIX):
        return
    fd = _open_foreign(path)
    if fd is None:
        return
    try:
        info = os.fstat(fd)
        old = time.time() - info.st_mtime > _TEMP_ABANDONED_S
        if stat.S_ISREG(info.st_mode) and old and not _is_locked(fd):
            _remove_dead(path, fd)
    finally:
        os.close(fd)


def now() -> float:
    """Seconds on a clock that all processes of a host share, and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _look(path: str | Path, fd: int, witness: Witness) -> tuple[int, bytes | None]:
    """The size of the payload and the start of the file; None when it is dead, and removed, or not a file of ours."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        logger.warning("ignored %s: not a regular file", path)
        return 0, None
    start = os.pread(fd, _START_NBYTES, 0)
    if _is_dead(fd, start, witness):
        _remove_dead(path, fd)
        return 0, None
    if not _is_ours(start):
        logger.warning("ignored %s: not a file of modelexpress", path)
        return 0, None
    return info.st_size - _HEADER.size, start


def _is_ours(header: bytes) -> bool:
    return len(header) >= _HEADER.size and header.startswith(_MAGIC)


def _is_dead(fd: int, header: bytes, witness: Witness) -> bool:
    if not _is_locked(fd):
        return True
    if not _is_ours(header):
        return False
    _, boot, pid_namespace, pid, start_ticks, expires_at = _HEADER.unpack_from(header)
    if boot == witness.boot and expires_at <= now():
        return True
    return witness.is_dead(Owner(boot, pid_namespace, pid, start_ticks))


def _is_locked(fd: int) -> bool:
    # A shared lock: two processes that look at the same moment must not take each other for the owner.
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _remove_dead(path: str | Path, fd: int) -> None:
    # With no link left the name may be in use again: its owner had lost the file and made it anew.
    if os.fstat(fd).st_nlink == 0:
        return
    try:
        os.unlink(path)
    except FileNotFoundError:
        return  # someone else looked too
    except OSError as exc:
        logger.warning("could not remove %s, which a dead process left: %s", path, exc.strerror)


def _open_foreign(path: str | Path) -> int | None:
    # O_NONBLOCK: a pipe would hang open().
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno not in _NOT_OURS:
            raise
        logger.warning("ignored %s: %s", path, exc.strerror)
        return None


def _is_gone(owner: Owner) -> bool:
    found = _process_state(owner.pid)
    if found is not None:
        state, start_ticks = found
        return state in "ZX" or start_ticks != owner.start_ticks
    # /proc may hide processes of other users (hidepid); kill() does not.
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _process_state(pid: int) -> tuple[str, int] | None:
    """State letter and start time in clock ticks (fields 3 and 22 of proc(5) stat), None when not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field, a name in brackets, may hold spaces and brackets itself.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _read(fd: int, offset: int, nbytes: int) -> bytes:
    parts = []
    while nbytes > 0:
        part = os.pread(fd, nbytes, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return b"".join(parts)


def _discard(temp: Path, fd: int) -> None:
    try:
        os.unlink(temp)
    except OSError as exc:
        logger.debug("could not remove %s: %s", temp, exc.strerror)
    os.close(fd)
