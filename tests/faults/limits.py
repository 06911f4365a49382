"""A memory group of the kernel for one process. Of either version of cgroups; removed when the run is over."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Lets a process and what it allocates from now on have at most so many bytes.

    Raises:
        OSError: this machine does not let us make one.
    """

    def __init__(self, pid: int, most_nbytes: int) -> None:
        old = (_V1 / "memory.limit_in_bytes").exists()
        self._path = (_V1 if old else _V2) / f"mx-faults-{os.getppid()}-{time.monotonic_ns()}"
        self._path.mkdir()
        try:
            self._limit = self._path / ("memory.limit_in_bytes" if old else "memory.max")
            self._limit.write_text(str(most_nbytes))
            (self._path / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.remove()
            raise

    def lift(self) -> None:
        """There is memory again."""
        self._limit.write_text(str(1 << 50))

    def remove(self) -> None:
        """When its processes have ended."""
        give_up = time.monotonic() + 2
        while self._path.exists() and time.monotonic() < give_up:
            with suppress(OSError):
                self._path.rmdir()
            time.sleep(0.01)
