"""Lanes: threads that move the chunks of one read, and the proof that all of them have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

from modelexpress.errors import RecoveryFailed, TransferFailed
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.thread_name import name_this_thread
from modelexpress.transport import Arrived, Moved, Work

T = TypeVar("T")

# How long after the deadline, or after another lane failed, a lane may take to come back. A chunk takes 2 to 20 ms;
# NIXL drains a READ for 1 s, and destroying an agent under one took 0.08-0.17 s.
GRACE_S = 3.0

_LOOK_S = 0.1  # between two looks at whether somebody stopped the read


class _Stopped(TransferFailed):
    """Another lane, or the caller, has the reason."""


class Reading:
    """One read of one source, seen by all its lanes: what is left, what arrived, and whether to stop."""

    def __init__(
        self, plan: TransferPlan, deadline: float, arrived: Arrived | None, moved: Moved | None, work: Work | None
    ) -> None:
        self.plan = plan
        self.deadline = deadline
        self.moved = moved
        self._work = work or Work(plan.chunks)
        self._arrived = arrived
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._chunks = 0
        self._nbytes = 0

    def take(self) -> Chunk | None:
        """The next chunk; None when none is left or the read has been stopped. After the deadline it still hands
        out chunks: whoever takes one there says so.
        """
        return None if self.stopped else self._work.take()

    def arrived(self, chunk: Chunk) -> None:
        """Say that a chunk is in place, and that the source was still what it was after that."""
        with self._lock:
            self._chunks += 1
            self._nbytes += chunk.nbytes
        if self._arrived is not None:
            self._arrived(chunk)

    def end(self) -> None:
        """Another lane failed, or the caller was interrupted: that goes up, and nothing else is begun."""
        self._ended.set()

    @property
    def stopped(self) -> bool:
        return self._ended.is_set() or self._work.stopped

    def goes_on(self) -> bool:
        return not self.stopped and time.monotonic() < self.deadline

    def out_of_time(self) -> TransferFailed:
        """Why a lane does not go on; of several lanes the one that knows the reason is heard."""
        if time.monotonic() < self.deadline:
            return _Stopped(f"was stopped {self}")
        return TransferFailed(f"deadline passed {self}: the source is stopped, overloaded or out of reach")

    def __str__(self) -> str:
        return (
            f"after {self._chunks} of {len(self.plan.chunks)} chunks "
            f"({self._nbytes / 1e9:.2f} of {self.plan.nbytes / 1e9:.2f} GB)"
        )


def run_lanes(lanes: Sequence[Callable[[], None]], reading: Reading, *, name: str) -> None:
    """Run each lane in a thread until all have ended, or one failed and the others ended after that.

    Raises:
        RecoveryFailed: a lane does not come back, and may still write.
        and what a lane raised; of several the gravest, and what the reader's own calls raised before a TransferFailed.
    """
    running = [in_thread(each, name=name) for each in lanes]
    try:
        _wait_for_end(running, reading)
    finally:  # also when the caller is interrupted
        reading.end()
        wait(running, timeout=left(min(reading.deadline, time.monotonic()) + GRACE_S))
    stuck = sum(1 for each in running if not each.done())
    if stuck:
        raise RecoveryFailed(
            f"{stuck} of {len(running)} lanes did not come back within {GRACE_S:g} s of their end, "
            f"{reading}; they may still write, so the target memory must not be used again"
        )
    _raise_first(running)


def _wait_for_end(running: Sequence[Future[None]], reading: Reading) -> None:
    """Until all have ended, one failed, the deadline passed, or somebody stopped the read."""
    while not reading.stopped and (remaining := left(reading.deadline + GRACE_S)):
        done, going = wait(running, timeout=min(remaining, _LOOK_S), return_when=FIRST_EXCEPTION)
        if not going or any(each.exception() is not None for each in done):
            return


def left(until: float) -> float:
    """Seconds until a `time.monotonic()` moment, 0 when it has passed."""
    return max(0.0, until - time.monotonic())


def in_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Run `work` in a daemon thread, which cannot hold the interpreter's exit when it never returns."""
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(work, future, name), name=name, daemon=True).start()
    return future


def _run(work: Callable[[], T], future: Future[T], name: str) -> None:
    name_this_thread(name)
    try:
        future.set_result(work())
    except BaseException as exc:  # noqa: BLE001 - the outermost line of a thread; it goes up in the caller
        future.set_exception(exc)
    finally:
        del work, future  # the exception holds this frame, and they the exception


def _raise_first(running: list[Future[None]]) -> None:
    failed = [each for each in running if each.exception() is not None]
    failed.sort(
        key=lambda each: (
            not isinstance(each.exception(), RecoveryFailed),
            isinstance(each.exception(), TransferFailed),
            isinstance(each.exception(), _Stopped),
        )
    )
    running.clear()
    try:
        if failed:
            failed[0].result()
    finally:
        del failed  # its exception holds this frame
