"""What one pass took: seconds, CPU, and memory beyond what the process had."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pass:
    """`extra_bytes`: the peak over what was resident before."""

    said: object
    seconds: float
    cpu_seconds: float
    extra_bytes: int


def timed(run: Callable[[], object]) -> Pass:
    """Run once; `said` is what it returns."""
    reset_peak()
    before, used = _status("VmRSS"), time.process_time()
    started = time.perf_counter()
    said = run()
    seconds, used = time.perf_counter() - started, time.process_time() - used
    return Pass(said, seconds, used, max(0, peak_bytes() - before))


def peak_bytes() -> int:
    """The most that was ever resident, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Let the peak be what is used now."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def _status(field: str) -> int:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
