"""WeightSource, the way out: publishes weights that are final, keeps the publication alive, withdraws it in time."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType

from modelexpress.digest import checksums_of
from modelexpress.errors import ConfigError, ModelExpressError, RegistryError
from modelexpress.manifest import Manifest
from modelexpress.offer import Offer
from modelexpress.registry.base import Registry, SourceKind, SourceRecord
from modelexpress.thread_name import name_this_thread
from modelexpress.transport import Transport

logger = logging.getLogger(__name__)

# How long a withdrawn source waits for its readers to finish. When it is over their reads fail. Below
# Kubernetes' default grace period of 30 s, so that SIGTERM ends in time.
_DRAIN_S = 20.0
_DRAIN_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Served:
    """What is published, and what it is found by.

    `describe` says where the memory lies now, and gives what keeps exactly that memory alive. `rename` gives
    keys and label for the same weights at another revision.
    """

    describe: Callable[[], tuple[Manifest, object]]
    keys: tuple[str, ...]
    kind: SourceKind
    label: str
    rename: Callable[[str], tuple[tuple[str, ...], str]]


class WeightSource:
    """One set of weights that others can load from. Publish it when the weights are final.

    Use it as a context manager, or call `publish` and `withdraw`. It keeps the weights alive and expects them
    unchanged; wrap what changes them in `updating`. The interpreter's normal exit withdraws it.

    Args:
        open_registry, open_transport: make what serves one generation, and is closed with it.
        checksums: compute them at publish; readers that verify cannot use a source without.
        threads: for the checksums.
        lease_ttl_s: the registry's; it is renewed three times in that time.
    """

    def __init__(
        self,
        served: Served,
        open_registry: Callable[[], Registry],
        open_transport: Callable[[], Transport],
        *,
        checksums: bool,
        threads: int,
        lease_ttl_s: float,
    ) -> None:
        self._served = served
        self._open_registry = open_registry
        self._open_transport = open_transport
        self._checksums = checksums
        self._threads = threads
        self._lease_ttl_s = lease_ttl_s
        self._source_id = uuid.uuid4().hex
        self._generation = 0
        self._live: _Publication | None = None
        self._updates = 0
        self._names = set(served.keys)
        self._broken = False
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()

    @property
    def record(self) -> SourceRecord:
        """The record as it stands in the registry.

        Raises:
            ModelExpressError: nothing is published.
        """
        live = self._live
        if live is None or not self._is_ours:
            raise ModelExpressError(f"{self._served.label} is not published")
        return live.record

    @property
    def published(self) -> bool:
        """Whether others can find the weights now, in this process."""
        return self._live is not None and self._is_ours

    @property
    def generation(self) -> int:
        """How often the weights were published; 0 before the first time."""
        return self._generation

    def publish(self) -> SourceRecord:
        """Register the memory, compute checksums, and become findable as a new generation.

        Raises:
            ModelExpressError: it is published already.
            NotAvailable: the transport or the model cannot serve these weights; says why.
            RegistryError: nobody could be told. Nothing is left behind.
        """
        self._require_ours()
        with self._lock:
            if self._live is not None:
                raise ModelExpressError(f"{self._served.label} is published already; withdraw it first")
            if self._updates:
                raise ModelExpressError(f"{self._served.label} is being updated; it is published when that ends")
            return self._publish()

    def withdraw(self) -> None:
        """Become unfindable, let readers finish for a while, and end what is left of them.

        When this returns, no reader that is still at it will accept what it got: the memory may change or go.
        Safe to call twice. In a forked child it does nothing: the publication is its parent's.
        """
        if not self._is_ours:  # before the lock, which another thread of the parent may have held at the fork
            return
        with self._lock:
            self._broken = self._updates > 0  # an update that is still running must not publish again
            self._stop()

    @contextmanager
    def updating(self, revision: str) -> Iterator[None]:
        """Change the weights inside this block: withdrawn before it, published as a new generation after it.

        Other weights need another name, or a replica that asks for the old ones would get the new: targets find
        them by `revision` from now on. Blocks may be nested or run in several threads; the weights are
        published when the last one ends, under its revision. A block that raises leaves the source withdrawn.

        Raises:
            ModelExpressError: on entry, when nothing is published that could be updated.
            ConfigError: on entry, when the weights were published under this revision before.
        """
        self._require_ours()
        with self._lock:
            if self._live is None and not self._updates:
                raise ModelExpressError(f"{self._served.label} is not published; publish it when it is final")
            if not revision or not self._names.isdisjoint(self._served.rename(revision)[0]):
                raise ConfigError(f"revision {revision!r} names other weights of this source; give a new one")
            self._updates += 1
            self._stop()
        try:
            yield
            self._rename(revision)
        except BaseException:
            self._broken = True
            raise
        finally:
            with self._lock:
                self._updates -= 1
                if not self._updates:
                    broken, self._broken = self._broken, False
                    if not broken:
                        self._publish()

    def __enter__(self) -> WeightSource:
        self.publish()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.withdraw()

    @property
    def _is_ours(self) -> bool:
        """False in a forked child, which has a copy of this object, and neither its threads nor its publication."""
        return os.getpid() == self._owner_pid

    def _require_ours(self) -> None:
        if not self._is_ours:
            raise ModelExpressError(
                f"{self._served.label} is a source of process {self._owner_pid}, from which this one was forked; "
                "make a source of its own here"
            )

    def _publish(self) -> SourceRecord:
        self._generation += 1
        self._live = self._start()
        atexit.register(self.withdraw)
        return self._live.record

    def _rename(self, revision: str) -> None:
        keys, label = self._served.rename(revision)
        with self._lock:
            self._names.update(keys)
            self._served = dataclasses.replace(self._served, keys=keys, label=label)

    def _stop(self) -> None:
        live, self._live = self._live, None
        atexit.unregister(self.withdraw)
        if live is not None:
            live.stop()

    def _start(self) -> _Publication:
        manifest, memory = self._served.describe()
        with ExitStack() as opened:
            registry = opened.enter_context(closing(self._open_registry()))
            transport = opened.enter_context(closing(self._open_transport()))
            registration = opened.enter_context(closing(transport.register(manifest)))
            checksums = checksums_of(manifest, threads=self._threads) if self._checksums else b""
            offer = Offer(manifest, registration.endpoint, checksums).encode()
            record = registry.publish(self._record_for(manifest, registration.transport), offer)
            return _Publication(registry, record, offer, memory, opened.pop_all(), self._lease_ttl_s)

    def _record_for(self, manifest: Manifest, transport: str) -> SourceRecord:
        return SourceRecord(
            source_id=self._source_id,
            generation=self._generation,
            keys=self._served.keys,
            kind=self._served.kind,
            label=self._served.label,
            host=socket.gethostname(),
            pid=os.getpid(),
            transport=transport,
            nbytes=manifest.nbytes,
            tensors=len(manifest.tensors),
            offer_digest="",
            published_at=time.time(),
        )


class _Publication:
    """One generation while it is findable: what it holds open, and the thread that renews its lease."""

    def __init__(
        self,
        registry: Registry,
        record: SourceRecord,
        offer: bytes,
        memory: object,
        opened: ExitStack,
        lease_ttl_s: float,
    ) -> None:
        self.record = record
        self._registry = registry
        self._offer = offer
        self._memory = memory
        self._opened = opened
        self._lease_ttl_s = lease_ttl_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mx-renew", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # interrupted while the thread begins
            self._ended.set()
            opened.close()
            raise

    def stop(self) -> None:
        """Stop offering, let readers finish, withdraw, end what is left of the reads; in this order."""
        self._ended.set()
        self._thread.join()
        try:
            self.record = self._registry.retire(self.record, self._offer)
            self._drain()
            self._registry.withdraw(self.record)
        except RegistryError as exc:
            self._outwait(exc)
        finally:
            self._opened.close()

    def _renew(self) -> None:
        name_this_thread("mx-renew")
        while not self._ended.wait(self._lease_ttl_s / 3):
            try:
                self._registry.renew(self.record, self._offer)
            except RegistryError as exc:
                logger.warning("could not renew source %s, trying again: %s", self.record.name, exc)

    def _drain(self) -> None:
        give_up = time.monotonic() + _DRAIN_S
        renew_at = time.monotonic() + self._lease_ttl_s / 3
        while (readers := self._registry.readers(self.record)) and time.monotonic() < give_up:
            if time.monotonic() > renew_at:
                self._registry.renew(self.record, self._offer)
                renew_at += self._lease_ttl_s / 3
            time.sleep(_DRAIN_POLL_S)
        if readers:
            logger.warning("ended %d reads of source %s after %.0f s", readers, self.record.name, _DRAIN_S)

    def _outwait(self, reason: RegistryError) -> None:
        """The registry cannot be told: wait until nobody can find us any more."""
        lease_s = self._registry.lease_ttl_s
        logger.warning(
            "could not withdraw source %s (%s); waiting %.1f s for its lease to end", self.record.name, reason, lease_s
        )
        time.sleep(lease_s)
