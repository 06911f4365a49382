"""Names of threads as the kernel knows them, for `top`, /proc and the check before a snapshot."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

_LONGEST = 15  # bytes: <linux/sched.h>, TASK_COMM_LEN without its zero


def name_this_thread(name: str) -> None:
    """Tell the kernel the calling thread's name, at most 15 bytes of it. Python tells it from 3.14 on."""
    with suppress(OSError):  # a /proc that cannot be written costs a name
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(name.encode()[:_LONGEST])
