"""Has imported torch once, and forks a cell for each run that is asked for.

python -m tests.faults.nursery    reads scenarios as lines of JSON, and answers each with one line
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.faults import cell
from tests.faults.director import direct
from tests.faults.outcome import Outcome
from tests.faults.scenario import Scenario

RUN_S = 120.0  # far beyond what a run takes; what is in the cell then is ended by the kernel


class Answer(msgspec.Struct):
    """An outcome, or the traceback of a run that could not be made; and the tail of every log."""

    outcome: Outcome | None = None
    broken: str | None = None
    logs: dict[str, str] = msgspec.field(default_factory=dict)


class Nursery:
    """The process that forks, as tests see it. Use it as a context manager."""

    def __enter__(self) -> Nursery:
        # One thread for each library: a process that forks should have no others.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        return self

    def run(self, scenario: Scenario) -> Answer:
        """Make one run."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(scenario) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks has ended: {process.wait(10)}")
        return msgspec.json.decode(line, type=Answer)

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _run(scenario: Scenario) -> Answer:
    folder = Path(tempfile.mkdtemp(prefix="mx-faults-"))
    try:
        return _in_a_cell(lambda: direct(scenario, folder), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_a_cell(play: Callable[[], Outcome], folder: Path) -> Answer:
    read, write = os.pipe()
    warden = os.fork()
    if warden == 0:
        os.close(read)
        _guard(play, folder, write)
    os.close(write)
    data = b""
    give_up = time.monotonic() + RUN_S
    while (left := give_up - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        part = os.read(read, 1 << 16)
        if not part:
            break
        data += part
    os.close(read)
    os.kill(warden, signal.SIGKILL)  # its child is told by the kernel, and the kernel ends the cell with it
    os.waitpid(warden, 0)
    if not data:
        return Answer(broken=f"the run said nothing within {RUN_S:g} s, or was killed", logs=_logs(folder))
    return msgspec.json.decode(data, type=Answer)


def _guard(play: Callable[[], Outcome], folder: Path, write: int) -> None:
    """Make the cell, and end with the first process in it. Never returns."""
    try:
        cell.leave_for_a_cell()
        if os.fork() == 0:
            cell.die_with_parent()
            os.setsid()
            cell.furnish()
            try:
                answer = Answer(outcome=play())
            except BaseException:
                answer = Answer(broken=traceback.format_exc())
            answer.logs = _logs(folder)
            data = msgspec.json.encode(answer)
            while data:
                data = data[os.write(write, data) :]
            os._exit(0)
        os.close(write)
        os.wait()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _logs(folder: Path) -> dict[str, str]:
    return {each.stem: each.read_text(errors="replace")[-4000:] for each in sorted(folder.glob("*.log"))}


def _main() -> None:
    import modelexpress.nixl_transport  # noqa: F401 - so that no run has to wait for it

    for line in sys.stdin:
        answer = _run(msgspec.json.decode(line, type=Scenario))
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
