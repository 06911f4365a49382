"""The anonymous memory of processes, which is what weights cost.

A mapped checkpoint file counts as resident too but can be dropped at any time, so VmHWM says more than a load needs.
The kernel keeps no high-water mark of anonymous memory alone; it is sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

_SAMPLE_EVERY_S = 0.01
_LOOK_EVERY = 25
"""Samples between two looks for new processes."""


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # a zombie has no memory


class AnonymousPeak:
    """Samples processes every 10 ms in a thread, between `start` and `stop`; usable as a context manager.

    `find` gives the pids to watch by a key of the caller's and is asked again every 0.25 s. A peak shorter than 10 ms
    can be missed; copying a gigabyte takes far longer.
    """

    def __init__(self, find: Callable[[], Mapping[int, int]]) -> None:
        self._find = find
        self._peaks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="anonymous-peak", daemon=True)

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The most that was seen, by the keys of `find`."""
        return dict(self._peaks)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def __enter__(self) -> AnonymousPeak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _sample(self) -> None:
        while not self._over.is_set():
            found = self._find()
            for _ in range(_LOOK_EVERY):
                for key, pid in found.items():
                    self._peaks[key] = max(self._peaks.get(key, 0), anonymous_bytes(pid))
                if self._over.wait(_SAMPLE_EVERY_S):
                    return
