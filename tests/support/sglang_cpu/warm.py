"""A process that has imported SGLang, and forks a child for each call: an import takes 15 s, a fork 0.1 s.

Children are as good as new processes where nothing has begun yet: the process that forks has one thread, has loaded no
plugin, made no NIXL agent and no parallel group. It ends with the process that asked for it, and its children with it.

    python -m tests.support.sglang_cpu.warm SOCKET_FD
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.sglang_cpu.environment import ROOT, engine_environment

_READY_S = 180.0
_MAX_REQUEST_NBYTES = 1 << 20


class Forked:
    """A child of the warm process, with what subprocess.Popen says of one's own."""

    def __init__(self, pid: int, stdin: int, ended: socket.socket) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """Its exit code, or the signal that ended it as a negative number; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            with self._ended:
                self.returncode = int(self._ended.recv(32) or b"-9")  # the warm process has ended, and it with it
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To the process itself. Harmless when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Warm:
    """The process that forks, as who asks it sees it."""

    def __init__(self) -> None:
        from tests.support.sglang_cpu.processes import start_session

        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self._log = self._folder / "log"
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_session(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                # A library's threads would not be there after a fork.
                env=engine_environment({"OPENBLAS_NUM_THREADS": "1"}),
                output=self._log,
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
            )
        self._socket.settimeout(_READY_S)
        if self._socket.recv(16) != b"ready":
            raise RuntimeError(f"the process that forks has ended:\n{self._log.read_text()[-2000:]}")

    def fork(self, target: str, *arguments: str, env: Mapping[str, str], output: Path, reply: int) -> Forked:
        """Call `module:function` with texts, and last the number of a copy of `reply`; in a session of its own."""
        request = {"target": target, "arguments": arguments, "env": dict(env), "output": str(output)}
        theirs, stdin = os.pipe()
        ended, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with told:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs, reply, told.fileno()])
            finally:
                os.close(theirs)
        return Forked(int(self._socket.recv(32)), stdin, ended)


@functools.cache
def warm() -> Warm:
    """The one of this process, started when it is first needed."""
    return Warm()


# --- in the warm process


def _serve(requests: socket.socket) -> None:
    """Fork for each request, and say when and how each child ended."""
    running: dict[int, socket.socket] = {}
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    requests.send(b"ready")
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(running)
        if requests in ready:
            request, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_NBYTES, 3)
            if not request:
                return
            ended = socket.socket(fileno=fds[2])
            pid = os.fork()
            if pid == 0:
                _become(json.loads(request), fds, [requests, ended, *running.values()], [woken, wakes])
            os.close(fds[0])
            os.close(fds[1])
            running[pid] = ended
            requests.send(str(pid).encode())


def _reap(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with running.pop(pid) as ended:
                try:
                    ended.send(str(os.waitstatus_to_exitcode(status)).encode())
                except OSError:
                    continue  # nobody asks any more


def _become(request: dict, fds: list[int], sockets: list[socket.socket], others: list[int]) -> None:
    """In the child: take the place of a new process, call, and end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in sockets:
            each.close()
        for fd in others:
            os.close(fd)
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for fd, number in ((fds[0], 0), (output, 1), (output, 2)):
            os.dup2(fd, number)
        os.close(fds[0])
        os.close(output)
        os.environ.clear()
        os.environ.update(request["env"])
        _die_with_parent()
        code = _call(_resolve(request["target"]), [*request["arguments"], str(fds[1])])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(function: Callable[..., object], arguments: list[str]) -> int:
    """The exit code that a process which does nothing else would have, after what it does at its end."""
    import atexit
    import threading
    import traceback

    code = 0
    try:
        function(*arguments)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return code


def _resolve(target: str) -> Callable[..., object]:
    import importlib

    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _import_everything() -> None:
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner_components.load_model_utils
    import sglang.srt.plugins
    import sglang.srt.server_args  # noqa: F401 - to have imported them is all


if __name__ == "__main__":
    _import_everything()
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
