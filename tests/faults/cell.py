"""A cell: process numbers, mounts, network and shared memory of its own, for one run.

What a run leaves behind is everything that is still in its cell: other processes of the machine are not there, and
cannot be hit by its faults. When the first process of a cell ends, the kernel kills the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_MS_PRIVATE_REC = (1 << 18) | (1 << 14)

_LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave some namespaces for new ones."""
    _checked(_LIBC.unshare(flags), "unshare")


def enter(path: str, flags: int) -> None:
    """Join the namespace at a path of /proc."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_LIBC.setns(fd, flags), f"setns {path}")
    finally:
        os.close(fd)


def leave_for_a_cell() -> None:
    """The caller's next child is the first process of a new cell, and calls `furnish`."""
    unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _checked(_LIBC.prctl(1, signal.SIGKILL), "prctl PR_SET_PDEATHSIG")


def furnish() -> None:
    """Mounts that show the cell only, and a loopback."""
    _checked(_LIBC.mount(None, b"/", None, _MS_PRIVATE_REC, None), "mount /")
    mount("proc", Path("/proc"), "")
    mount("tmpfs", Path("/dev/shm"), "mode=1777")
    ip("link", "set", "lo", "up")


def mount(kind: str, where: Path, options: str) -> None:
    """Mount a file system in this cell; it goes with the cell."""
    name = kind.encode()
    _checked(_LIBC.mount(name, os.fsencode(where), name, 0, options.encode()), f"mount {where}")


def shift_clock(seconds: int) -> None:
    """Move this process, which has one thread, to where the host started so many seconds earlier."""
    unshare(CLONE_NEWTIME)
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    enter("/proc/self/ns/time_for_children", CLONE_NEWTIME)


def ip(*words: str, of: int | None = None) -> None:
    """The ip command, in the network of a process or in ours."""
    there = [] if of is None else ["nsenter", "-t", str(of), "-n"]
    subprocess.run([*there, "ip", *words], check=True, capture_output=True)


def wait_for_carrier(device: str, *, of: int, timeout_s: float = 5.0) -> None:
    """A cable whose ends were just set up carries nothing yet; UCX does not use a device that does not."""
    give_up = time.monotonic() + timeout_s
    command = ["nsenter", "-t", str(of), "-n", "ip", "-o", "link", "show", "dev", device]
    while b"state UP" not in subprocess.run(command, check=True, capture_output=True).stdout:
        if time.monotonic() > give_up:
            raise TimeoutError(f"{device} has no carrier after {timeout_s:g} s")
        time.sleep(0.01)


def black_hole(device: str, *, of: int | None = None, on: bool) -> None:
    """Have a device swallow all it should send, without a word to anybody: a queue with room for one byte."""
    there = [] if of is None else ["nsenter", "-t", str(of), "-n"]
    what = ["add", "dev", device, "root", "bfifo", "limit", "1"] if on else ["del", "dev", device, "root"]
    subprocess.run([*there, "tc", "qdisc", *what], check=True, capture_output=True)


def reset_connections(*, of: int, port: int | None = None) -> None:
    """Have the kernel end TCP connections of a process's network: both ends get a reset."""
    where = ["nsenter", "-t", str(of), "-n", "ss", "-K", "-t", "state", "established"]
    subprocess.run(where + ([] if port is None else ["dport", "=", str(port)]), check=True, capture_output=True)


def show_network() -> None:
    """Let this process, and no other, see its own network in /sys, where UCX looks for devices."""
    unshare(CLONE_NEWNS)
    mount("sysfs", Path("/sys"), "")


def one_port(*, of: int) -> None:
    """Whoever listens next in a process's network has the port of whoever listened before."""
    command = ["nsenter", "-t", str(of), "-n", "sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40001"]
    subprocess.run(command, check=True, capture_output=True)


def processes() -> list[int]:
    """All processes of this cell but the caller, zombies included."""
    return [int(each) for each in os.listdir("/proc") if each.isdigit() and int(each) != os.getpid()]


def received_nbytes() -> int:
    """What arrived so far by all networks of this cell."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


def why_not() -> str | None:
    """Why this machine has no cells; None where it has."""
    pid = os.fork()
    if pid == 0:
        try:
            leave_for_a_cell()
        except OSError as exc:
            os._exit(exc.errno or 1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"no namespaces of its own for a run: {os.strerror(number)}; run as root" if number else None


def _checked(result: int, doing: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
