"""The Transport contract: how bytes get from a source's memory into ours.

One-sided: the source registers its memory once and does nothing while it is read. `LocalTransport` moves
bytes inside one process; it exists so that everything above a transport can be tested with real bytes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import memmove

import msgspec

from modelexpress.errors import NotAvailable, TransferFailed
from modelexpress.manifest import Manifest
from modelexpress.plan import Chunk, TransferPlan

Arrived = Callable[[Chunk], None]


class Registration(ABC):
    """Memory that other processes may read until `close` returns. The owner keeps it alive that long."""

    @property
    @abstractmethod
    def endpoint(self) -> bytes:
        """What a reader needs to reach this memory. Whoever has it can read: a secret like a password."""

    @abstractmethod
    def close(self) -> None:
        """End every read of this memory, then return. Afterwards the memory may be changed or freed."""


class Connection(ABC):
    """A way to one source, proven to work and used by one thread. Close it before the transport."""

    @abstractmethod
    def read(self, plan: TransferPlan, *, deadline: float, arrived: Arrived | None = None) -> None:
        """Fill the plan's target memory. May be called again with another plan of the same source.

        Calls `arrived` once per chunk, from the thread that moved it, as soon as the chunk is in place;
        what it raises ends the read and goes up. `deadline` is a `time.monotonic()` moment.

        When this returns or raises, nothing will write to the target memory any more.

        Raises:
            TransferFailed: the source went away, stalled past the deadline, or sent an error.
            RecoveryFailed: the transport cannot prove that the read is over, so the memory must not be used.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget the source. Safe to call twice."""


class Transport(ABC):
    """Moves bytes as a plan says. Not thread-safe; `close` it in a `finally`."""

    name: str

    @abstractmethod
    def register(self, manifest: Manifest) -> Registration:
        """Open the manifest's storages to readers.

        Raises:
            NotAvailable: this machine cannot do it; says why.
        """

    @abstractmethod
    def connect(self, endpoint: bytes, *, deadline: float) -> Connection:
        """Reach the source behind `endpoint` and prove it, before anything of the target is touched.

        Raises:
            NotAvailable: the endpoint is damaged, or the source is dead, stopped or out of reach; says why.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back every agent, thread and registration. Safe to call twice."""


class LocalTransport(Transport):
    """Copies inside this process, between transports that share `open_endpoints`.

    Refuses an endpoint whose registration is closed, as a real peer would.
    """

    name = "local"

    def __init__(self, open_endpoints: set[bytes] | None = None) -> None:
        self._open = set() if open_endpoints is None else open_endpoints

    def register(self, manifest: Manifest) -> Registration:
        return _LocalRegistration(manifest, self._open)

    def connect(self, endpoint: bytes, *, deadline: float) -> Connection:
        if endpoint not in self._open:
            raise NotAvailable("the source's memory is not registered any more")
        return _LocalConnection(endpoint, self._open)

    def close(self) -> None:
        """Nothing is held: registrations close themselves."""


class _LocalConnection(Connection):
    def __init__(self, endpoint: bytes, registered: set[bytes]) -> None:
        self._endpoint = endpoint
        self._registered = registered

    def read(self, plan: TransferPlan, *, deadline: float, arrived: Arrived | None = None) -> None:
        for number, chunk in enumerate(plan.chunks):
            if self._endpoint not in self._registered or time.monotonic() > deadline:
                gone = "deadline passed" if self._endpoint in self._registered else "the source went away"
                raise TransferFailed(f"{gone} after {number} of {len(plan.chunks)} chunks")
            for part in chunk.ranges:
                memmove(plan.target_address(part), plan.source_address(part), part.nbytes)
            if arrived is not None:
                arrived(chunk)

    def close(self) -> None:
        """Nothing is held."""


class _LocalRegistration(Registration):
    def __init__(self, manifest: Manifest, registered: set[bytes]) -> None:
        self._endpoint = msgspec.msgpack.encode([storage.address for storage in manifest.storages])
        self._registered = registered
        registered.add(self._endpoint)

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def close(self) -> None:
        self._registered.discard(self._endpoint)
