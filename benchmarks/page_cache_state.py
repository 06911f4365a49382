"""Puts files into the page cache, or out of it, and asks whether that worked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from modelexpress.checkpoint.page_cache import ask_cachestat, ask_mincore

State = Literal["warm", "cold"]
_BLOCK_NBYTES = 16 * 1024 * 1024


def share_in_memory(files: Sequence[Path]) -> float:
    """The share of the files' bytes that lie in the page cache, as the kernel says."""
    found = total = 0.0
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            nbytes = os.fstat(fd).st_size
            share = ask_cachestat(fd, 0, nbytes)
            share = ask_mincore(fd, 0, nbytes) if share is None else share
        finally:
            os.close(fd)
        if share is None:
            raise SystemExit(f"{path}: this kernel does not say which pages are in memory")
        found, total = found + share * nbytes, total + nbytes
    return found / total


def put(files: Sequence[Path], state: State) -> float:
    """Bring the files into that state; returns the share that is in memory then.

    Cold means cold for this kernel: a host below it may hold the bytes all the same.
    """
    buffer = bytearray(_BLOCK_NBYTES)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            if state == "cold":
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                at = 0
                while got := os.preadv(fd, [buffer], at):
                    at += got
        finally:
            os.close(fd)
    share = share_in_memory(files)
    if (share < 0.999) if state == "warm" else (share > 0.001):
        raise SystemExit(f"the files are not {state}: {share:.1%} of them are in memory")
    return share
