"""GmsImport: weights that a memory service on this host kept from an earlier engine, bound without a copy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from modelexpress.errors import GmsError, NotAvailable
from modelexpress.gms.client import Busy, Imported, Staging, Where, open_session, require_service
from modelexpress.gms.memory import MemoryBackend
from modelexpress.gms.weights import bind_model, contents_of, match_model
from modelexpress.manifest import WeightsIdentity
from modelexpress.model_root import Dirt
from modelexpress.strategies.base import LoadSource, LoadStrategy, LoadTarget, NothingYet, TransferStats, raw_tolerance

logger = logging.getLogger(__name__)


class GmsImport(LoadStrategy):
    """Imports the committed generation of the target's identity.

    Args:
        path: the service's socket.
        claims: this process will publish what it loads. The first of several then stages, and the others wait
            for its commit; when it dies, one of them takes its place.
        wait_s: how long to wait for another process that stages the same weights; not at all where a raw
            checkpoint of them is there.
        answer_s: how long the service may take to answer.

    Attributes:
        staging: the claim, when this process got it.
        imported: the generation that was bound, when one was.
    """

    name = "gms"

    def __init__(
        self, path: str, backend: MemoryBackend, *, claims: bool, wait_s: float, answer_s: float = 10.0
    ) -> None:
        self._path = path
        self._backend = backend
        self._claims = claims
        self._wait_s = wait_s
        self._answer_s = answer_s
        self.staging: Staging | None = None
        self.imported: Imported | None = None

    def sources(self, target: LoadTarget) -> Sequence[LoadSource]:
        require_service(self._path)  # before the weights are named, which may read files for their digest
        identity = target.adapter.identity()
        found: list[LoadSource] = []
        if target.adapter.repeatable:
            with suppress(NotAvailable):
                found.append(self._raw(identity, target))
        try:
            granted = self._ask(self._where(identity.key), wait_s=0.0 if found else self._wait_s)
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

    def _raw(self, identity: WeightsIdentity, target: LoadTarget) -> LoadSource:
        """The raw checkpoint of these weights, which `modelexpress gms publish` put there."""
        granted = open_session(self._where(identity.content_key), "RO", self._backend, wait_s=0.0)
        if isinstance(granted, Staging):
            raise GmsError("the memory service granted staging to a session that asked to read")
        return _Generation(self, granted, identity, target)

    def close(self) -> None:
        """Give up the claim, if there is one, so that another process gets it."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.close()

    def _where(self, key: str) -> Where:
        return Where(self._path, key, answer_s=self._answer_s)

    def _ask(self, where: Where, *, wait_s: float) -> Staging | Imported:
        if self._claims:
            return open_session(where, "RW_OR_RO", self._backend, wait_s=wait_s)
        try:
            return open_session(where, "RO", self._backend, wait_s=0.0)
        except Busy:
            if not wait_s:
                raise
            logger.info("waiting up to %.0f s for another process to commit these weights", wait_s)
            return open_session(where, "RO", self._backend, wait_s=wait_s)


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
        self._strategy.imported = self._imported
        return TransferStats(binding.nbytes)

    def _check_identity(self) -> None:
        theirs, ours = self._contents.identity, self._identity
        same = theirs == ours if self._contents.kind == "layout" else theirs.content_key == ours.content_key
        if not same:
            raise NotAvailable(
                f"the generation under this key says that it is {theirs.model or theirs.revision}, which is not "
                "what is wanted; it is not used"
            )
