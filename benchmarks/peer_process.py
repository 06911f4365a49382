"""A source in another process, as a user would start it, with a handle to kill it by."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType


class PeerProcess:
    """`modelexpress serve` (or another command that prints a line starting with "ready") while the block runs."""

    def __init__(self, command: list[str], *, ready_within_s: float = 120.0) -> None:
        self._command = command
        self._ready_within_s = ready_within_s

    @classmethod
    def serve(cls, checkpoint: Path, registry: str, *options: str) -> PeerProcess:
        command = [sys.executable, "-m", "modelexpress", "serve", str(checkpoint), "--registry", registry, *options]
        return cls(command)

    def __enter__(self) -> PeerProcess:
        # A demo's or benchmark's sources talk over this machine's loopback only.
        environment = {"UCX_NET_DEVICES": "lo", **os.environ}
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, env=environment)
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], self._ready_within_s)
        line = stdout.readline() if readable else b""
        if not line.startswith(b"ready"):
            self._stop()
            raise SystemExit(f"{' '.join(self._command)} did not become ready: {line.decode().strip()!r}")
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the end; returns the exit code."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, as a crash or the memory killer would."""
        self._process.kill()
        self._process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
