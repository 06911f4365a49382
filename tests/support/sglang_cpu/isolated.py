"""A function of a test in a process of its own, with JSON in, JSON out and a time limit.

    def digests(folder):                       # at the top level of a test module
        return tensor_digests(Harness(folder).load())

    assert run_isolated(digests, folder) == ...

The process is forked from one that has imported SGLang; where a test needs an environment at imports (`env`) or a GPU,
it is a new one.

A function that goes on for a while can be talked to: it says things with `announce` and waits for its test with
`wait_released`, and the test has `IsolatedCall`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.sglang_cpu.environment import ROOT, device, engine_environment
from tests.support.sglang_cpu.processes import end_session, start_session
from tests.support.sglang_cpu.warm import Forked, warm

_REPLY_FD = "ISOLATED_REPLY_FD"
_TAIL_LINES = 40


class IsolatedFailure(Exception):
    """The function raised, its process ended, or time is over; the message has the traceback or the last lines."""


def run_isolated(
    function: Callable[..., object],
    *args: object,
    timeout_s: float = 180.0,
    env: Mapping[str, str] | None = None,
    **kwargs: object,
) -> object:
    """Call a module-level function in a new process and return its result, both by way of JSON; paths become text.

    Raises:
        IsolatedFailure: it raised, its process ended, or `timeout_s` is over.
    """
    with IsolatedCall(function, *args, env=env, **kwargs) as call:
        return call.result(timeout_s)


def run_together(calls: Sequence[IsolatedCall], *, timeout_s: float = 180.0, width: int = 2) -> list[object]:
    """The results of calls that were not started, in their order; `width` of them run at a time.

    Raises:
        IsolatedFailure: one of them failed, or had no result `timeout_s` after it was waited for.
    """
    results = []
    for first in range(0, len(calls), width):
        with contextlib.ExitStack() as started:
            batch = [started.enter_context(call) for call in calls[first : first + width]]
            results += [call.result(timeout_s) for call in batch]
    return results


class IsolatedCall:
    """One such call while it runs. Entering starts it; leaving ends its whole process tree."""

    def __init__(
        self,
        function: Callable[..., object],
        *args: object,
        env: Mapping[str, str] | None = None,
        **kwargs: object,
    ) -> None:
        self._call = _call_of(function, args, kwargs)
        self._env = engine_environment(env)
        self._forked = env is None and device() == "cpu"
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._replies = -1
        self._unread = b""
        self._folder: Path | None = None
        self._final_output = ""

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="isolated-"))
        self._replies, child_end = os.pipe()
        output = self._folder / "output"
        output.touch()
        try:
            if self._forked:
                self._process = warm().fork(
                    f"{__name__}:answer", *self._call, env=self._env, output=output, reply=child_end
                )
            else:
                command = [sys.executable, "-m", __name__, *self._call, str(child_end)]
                self._process = start_session(command, env=self._env, output=output, cwd=ROOT, pass_fds=(child_end,))
        finally:
            os.close(child_end)

    def result(self, timeout_s: float = 180.0) -> object:
        """What the function returns; announcements that nobody asked for are skipped."""
        give_up = time.monotonic() + timeout_s
        while "announced" in (reply := self._reply(give_up)):
            continue
        return reply["result"]

    def announced(self, timeout_s: float = 180.0) -> object:
        """What the function announces next."""
        reply = self._reply(time.monotonic() + timeout_s)
        if "announced" not in reply:
            raise IsolatedFailure(f"the function returned {reply['result']!r} instead of announcing something")
        return reply["announced"]

    def release(self) -> None:
        """Let `wait_released` return."""
        if self._running.stdin is not None:
            self._running.stdin.close()

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Signal the process itself, not what it started."""
        self._running.send_signal(sig)

    def stop(self, patience_s: float = 10.0) -> None:
        """Release it, let it end by itself, then SIGKILL every process. Harmless twice.

        Raises:
            ProcessesLeft: some outlive SIGKILL.
        """
        if self._process is None or self._folder is None:
            return
        self.release()
        end_session(self._process, patience_s)
        os.close(self._replies)
        self._final_output = self.output
        shutil.rmtree(self._folder)
        self._folder = None

    def __enter__(self) -> IsolatedCall:
        self.start()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed:
            self.stop(patience_s=0.0)
        else:
            self.stop()

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def output(self) -> str:
        """What the process printed and logged so far; still there after `stop`."""
        if self._folder is None:
            return self._final_output
        return (self._folder / "output").read_text(errors="replace")

    @property
    def _running(self) -> subprocess.Popen[bytes] | Forked:
        if self._process is None:
            raise IsolatedFailure("the call was not started")
        return self._process

    def _reply(self, give_up_s: float) -> dict:
        """The next message of the child, decoded; its errors and its end are raised."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, give_up_s - time.monotonic()))
            if not ready:
                raise IsolatedFailure(f"no reply in time:\n{self._last_lines()}")
            received = os.read(self._replies, 65536)
            if not received:
                raise IsolatedFailure(f"the process ended with {self._running.wait(10)}:\n{self._last_lines()}")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise IsolatedFailure(reply["error"])
        return reply

    def _last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-_TAIL_LINES:])


# --- in the child


def announce(value: object) -> None:
    """Tell the test something; see IsolatedCall.announced."""
    _send({"announced": value})


def wait_released() -> None:
    """Return when the test says so, or is gone."""
    sys.stdin.buffer.read()


def answer(module: str, name: str, arguments: str, reply_fd: str) -> None:
    """Call the function of this name."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    os.environ[_REPLY_FD] = reply_fd
    os.set_inheritable(int(reply_fd), False)
    args, kwargs = json.loads(arguments)
    try:
        result = getattr(importlib.import_module(module), name)(*args, **kwargs)
        _send({"result": result})
    except BaseException:
        _send({"error": traceback.format_exc()})
        raise


def _send(reply: dict) -> None:
    line = json.dumps(reply, default=str).encode() + b"\n"
    while line:
        line = line[os.write(int(os.environ[_REPLY_FD]), line) :]


def _call_of(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> list[str]:
    if "." in function.__qualname__ or function.__module__ == "__main__":
        raise ValueError(f"{function.__qualname__} must be at the top level of a module that can be imported")
    arguments = json.dumps([args, kwargs], default=str)
    return [function.__module__, function.__name__, arguments]


if __name__ == "__main__":
    answer(*sys.argv[1:])
