"""GmsImport: weights that a memory service on this host kept from an earlier engine, bound without a copy."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from modelexpress.errors import GmsError, NotAvailable
from modelexpress.gms.backend import device_of, memory_backend
from modelexpress.gms.client import Busy, Imported, Staging, Where, held_nbytes, open_session, require_service, status
from modelexpress.gms.memory import MemoryBackend
from modelexpress.gms.state import Request
from modelexpress.gms.weights import bind_model, contents_of, match_model
from modelexpress.manifest import WeightsIdentity
from modelexpress.model_root import Dirt
from modelexpress.strategies.base import LoadSource, LoadStrategy, LoadTarget, NothingYet, TransferStats, raw_tolerance

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # between two looks at whether the process that stages is still there


class GmsImport(LoadStrategy):
    """Imports the committed generation of the target's identity.

    Args:
        path: the service's socket.
        backend: the kind of memory that the service keeps; None: that of the target's device.
        claims: this process will publish what it loads. The first of several then stages, and the others wait
            for its commit; when it dies, one of them takes its place.
        wait_s: how long to wait for another process that stages the same weights; not at all where a raw
            checkpoint of them is there.
        answer_s: how long the service may take to answer.
        standby: wait for the commit of another replica even where none stages yet, and take nothing else: a raw
            checkpoint would be copied into memory of this process.

    Attributes:
        staging: the claim, when this process got it.
        imported: the generation that was bound, when one was.
        preloaded_nbytes: memory that the service held for it when it was asked for: all of the generation, or what
            another process had staged by then. What that process still had in memory of its own does not count.
    """

    name = "gms"

    def __init__(
        self,
        path: str,
        backend: MemoryBackend | None,
        *,
        claims: bool,
        wait_s: float,
        answer_s: float = 10.0,
        standby: bool = False,
    ) -> None:
        self._path = path
        self._backend = backend
        self._claims = claims
        self._wait_s = wait_s
        self._answer_s = answer_s
        self._standby = standby
        self.staging: Staging | None = None
        self.imported: Imported | None = None
        self.preloaded_nbytes = 0
        self._staged_nbytes: int | None = None  # of a generation that was waited for

    def sources(self, target: LoadTarget) -> Sequence[LoadSource]:
        require_service(self._path)  # before the weights are named, which may read files for their digest
        backend = self._backend or memory_backend(device_of(target.root.module))
        _require_memory_of(backend, self._path)
        identity = target.adapter.identity()
        found: list[LoadSource] = []
        if target.adapter.repeatable and not self._standby:
            with suppress(NotAvailable):
                found.append(self._raw(identity, target, backend))
        try:
            granted = self._ask(self._where(identity.key), backend, wait_s=0.0 if found else self._wait_s)
        except NotAvailable:
            if found:
                return found
            raise
        if isinstance(granted, Staging):
            self.staging = granted
            if not found:
                raise NothingYet(f"the memory service at {self._path} has nothing for these weights; staging them")
            return found
        return (_Generation(self, granted, identity, target), *found)

    def _raw(self, identity: WeightsIdentity, target: LoadTarget, backend: MemoryBackend) -> LoadSource:
        """The raw checkpoint of these weights, which `modelexpress gms publish` put there."""
        granted = open_session(self._where(identity.content_key), "RO", backend, wait_s=0.0)
        if isinstance(granted, Staging):
            raise GmsError("the memory service granted staging to a session that asked to read")
        return _Generation(self, granted, identity, target)

    def take_staging(self) -> Staging | None:
        """The claim, if this process got one; the caller's from now on."""
        staging, self.staging = self.staging, None
        return staging

    def close(self) -> None:
        """Give up the claim, if there is one, so that another process gets it."""
        staging = self.take_staging()
        if staging is not None:
            staging.close()

    def bound(self, imported: Imported, *, waited: bool) -> None:
        """Remember which generation lies under the model now."""
        self.imported = imported
        self.preloaded_nbytes = imported.kept_nbytes
        if waited and self._staged_nbytes is not None:
            self.preloaded_nbytes = min(self.preloaded_nbytes, self._staged_nbytes)

    def _where(self, key: str) -> Where:
        return Where(self._path, key, answer_s=self._answer_s)

    def _ask(self, where: Where, backend: MemoryBackend, *, wait_s: float) -> Staging | Imported:
        request: Request = "RW_OR_RO" if self._claims else "RO"
        try:
            return open_session(where, request, backend, wait_s=0.0)
        except NotAvailable as exc:
            if not wait_s or not (self._standby or isinstance(exc, Busy)):
                raise
        self._staged_nbytes = held_nbytes(where)
        logger.info("waiting up to %.0f s for another process to commit these weights", wait_s)
        if self._claims or self._standby:
            return open_session(where, request, backend, wait_s=wait_s)
        return _wait_while_staged(where, request, backend, until=time.monotonic() + wait_s)


def _wait_while_staged(where: Where, request: Request, backend: MemoryBackend, *, until: float) -> Staging | Imported:
    """Wait for a commit as long as there is somebody who may make it.

    A service keeps who asks to read waiting after the writer has died, since the next one may come; whoever has
    another way to load asks again now and then instead.

    Raises:
        NotAvailable: nobody stages it any more, or `until`, a `time.monotonic()` moment, has passed.
    """
    while True:
        left_s = until - time.monotonic()
        try:
            return open_session(where, request, backend, wait_s=min(_LOOK_S, max(0.0, left_s)))
        except Busy:
            if left_s <= _LOOK_S:
                raise


def _require_memory_of(backend: MemoryBackend, path: str) -> None:
    """Find out before anything is asked for whether a service keeps the kind of memory that a device needs.

    Ordinals of devices are not compared: each process counts the devices that it sees.

    Raises:
        GmsError: it keeps another kind.
    """
    if backend.device == "cpu":
        return  # what is not sealed host memory is refused when it arrives
    kept = status(path).device
    if kept.partition(":")[0] != backend.device.partition(":")[0]:
        raise GmsError(
            f"the memory service at {path} keeps memory of {kept}, and the model lies on {backend.device}; start one "
            f"with --device {backend.device}"
        )


class _Generation(LoadSource):
    def __init__(self, strategy: GmsImport, imported: Imported, identity: WeightsIdentity, target: LoadTarget) -> None:
        self.name = f"{imported.where.path} generation {imported.generation}"
        self._strategy = strategy
        self._imported = imported
        self._identity = identity
        self._segments = imported.take_segments()
        try:
            self._contents = contents_of(imported.body, [segment.mapping.nbytes for segment in self._segments])
        except GmsError:
            imported.close()
            raise
        # Every byte of every tensor is bound or overwritten; a raw checkpoint has the persistent ones only.
        raw = self._contents.kind == "checkpoint"
        self.tolerates = raw_tolerance(target.adapter) if raw else Dirt.LAYOUT_BYTES

    def load(self, target: LoadTarget) -> TransferStats:
        adapter, root, contents = target.adapter, target.root, self._contents
        segments, self._segments = self._segments, ()
        self._check_identity()
        raw = contents.kind == "checkpoint"
        if not raw:
            root.prepare(lambda module: adapter.prepare_layout(module, contents.manifest))
        binding = match_model(contents, adapter, root.module)
        with root.writing() as module:
            private_nbytes = bind_model(contents, binding, segments)
            adapter.finalize(module, from_checkpoint=raw)
        shared_nbytes = binding.nbytes - private_nbytes
        logger.info("bound %d bytes without a copy, %d became private", shared_nbytes, private_nbytes)
        self._strategy.bound(self._imported, waited=not raw)
        return TransferStats(binding.nbytes)

    def _check_identity(self) -> None:
        theirs, ours = self._contents.identity, self._identity
        same = theirs == ours if self._contents.kind == "layout" else theirs.content_key == ours.content_key
        if not same:
            raise NotAvailable(
                f"the generation under this key says that it is {theirs.model or theirs.revision}, which is not "
                "what is wanted; it is not used"
            )
