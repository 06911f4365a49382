"""CRIU's commands for a process tree that was made fit for capture, and why they failed.

What is set here is what an engine needs, and the rest of CRIU's options go through as they are. GPUs are CRIU's
own matter: its plugin for CUDA (CRIU 4.0 and later) is used by itself where it is installed.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelexpress.errors import SnapshotError, printable

_HELP_S = 30.0
_IO_MODE = "--image-io-mode"  # CRIU of mid-2026 and later; refused where --help does not name it
_STREAM = "--stream"
_SHOWN_LINES = 5


@dataclass(frozen=True, slots=True)
class ImageStorage:
    """Where CRIU's images lie, and how they are written and read.

    Args:
        folder: CRIU's --images-dir.
        direct_io: past the page cache (--image-io-mode direct): faster for images that are not cached, slower for
            those that are.
        stream: through criu-image-streamer, which must listen in the folder (--stream).
    """

    folder: Path
    direct_io: bool = False
    stream: bool = False


def dump_command(pid: int, images: ImageStorage, more: Sequence[str] = (), *, program: str = "criu") -> list[str]:
    """Capture a process and its descendants; they are gone afterwards, unless `more` says --leave-running.

    An engine's processes are connected to each other by TCP, hence --tcp-established.

    Raises:
        SnapshotError: CRIU is not installed, or is too old for an option.
    """
    return [*_common("dump", images, program), "--tree", str(pid), *more]


def restore_command(images: ImageStorage, more: Sequence[str] = (), *, program: str = "criu") -> list[str]:
    """Bring the processes back with the pids that they had, and return when they run.

    Raises: as `dump_command`.
    """
    return [*_common("restore", images, program), "--restore-detached", *more]


def run(command: Sequence[str]) -> None:
    """Run one of the commands.

    Raises:
        SnapshotError: it failed; with the last errors that CRIU printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SnapshotError(f"criu {command[1]} ended with {done.returncode}: {_errors(done)}")


def why_not(program: str = "criu") -> str | None:
    """None where CRIU works; otherwise its own reason, or that it is not installed."""
    path = shutil.which(program)
    if path is None:
        return "criu is not installed"
    done = subprocess.run([path, "check"], capture_output=True, text=True, errors="replace", check=False)
    return _errors(done) if done.returncode else None


def _common(action: str, images: ImageStorage, program: str) -> list[str]:
    path = shutil.which(program)
    if path is None:
        raise SnapshotError(f"{program} is not installed; install CRIU, and run this as root")
    if not images.folder.is_dir():
        raise SnapshotError(f"the folder for the images, {images.folder}, is not there; make it first")
    command = [path, action, "--images-dir", str(images.folder), "--tcp-established"]
    if images.direct_io:
        command += [_IO_MODE, "direct"]
    if images.stream:
        command.append(_STREAM)
    known = _help(path)
    for option in (_IO_MODE, _STREAM):
        if option in command and option not in known:
            raise SnapshotError(f"{path} does not know {option}; leave the option out, or install a later CRIU")
    return command


@functools.cache
def _help(path: str) -> str:
    return subprocess.run([path, "--help"], capture_output=True, text=True, timeout=_HELP_S, check=False).stdout


def _errors(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    chosen = [line for line in lines if "Error" in line] or lines or ["it printed nothing"]
    return printable("; ".join(chosen[-_SHOWN_LINES:]))
