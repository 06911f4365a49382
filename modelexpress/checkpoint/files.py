"""Opening and reading the files of a checkpoint, and nothing but regular files, and only the ones that were checked.

A checkpoint folder is untrusted input: a name in it may be a FIFO that blocks, a device, or a link. So a path
is looked at before it is opened, opened without following a link, and looked at again through the descriptor.
Errors of the operating system become CheckpointError here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from modelexpress.errors import CheckpointError

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_IOV_MAX = 1024  # buffers that one preadv takes, on Linux

# Reads past the page cache: offsets, lengths and addresses that every disk takes (most would take 512).
DIRECT_NBYTES = 4096

# What a file system says, on open(2) or on a read, when it has no reads past the page cache, or not of this alignment.
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class _Refused(CheckpointError):
    """The file is there, and cannot be opened in this way."""


class FileState(msgspec.Struct, frozen=True):
    """Which file it was. A file that was replaced, resized or written since then has another state."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


def unusable(path: str) -> str | None:
    """Why no weights can be read from `path`, or None for a regular file with bytes. Opens nothing."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return "missing"
    except OSError as exc:
        return f"cannot be looked at: {exc.strerror}"
    if stat.S_ISDIR(status.st_mode):
        return "a directory"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    return None if status.st_size else "0 bytes, an unfinished download?"


@contextmanager
def opened(path: str, shown: str) -> Iterator[tuple[int, FileState]]:
    """A descriptor of the regular file at `path`, and its state. `path` is real: its last part is no link.

    `shown` is the file in messages: a real path in the hub cache is a hash that nobody recognises.

    Raises:
        CheckpointError: it is not a regular file, or cannot be opened. A FIFO or a device is not opened.
    """
    fd = open_regular(path, shown)
    try:
        yield fd, state_of(fd)
    finally:
        os.close(fd)


def open_regular(path: str, shown: str, *, flags: int = 0) -> int:
    """A descriptor that the caller closes. See `opened`."""
    reason = unusable(path)
    if reason:
        raise CheckpointError(f"{shown}: {reason}")
    try:
        fd = os.open(path, _FLAGS | flags)
    except OSError as exc:
        if flags and exc.errno in REFUSED:
            raise _Refused(f"{shown}: cannot be opened with flags {flags:#o}: {exc.strerror}") from exc
        raise CheckpointError(f"{shown}: cannot be opened: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # swapped between the look and the open
        os.close(fd)
        raise CheckpointError(f"{shown}: not a regular file")
    return fd


def open_direct(path: str, shown: str, validated: FileState) -> int | None:
    """A descriptor for reads past the page cache, which the caller closes; None where the file system has none.

    Raises:
        CheckpointError: as `opened`, or another file is at `path` by now.
    """
    try:
        fd = open_regular(path, shown, flags=os.O_DIRECT)
    except _Refused:
        return None
    try:
        check_unchanged(fd, shown, validated)
    except CheckpointError:
        os.close(fd)
        raise
    return fd


def state_of(fd: int) -> FileState:
    """The state of an open file, now."""
    status = os.fstat(fd)
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def check_unchanged(fd: int, shown: str, validated: FileState) -> None:
    """Compare an open file with the state it had when its header was validated.

    Raises:
        CheckpointError: it is another file by now, or it was written. Says what differs.
    """
    found = state_of(fd)
    if found == validated:
        return
    if found.nbytes != validated.nbytes:
        what = f"expected {validated.nbytes:,} bytes, found {found.nbytes:,}"
    elif (found.device, found.inode) != (validated.device, validated.inode):
        what = "it was replaced by another file"
    else:
        what = "it was written to"
    raise CheckpointError(f"{shown}: changed since its header was validated ({what}); load again")


def fill(fd: int, shown: str, offset: int, views: Sequence[memoryview]) -> None:
    """Read the bytes from `offset` on into `views`, one after the other, straight from the page cache.

    One call returns at most 2,147,479,552 bytes (Linux), and may return fewer: reading goes on until all
    is there.

    Raises:
        CheckpointError: the file ends before that, or the disk gave an error.
    """
    wanted_end = offset + sum(view.nbytes for view in views)
    pending = [view for view in views if view.nbytes]
    while pending:
        try:
            got = os.preadv(fd, pending[:_IOV_MAX], offset)
        except OSError as exc:
            raise CheckpointError(f"{shown}: reading at byte {offset:,} failed: {exc.strerror}") from exc
        if not got:
            raise CheckpointError(_cut_short(shown, wanted_end, offset))
        offset += got
        pending = _rest(pending, got)


def fill_direct(fd: int, shown: str, offset: int, view: memoryview, wanted: int) -> bool:
    """Read at least the first `wanted` bytes from `offset` on into `view`, past the page cache.

    Args:
        fd: from `open_direct`. Offset, address and length are multiples of DIRECT_NBYTES; what lies after the end of
            the file stays as it was.

    Returns:
        Whether the file system did it; where it refuses, nothing is said of what is in `view`.

    Raises: as `fill`.
    """
    filled = 0
    while filled < wanted:
        try:
            got = os.preadv(fd, [view[filled:]], offset + filled)
        except OSError as exc:
            if exc.errno in REFUSED:
                return False
            raise CheckpointError(f"{shown}: reading at byte {offset + filled:,} failed: {exc.strerror}") from exc
        filled += got
        if filled < wanted and (not got or got % DIRECT_NBYTES):  # the next offset would not be a whole block
            found = state_of(fd).nbytes
            if found < offset + wanted:
                raise CheckpointError(_cut_short(shown, offset + wanted, found))
            return False
    return True


def _cut_short(shown: str, wanted_end: int, found: int) -> str:
    return f"{shown}: cut short while it was read: expected bytes up to {wanted_end:,}, found {found:,}"


def read_bytes(fd: int, shown: str, offset: int, nbytes: int) -> bytes:
    """Exactly `nbytes` from `offset`. The caller bounds `nbytes`. Raises as `fill` does."""
    data = bytearray(nbytes)
    fill(fd, shown, offset, [memoryview(data)])
    return bytes(data)


def _rest(views: list[memoryview], got: int) -> list[memoryview]:
    for at, view in enumerate(views):
        if got < view.nbytes:
            return [view[got:], *views[at + 1 :]]
        got -= view.nbytes
    return []
