"""What of modelexpress is left in other processes: looked for from outside, before they are captured.

How each thing is recognised, and so what can be missed:

| what | by |
|---|---|
| our threads | their name, which begins with `mx-` |
| a NIXL agent | the thread `async`, which UCX starts with each agent and joins when the agent is gone; NIXL's own thread has no name. An engine that moves its kv-cache by UCX has one too: it cannot be told apart, and it cannot be captured either |
| UCX memory | mappings and descriptors of `/dev/shm/ucx_shm_posix_*` |
| weights of the memory service on the host | mappings and descriptors of `memfd:modelexpress` |
| a session of the memory service | a Unix socket whose other end has the service's path; not one that the service never accepted, or that outlived it |
| a publication on one host | an open file in the registry's folder |
| a connection to a registry on many hosts | a TCP connection to its address and port |

Not seen: memory of a GPU that is mapped by CUDA, which no file of /proc lists; and the memory-service segments
that were inherited by a process outside of the tree that is looked at.
"""  # noqa: E501 - a table

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from modelexpress.errors import SnapshotError, printable
from modelexpress.processes import (
    Address,
    descriptors_of,
    mappings_of,
    name_of,
    plain_address,
    require_same_network,
    socket_inodes,
    tcp_sockets,
    threads_of,
    unix_peers,
)

Kind = Literal["thread", "mapping", "descriptor", "socket"]

_OUR_THREADS = "mx-"
_UCX_THREAD = "async"
_OUR_MEMORY = "memfd:modelexpress"
_UCX_MEMORY = "/dev/shm/ucx_shm_posix_"
_REDIS_PORT = 6379


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that is still there."""

    pid: int
    process: str
    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what} in process {self.pid} ({self.process})"


@dataclass(frozen=True, slots=True)
class Ends:
    """Where connections and files of ours lead: the memory service's socket, the registry's folder or addresses."""

    gms: str | None = None
    registry_folder: str | None = None
    registry_addresses: frozenset[Address] = frozenset()


def ends_of(settings: Mapping[str, str | None], folder: str) -> Ends:
    """From the settings `gms` and `registry` of a process that works in `folder`.

    Raises:
        SnapshotError: the registry's host has no address here, so that a connection to it cannot be recognised.
    """
    gms, registry = settings.get("gms"), settings.get("registry")
    path = os.path.normpath(os.path.join(folder, gms)) if gms else None
    parts = urlsplit(registry or "")
    if parts.scheme == "file":
        return Ends(path, os.path.realpath(unquote(parts.path)))
    if not parts.hostname:
        return Ends(path)
    port = parts.port or _REDIS_PORT
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise SnapshotError(f"the registry's host {parts.hostname} has no address here: {exc}") from exc
    return Ends(path, None, frozenset((plain_address(str(each[4][0])), port) for each in found))


def leftovers(pids: Iterable[int], ends: Ends) -> tuple[Leftover, ...]:
    """Everything of ours that is left in these processes.

    Raises:
        SnapshotError: one of them may not be looked at from here.
    """
    found = []
    for pid in pids:
        require_same_network(pid)
        process = printable(name_of(pid))
        found += [Leftover(pid, process, kind, printable(what)) for kind, what in _left_in(pid, ends)]
    return tuple(found)


def _left_in(pid: int, ends: Ends) -> Iterator[tuple[Kind, str]]:
    for name in threads_of(pid):
        if name.startswith(_OUR_THREADS):
            yield "thread", name
        elif name == _UCX_THREAD:
            yield "thread", f"{name} of a NIXL agent"
    for mapped in mappings_of(pid):
        if _is_our_memory(mapped.path):
            yield "mapping", f"{mapped.path}: {mapped.nbytes:,} bytes in {mapped.mappings} mappings"
    for fd, what in sorted(descriptors_of(pid).items()):
        if _is_our_memory(what) or _is_in(ends.registry_folder, what):
            yield "descriptor", f"{fd} of {what}"
    yield from _connections(pid, ends)


def _connections(pid: int, ends: Ends) -> Iterator[tuple[Kind, str]]:
    own = socket_inodes(pid)
    if ends.gms is not None:
        for inode, path in unix_peers().items():
            if inode in own and path == ends.gms:
                yield "socket", f"{own[inode]} to the memory service at {path}"
    if ends.registry_addresses:
        for each in tcp_sockets(pid):
            if each.inode in own and each.remote in ends.registry_addresses:
                host, port = each.remote
                yield "socket", f"{own[each.inode]} to the registry at {host}:{port}"


def _is_our_memory(path: str) -> bool:
    return _OUR_MEMORY in path or path.startswith(_UCX_MEMORY)


def _is_in(folder: str | None, path: str) -> bool:
    return folder is not None and path.startswith(f"{folder}/")
