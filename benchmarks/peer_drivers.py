"""Drivers of the peers, from outside: each is a process in the environment `.venv-peers`. See benchmarks/peers/."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"


class DoesNotRun(Exception):
    """A peer cannot be measured here; says why."""


class Driver:
    """One driver, from its start to its end."""

    def __init__(self, script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        own = {"PYTHONPATH": str(HERE), "UCX_NET_DEVICES": "lo"}  # contents.py and one_pass.py; no package of ours
        self._script = script
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(PYTHON), str(HERE / "peers" / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **own, **(environment or {})},
            text=True,
        )
        line = self._line()
        while not line.startswith('{"ready"'):  # what libraries print while they start
            line = self._line()
        self.said: dict[str, Any] = json.loads(line)

    def ask(self, **command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise DoesNotRun(f"{self._script} ended: {self._last_words()}") from exc
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Stop the process while the block runs: threads that poll for something to do take a core from the others."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
            raise DoesNotRun(f"{self._script} ended with {self._process.returncode}: {self._last_words()}")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").split("\n")
        return next((each.strip() for each in reversed(said) if each.strip()), "it said nothing")[:300]

    def _end(self) -> None:
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
