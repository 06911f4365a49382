"""A source in another process, as a user would start it, with a handle to kill it by."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class PeerProcess:
    """`modelexpress serve` (or another command that prints a line starting with `ready`) while the block runs."""

    def __init__(
        self,
        command: list[str],
        *,
        ready: str = "ready",
        ready_within_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = None,
    ) -> None:
        self._command = command
        self._stdin = stdin
        self._ready = ready
        self._ready_within_s = ready_within_s
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_line = ""

    @classmethod
    def serve(
        cls, checkpoint: Path, registry: str, *options: str, environment: Mapping[str, str] | None = None
    ) -> PeerProcess:
        command = [sys.executable, "-m", "modelexpress", "serve", str(checkpoint), "--registry", registry, *options]
        return cls(command, environment=environment)

    def start(self) -> None:
        """Begin, without waiting; the block starts what was not started."""
        if self._process is None:
            # A demo's or benchmark's sources talk over this machine's loopback only.
            environment = {"UCX_NET_DEVICES": "lo", **os.environ, **self._environment}
            self._process = subprocess.Popen(self._command, stdin=self._stdin, stdout=subprocess.PIPE, env=environment)

    def __enter__(self) -> PeerProcess:
        self.start()
        stdout = self._running.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], self._ready_within_s)
        self.ready_line = stdout.readline().decode().strip() if readable else ""
        if not readable or not self.ready_line.startswith(self._ready):
            self._stop()
            raise SystemExit(f"{' '.join(self._command)} did not become ready: {self.ready_line!r}")
        return self

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the process was not started")
        return self._process

    @property
    def pid(self) -> int:
        return self._running.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._running.poll()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the end; returns the exit code."""
        return self._running.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, as a crash or the memory killer would."""
        self._running.kill()
        self._running.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        process = self._running
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
