"""RdmaFromPeer: one-sided reads from a process that already holds the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from modelexpress.checkpoint.observed import ObservedTensors
from modelexpress.checkpoint.peer import PeerTensors
from modelexpress.digest import Verifier, Verify
from modelexpress.errors import NotAvailable, TransferFailed
from modelexpress.model_root import Dirt
from modelexpress.offer import Offer, decode_offer
from modelexpress.plan import Chunk, plan_transfer
from modelexpress.registry.base import Registry, SourceKind, SourceRecord
from modelexpress.strategies.base import LoadSource, LoadStrategy, LoadTarget, TransferStats, load_raw, raw_tolerance
from modelexpress.transport import Connection, Transport

# A reader's lease outlives its transfer by this much, so that the source never frees memory under a read that
# ends in time.
_LEASE_MARGIN_S = 5.0


class RdmaFromPeer(LoadStrategy):
    """Reads from sources in a registry: first those of the same layout, then those of the raw checkpoint.

    Args:
        open_transport: makes a transport for one attempt, which closes it.
        verify: compares what arrived with the checksums that the source made.
        transfer_timeout_s: for one attempt, from connecting to the last byte.
        max_sources: how many of each kind to try, the least loaded first.
    """

    name = "rdma"

    def __init__(
        self,
        registry: Registry,
        open_transport: Callable[[], Transport],
        *,
        verify: Verify,
        transfer_timeout_s: float,
        max_sources: int,
    ) -> None:
        self._registry = registry
        self._open_transport = open_transport
        self._verify: Verify = verify
        self._transfer_timeout_s = transfer_timeout_s
        self._max_sources = max_sources

    def sources(self, target: LoadTarget) -> Sequence[LoadSource]:
        identity = target.adapter.identity()
        layout = [_LayoutPeer(self, record) for record in self._find(identity.key, "layout")]
        raw = [_CheckpointPeer(self, record, target) for record in self._find(identity.content_key, "checkpoint")]
        if not layout and not raw:
            raise NotAvailable(
                f"no source in the registry for revision {identity.revision}"
                f"{f' of {identity.model}' if identity.model else ''}; `modelexpress sources` lists what there is"
            )
        return (*layout, *raw)

    def _find(self, key: str, kind: SourceKind) -> list[SourceRecord]:
        found = [each.record for each in self._registry.find(key) if each.record.kind == kind]
        return found[: self._max_sources]

    @contextmanager
    def connect(self, record: SourceRecord) -> Iterator[_PeerSession]:
        """Hold everything that reading one source needs, and give all of it back."""
        deadline = time.monotonic() + self._transfer_timeout_s
        with (
            self._registry.reading(record, lease_s=self._transfer_timeout_s + _LEASE_MARGIN_S),
            closing(self._open_transport()) as transport,
        ):
            if record.transport != transport.name:
                raise NotAvailable(f"the source is reached by {record.transport}, and we have {transport.name}")
            offer = decode_offer(self._registry.offer(record))
            with closing(transport.connect(offer.endpoint, deadline=deadline)) as connection:
                yield _PeerSession(self._registry, record, offer, connection, deadline, self._verify)


class _PeerSession:
    """One source while it is being read."""

    def __init__(
        self,
        registry: Registry,
        record: SourceRecord,
        offer: Offer,
        connection: Connection,
        deadline: float,
        verify: Verify,
    ) -> None:
        self.offer = offer
        self.connection = connection
        self.deadline = deadline
        self.verify: Verify = verify
        self._registry = registry
        self._record = record

    def confirm(self) -> None:
        """The bytes are good only if the generation that was read still stands now that the read is over."""
        if not self._registry.confirms(self._record):
            raise TransferFailed(
                f"source {self._record.name} changed or withdrew generation {self._record.generation} while it was "
                "read; its bytes are not used"
            )


class _LayoutPeer(LoadSource):
    """A model as another engine of the same identity holds it."""

    tolerates = Dirt.LAYOUT_BYTES  # a plan covers every byte of every tensor, whatever is in it now

    def __init__(self, strategy: RdmaFromPeer, record: SourceRecord) -> None:
        self.name = record.name
        self._strategy = strategy
        self._record = record

    def load(self, target: LoadTarget) -> TransferStats:
        adapter, root = target.adapter, target.root
        with self._strategy.connect(self._record) as peer:
            root.prepare(lambda module: adapter.prepare_layout(module, peer.offer.manifest))
            plan = plan_transfer(peer.offer.manifest, adapter.manifest(root.module))
            verifier = Verifier(plan, peer.offer.checksums, peer.verify)

            def arrived(chunk: Chunk) -> None:
                verifier.check(chunk)
                if target.progress is not None:
                    target.progress(chunk.nbytes)

            with root.writing(Dirt.LAYOUT_BYTES):
                peer.connection.read(plan, deadline=peer.deadline, arrived=arrived)
            peer.confirm()
        with root.writing() as module:
            adapter.finalize(module, from_checkpoint=False)
        return TransferStats(plan.nbytes)


class _CheckpointPeer(LoadSource):
    """The raw tensors of a checkpoint in another process's memory."""

    def __init__(self, strategy: RdmaFromPeer, record: SourceRecord, target: LoadTarget) -> None:
        self.name = record.name
        self.tolerates = raw_tolerance(target.adapter)
        self._strategy = strategy
        self._record = record

    def load(self, target: LoadTarget) -> TransferStats:
        with self._strategy.connect(self._record) as peer:
            raw = PeerTensors(self.name, peer.offer.manifest, peer.connection, deadline=peer.deadline)
            observed = ObservedTensors(
                raw, checksums=peer.offer.checksums, verify=peer.verify, progress=target.progress
            )
            return load_raw(target, observed, confirm=peer.confirm)
