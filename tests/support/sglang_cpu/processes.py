"""Process trees that end when they should: each is a session of its own, found again by its session id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

# The parent may have died before the request to be told: then its child has another parent by now.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


_KILL_S = 15.0


class Leader(Protocol):
    """A process that began a session."""

    pid: int

    def wait(self) -> int: ...


class ProcessesLeft(Exception):
    """Processes of a session are alive after SIGKILL and a wait."""


def start_session(
    command: Sequence[str], *, env: Mapping[str, str], output: Path, cwd: Path, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Run a command as the leader of a new session, stdout and stderr to the file `output`, stdin from a pipe.

    It is killed when this process dies, even by SIGKILL. Linux ties that to the thread that started it, so only what
    the main thread starts is tied: another thread may end long before its server should.
    """
    if threading.current_thread() is threading.main_thread():
        command = [sys.executable, "-IS", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    with output.open("ab") as sink:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )


def session_members(session_id: int) -> list[psutil.Process]:
    """Every live process of a session, orphans included; zombies are dead."""
    return [each for each in psutil.process_iter() if _is_member(each, session_id)]


def _is_member(process: psutil.Process, session_id: int) -> bool:
    try:
        return os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def wait_until_gone(session_id: int, timeout_s: float) -> list[psutil.Process]:
    """Whoever is still alive when the session is empty or time is over."""
    give_up = time.monotonic() + timeout_s
    while (left := session_members(session_id)) and time.monotonic() < give_up:
        time.sleep(0.05)
    return left


def end_session(leader: Leader, patience_s: float) -> None:
    """Wait for every process of the leader's session to end by itself, then SIGKILL whoever did not.

    Raises:
        ProcessesLeft: some outlive SIGKILL.
    """
    if left := wait_until_gone(leader.pid, patience_s):
        send(left, signal.SIGKILL)
        left = wait_until_gone(leader.pid, _KILL_S)
    if left:
        raise ProcessesLeft(f"alive {_KILL_S:.0f} s after SIGKILL: {'; '.join(describe(left))}")
    leader.wait()


def send(processes: Sequence[psutil.Process], signal_number: int) -> None:
    """Signal those that are still there."""
    for process in processes:
        try:
            process.send_signal(signal_number)
        except psutil.NoSuchProcess:
            continue


def describe(processes: Sequence[psutil.Process]) -> tuple[str, ...]:
    """One line a process."""
    return tuple(f"{process.pid} {_title(process)}" for process in processes)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.NoSuchProcess:
        return "(gone)"
