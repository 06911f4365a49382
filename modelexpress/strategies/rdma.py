"""RdmaFromPeer: one-sided reads from processes that already hold the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from modelexpress.checkpoint.observed import ObservedTensors
from modelexpress.checkpoint.peer import PeerTensors
from modelexpress.digest import Verifier, Verify
from modelexpress.errors import NotAvailable, TransferFailed
from modelexpress.model_root import Dirt
from modelexpress.offer import decode_offer
from modelexpress.plan import Chunk, plan_transfer
from modelexpress.registry.base import Registry, SourceKind, SourceRecord
from modelexpress.strategies.base import LoadSource, LoadStrategy, LoadTarget, TransferStats, load_raw, raw_tolerance
from modelexpress.stripe import Lost, Session, Stripe
from modelexpress.transport import Transport

# A reader's lease outlives its transfer by this much, so that the source never frees memory under a read that
# ends in time.
_LEASE_MARGIN_S = 5.0


class RdmaFromPeer(LoadStrategy):
    """Reads from sources in a registry: first those of the same layout, then those of the raw checkpoint.

    Args:
        open_transport: makes a transport for one source, which is closed with it.
        verify: compares what arrived with the checksums that the source made.
        transfer_timeout_s: for one attempt, from connecting to the last byte.
        max_sources: how many of each kind to read from, the least loaded first.
        together: read from all sources of the same bytes at the same time; one after the other without it.
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
        together: bool = True,
    ) -> None:
        self._registry = registry
        self._open_transport = open_transport
        self.verify: Verify = verify
        self.transfer_timeout_s = transfer_timeout_s
        self._max_sources = max_sources
        self.together = together

    def sources(self, target: LoadTarget) -> Sequence[LoadSource]:
        identity = target.adapter.identity()
        layout = self._find(identity.key, "layout")
        raw = self._find(identity.content_key, "checkpoint")
        if not layout and not raw:
            raise NotAvailable(
                f"no source in the registry for revision {identity.revision}"
                f"{f' of {identity.model}' if identity.model else ''}; `modelexpress sources` lists what there is"
            )
        of_layout, of_raw = _Peers(self, layout, Dirt.LAYOUT_BYTES), _Peers(self, raw, raw_tolerance(target.adapter))
        return (
            *(_LayoutPeer(of_layout, record.name) for record in layout),
            *(_CheckpointPeer(of_raw, record.name) for record in raw),
        )

    def _find(self, key: str, kind: SourceKind) -> list[SourceRecord]:
        found: dict[str, SourceRecord] = {}
        for each in self._registry.find(key):
            if each.record.kind == kind:
                found.setdefault(each.record.name, each.record)
        return list(found.values())[: self._max_sources]

    @contextmanager
    def connect(self, record: SourceRecord, stop: threading.Event, deadline: float) -> Iterator[Session]:
        """Hold everything that reading one source needs, and give all of it back."""
        with (
            self._registry.reading(record, lease_s=max(0.0, deadline - time.monotonic()) + _LEASE_MARGIN_S),
            closing(self._open_transport()) as transport,
        ):
            if not set(record.transport.split(",")) & set(transport.name.split(",")):
                raise NotAvailable(f"the source is reached by {record.transport}, and we have {transport.name}")
            offer = decode_offer(self._registry.offer(record))
            with closing(transport.connect(offer.endpoint, deadline=deadline, stop=stop)) as connection:
                yield Session(offer, connection, lambda: self._confirm(record))

    def _confirm(self, record: SourceRecord) -> None:
        """The bytes are good only if the generation that was read still stands now that the read is over."""
        if not self._registry.confirms(record):
            raise TransferFailed(
                f"source {record.name} changed or withdrew generation {record.generation} while it was "
                "read; its bytes are not used"
            )


class _Peers:
    """The sources of one kind that a load may read from, and what became of each."""

    def __init__(self, strategy: RdmaFromPeer, records: Sequence[SourceRecord], tolerates: Dirt) -> None:
        self.verify: Verify = strategy.verify
        self._strategy = strategy
        self._left = {record.name: record for record in records}
        self._lost: dict[str, Lost] = {}
        self._tolerates = tolerates

    def tolerates(self, source: str) -> Dirt:
        """The most dirt that an attempt with this source can start on: any, where it will do nothing."""
        return Dirt.ANYTHING if source in self._lost else self._tolerates

    @contextmanager
    def stripe(self, source: str) -> Iterator[Stripe]:
        """Read from `source`, and from all the others that were neither lost nor the first of an attempt before.

        Raises: what ended `source`, if it was lost in an attempt before.
        """
        if source in self._lost:
            raise self._lost[source].again(source)
        strategy, records = self._strategy, dict(self._left)
        del self._left[source]
        names = [source, *(each for each in records if each != source)] if strategy.together else [source]
        deadline = time.monotonic() + strategy.transfer_timeout_s
        stripe = Stripe(names, lambda name, stop: strategy.connect(records[name], stop, deadline), deadline=deadline)
        try:
            with stripe:
                yield stripe
        finally:
            for lost in stripe.lost:
                self._lost[lost.source] = lost
                self._left.pop(lost.source, None)


def _stats(nbytes: int, stripe: Stripe) -> TransferStats:
    shares = stripe.shares
    return TransferStats(nbytes, tuple(each for each in shares if each.nbytes) or shares[:1], stripe.lost)


class _LayoutPeer(LoadSource):
    """A model as other engines of the same identity hold it."""

    def __init__(self, peers: _Peers, source: str) -> None:
        self.name = source
        self._peers = peers

    @property
    def tolerates(self) -> Dirt:  # type: ignore[override]  # it changes when the source is lost in an attempt of another
        """A plan covers every byte of every tensor, whatever is in it now."""
        return self._peers.tolerates(self.name)

    def load(self, target: LoadTarget) -> TransferStats:
        adapter, root = target.adapter, target.root
        with self._peers.stripe(self.name) as stripe:
            offer = stripe.offer()
            root.prepare(lambda module: adapter.prepare_layout(module, offer.manifest))
            plan = plan_transfer(offer.manifest, adapter.manifest(root.module))
            verifier = Verifier(plan, offer.checksums, self._peers.verify)

            def arrived(chunk: Chunk) -> None:
                verifier.check(chunk)
                if target.progress is not None:
                    target.progress(chunk.nbytes)

            with root.writing(Dirt.LAYOUT_BYTES):
                stripe.read(plan, arrived=arrived, moved=verifier.moved)
        with root.writing() as module:
            adapter.finalize(module, from_checkpoint=False)
        return _stats(plan.nbytes, stripe)


class _CheckpointPeer(LoadSource):
    """The raw tensors of a checkpoint in other processes' memory."""

    def __init__(self, peers: _Peers, source: str) -> None:
        self.name = source
        self._peers = peers

    @property
    def tolerates(self) -> Dirt:  # type: ignore[override]  # it changes when the source is lost in an attempt of another
        """As much as the adapter's own loading overwrites."""
        return self._peers.tolerates(self.name)

    def load(self, target: LoadTarget) -> TransferStats:
        with self._peers.stripe(self.name) as stripe:
            observed = ObservedTensors(
                PeerTensors(self.name, stripe),
                checksums=stripe.offer().checksums,
                verify=self._peers.verify,
                progress=target.progress,
            )
            # Each read of the stripe ends with the word of every source in it: there is nothing left to confirm.
            loaded = load_raw(target, observed, confirm=lambda: None)
        return _stats(loaded.nbytes, stripe)
