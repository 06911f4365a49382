"""What /proc and the kernel say about other processes: their trees, threads, descriptors, mappings and sockets.

Everything is read at one moment and may be different the next. A process that ended meanwhile has nothing.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from modelexpress.errors import SnapshotError

T = TypeVar("T")

_LISTEN = "0A"  # <net/tcp_states.h>, as /proc/net/tcp prints it
_SOCKET = re.compile(r"socket:\[(\d+)\]")

# <linux/netlink.h>, <linux/sock_diag.h>, <linux/unix_diag.h>
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_DUMP_REQUEST = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_UNIX_REQUEST = struct.Struct("=BBHIIIII")  # family, protocol, -, states, inode, what to show, cookie
_UNIX_REPLY = struct.Struct("=BBBBIII")  # family, type, state, -, inode, cookie
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_SHOW_NAME, _SHOW_PEER = 0x1, 0x4
_NAME, _PEER = 0, 2
_ALL_STATES = 0xFFFFFFFF

Address = tuple[str, int]  # of IP, without scope; and port


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One row of /proc/net/tcp or tcp6; IPv4 addresses that are written as IPv6 are IPv4."""

    inode: int
    local: Address
    remote: Address
    listens: bool


@dataclass(frozen=True, slots=True)
class Mapped:
    """Everything that a process maps under one name."""

    path: str
    mappings: int
    nbytes: int


def tree_of(pid: int) -> tuple[int, ...]:
    """The process and all its descendants, parents first; empty when there is no such process."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        with suppress(OSError):
            # The name may hold blanks and brackets; what follows the last bracket is state and parent.
            parent = int(Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(each)
    found = [pid] if os.path.isdir(f"/proc/{pid}") else []
    for each in found:
        found.extend(children.get(each, ()))
    return tuple(found)


def listener_on(port: int) -> int:
    """The process that listens on a TCP port of this network namespace; of several, the one they come from.

    Raises:
        SnapshotError: there is none that this process may look at.
    """
    inodes = {each.inode for each in tcp_sockets(os.getpid()) if each.listens and each.local[1] == port}
    listening = set()
    for pid in _pids():
        with suppress(SnapshotError):  # somebody else's
            if inodes & set(socket_inodes(pid)):
                listening.add(pid)
    for pid in sorted(listening):
        if listening <= set(tree_of(pid)):
            return pid
    why = "several unrelated processes listen" if listening else "no process that this user may look at listens"
    raise SnapshotError(f"{why} on port {port}; run this where the server runs, as its user, or give its pid")


def name_of(pid: int) -> str:
    """The command as `ps` shows it, at most 80 characters of it."""
    return " ".join(_read(pid, "cmdline").decode(errors="replace").replace("\0", " ").split())[:80]


def environ_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    rows = _read(pid, "environ").decode(errors="surrogateescape").split("\0")
    return dict(row.split("=", 1) for row in rows if "=" in row)


def folder_of(pid: int) -> str:
    """The process's working directory."""
    return _looked_at(pid, lambda: os.readlink(f"/proc/{pid}/cwd"), "/")


def threads_of(pid: int) -> tuple[str, ...]:
    """The names that the kernel has for the threads, at most 15 bytes each."""
    names = []
    for thread in _entries(pid, "task"):
        with suppress(OSError):
            names.append(Path(f"/proc/{pid}/task/{thread}/comm").read_text(errors="replace").strip())
    return tuple(sorted(names))


def descriptors_of(pid: int) -> dict[int, str]:
    """Open descriptors, and what /proc says that each is: a path, `socket:[inode]`, ..."""
    found = {}
    for each in _entries(pid, "fd"):
        with suppress(OSError):
            found[int(each)] = os.readlink(f"/proc/{pid}/fd/{each}")
    return found


def socket_inodes(pid: int) -> dict[int, int]:
    """Inodes of the open sockets, and the descriptor of each."""
    matches = ((fd, _SOCKET.fullmatch(what)) for fd, what in descriptors_of(pid).items())
    return {int(match[1]): fd for fd, match in matches if match is not None}


def mappings_of(pid: int) -> tuple[Mapped, ...]:
    """What is mapped from files and memfds, by its name."""
    sizes: dict[str, list[int]] = {}
    for line in _read(pid, "maps").decode(errors="replace").splitlines():
        span, *_, path = line.split(maxsplit=5) if len(line.split(maxsplit=5)) == 6 else (line.split()[0], "")
        if path:
            start, _, end = span.partition("-")
            sizes.setdefault(path, []).append(int(end, 16) - int(start, 16))
    return tuple(Mapped(path, len(each), sum(each)) for path, each in sorted(sizes.items()))


def tcp_sockets(pid: int) -> tuple[TcpSocket, ...]:
    """The TCP sockets of the process's network namespace, whosever they are."""
    rows = []
    for family in ("tcp", "tcp6"):
        for line in _read(pid, f"net/{family}").decode().splitlines()[1:]:
            words = line.split()
            rows.append(TcpSocket(int(words[9]), _address(words[1]), _address(words[2]), words[3] == _LISTEN))
    return tuple(rows)


def unix_peers() -> dict[int, str]:
    """Inodes of the Unix sockets of this network namespace whose other end has a path, and the path.

    /proc/net/unix does not tell who is connected to whom; the kernel's socket diagnosis does.

    Raises:
        SnapshotError: this kernel has none.
    """
    names: dict[int, str] = {}
    peers: dict[int, int] = {}
    try:
        for inode, attributes in _unix_sockets():
            if path := attributes.get(_NAME, b"").rstrip(b"\0"):
                names[inode] = path.decode(errors="surrogateescape")
            if _PEER in attributes:
                peers[inode] = int.from_bytes(attributes[_PEER], "little")
    except (OSError, struct.error) as exc:
        raise SnapshotError(f"the kernel does not tell who is connected to a Unix socket (unix_diag): {exc}") from exc
    return {inode: names[peer] for inode, peer in peers.items() if peer in names}


def require_same_network(pid: int) -> None:
    """Refuse where the process's sockets cannot be seen from here.

    Raises:
        SnapshotError: it is in another network namespace.
    """
    link = _looked_at(pid, lambda: os.readlink(f"/proc/{pid}/ns/net"), "")
    if link and link != os.readlink("/proc/self/ns/net"):
        raise SnapshotError(f"process {pid} is in another network namespace; run this in its container")


def _unix_sockets() -> Iterator[tuple[int, dict[int, bytes]]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(10.0)
        body = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_NAME | _SHOW_PEER, 0, 0)
        size = _HEADER.size + len(body)
        asked.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_DUMP_REQUEST, 1, 0) + body)
        while True:
            data = asked.recv(1 << 20)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                message, data = data[_HEADER.size : length], data[_aligned(length) :]
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    number = -int.from_bytes(message[:4], "little", signed=True)
                    raise OSError(number, os.strerror(number))
                yield _UNIX_REPLY.unpack_from(message)[4], _attributes(message[_UNIX_REPLY.size :])


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        found[kind] = data[_ATTRIBUTE.size : length]
        data = data[_aligned(max(length, _ATTRIBUTE.size)) :]
    return found


def _aligned(length: int) -> int:
    return -(-length // 4) * 4


def _address(text: str) -> Address:
    """`0100007F:1F90`: words of 32 bits in the byte order of the machine, and the port."""
    digits, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
    return plain_address(packed), int(port, 16)


def plain_address(address: str | bytes) -> str:
    """An IP address without its scope; IPv4 that is written as IPv6 is IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0] if isinstance(address, str) else address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def _pids() -> list[int]:
    return [int(each) for each in os.listdir("/proc") if each.isdecimal()]


def _entries(pid: int, folder: str) -> list[str]:
    return _looked_at(pid, lambda: os.listdir(f"/proc/{pid}/{folder}"), [])


def _read(pid: int, name: str) -> bytes:
    return _looked_at(pid, Path(f"/proc/{pid}/{name}").read_bytes, b"")


def _looked_at(pid: int, look: Callable[[], T], gone: T) -> T:
    try:
        return look()
    except (FileNotFoundError, ProcessLookupError):
        return gone
    except OSError as exc:
        raise SnapshotError(
            f"process {pid} cannot be looked at ({exc.strerror}); run this as its user or as root"
        ) from exc
