"""The Transport contract: how bytes get from a source's memory into ours.

One-sided: the source registers its memory once and does nothing while it is read. `LocalTransport` moves
bytes inside one process; it exists so that everything above a transport can be tested with real bytes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from ctypes import memmove

import msgspec

from modelexpress.errors import NotAvailable, TransferFailed
from modelexpress.manifest import Manifest
from modelexpress.plan import Chunk, TransferPlan

Arrived = Callable[[Chunk], None]
Moved = Callable[[Chunk, int, int], None]


class Work:
    """Chunks that nobody has taken yet. Lanes take one after the other: whoever is faster moves more. Thread-safe."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._left = deque(chunks)
        self._stopped = threading.Event()

    def take(self) -> Chunk | None:
        """The next chunk; None when there is none, or when the work was stopped."""
        if self.stopped:
            return None
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def stop(self) -> None:
        """End the read that takes from here, from any thread: it returns or raises as soon as it safely can."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()


class Registration(ABC):
    """Memory that other processes may read until `close` returns. The owner keeps it alive that long."""

    transport: str  # the name of what it can be reached by

    @property
    @abstractmethod
    def endpoint(self) -> bytes:
        """What a reader needs to reach this memory. Whoever has it can read: a secret like a password."""

    @abstractmethod
    def close(self) -> None:
        """End every read of this memory, then return. Afterwards the memory may be changed or freed."""


class Connection(ABC):
    """A way to one source, proven to work and used by one thread. Close it before the transport."""

    transport: str  # the name of what really moves the bytes

    @abstractmethod
    def read(
        self,
        plan: TransferPlan,
        *,
        deadline: float,
        arrived: Arrived | None = None,
        moved: Moved | None = None,
        work: Work | None = None,
    ) -> None:
        """Fill the plan's target memory. May be called again with another plan of the same source.

        When this returns or raises, nothing will write to the target memory any more. What was taken from
        `work` and not announced to `arrived` by then is not in place.

        Args:
            deadline: a `time.monotonic()` moment.
            arrived: called once per chunk, from the thread that moved it, as soon as the chunk is in place and
                the source has proven once more that its registration is open: the bytes of a chunk that was
                announced were not changed before they were read. What it raises ends the read and goes up.
            moved: called from the same thread, before that, by a transport that moves a chunk in steps: `moved(chunk,
                start, nbytes)` says that so many bytes of the chunk's ranges, counted in their order, are in
                place and still in the core's cache. Steps of one chunk follow each other and begin at 0. A
                transport that moves chunks whole does not call it.
            work: where to take chunks of the plan from; all of them without it.

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
    def connect(self, endpoint: bytes, *, deadline: float, stop: threading.Event | None = None) -> Connection:
        """Reach the source behind `endpoint` and prove it, before anything of the target is touched.

        Args:
            deadline: a `time.monotonic()` moment.
            stop: another thread sets it when the connection is not wanted any more.

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

    def connect(self, endpoint: bytes, *, deadline: float, stop: threading.Event | None = None) -> Connection:
        if endpoint not in self._open:
            raise NotAvailable("the source's memory is not registered any more")
        return _LocalConnection(endpoint, self._open)

    def close(self) -> None:
        """Nothing is held: registrations close themselves."""


class _LocalConnection(Connection):
    transport = LocalTransport.name

    def __init__(self, endpoint: bytes, registered: set[bytes]) -> None:
        self._endpoint = endpoint
        self._registered = registered

    def read(
        self,
        plan: TransferPlan,
        *,
        deadline: float,
        arrived: Arrived | None = None,
        moved: Moved | None = None,
        work: Work | None = None,
    ) -> None:
        work = work or Work(plan.chunks)
        number = 0
        while time.monotonic() <= deadline and (chunk := work.take()) is not None:
            for part in chunk.ranges:
                memmove(plan.target_address(part), plan.source_address(part), part.nbytes)
            if self._endpoint not in self._registered:
                raise TransferFailed(f"the source went away after {number} of {len(plan.chunks)} chunks")
            number += 1
            if arrived is not None:
                arrived(chunk)
        if time.monotonic() > deadline:
            raise TransferFailed(f"deadline passed after {number} of {len(plan.chunks)} chunks")

    def close(self) -> None:
        """Nothing is held."""


class _LocalRegistration(Registration):
    transport = LocalTransport.name

    def __init__(self, manifest: Manifest, registered: set[bytes]) -> None:
        self._endpoint = msgspec.msgpack.encode([storage.address for storage in manifest.storages])
        self._registered = registered
        registered.add(self._endpoint)

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def close(self) -> None:
        self._registered.discard(self._endpoint)
