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
        """The most dirt that an attempt called `source` can start on: any, where it has nothing to read from."""
        return self._tolerates if self._left else Dirt.ANYTHING

    @contextmanager
    def stripe(self, source: str) -> Iterator[Stripe]:
        """Read from `source`, and from all others that nothing has become of yet.

        An attempt that fails uses up at least the source whose bytes were read; where that was not `source`, the
        attempt that is called after the other one reads `source`. So every source is tried.

        Raises: what ended `source`, when no source is left.
        """
        if not self._left:
            raise self._lost[source].again(source) if source in self._lost else NotAvailable("it was tried before")
        strategy, records = self._strategy, dict(self._left)
        names = sorted(records, key=lambda name: name != source)
        deadline = time.monotonic() + strategy.transfer_timeout_s
        stripe = Stripe(
            names if strategy.together else names[:1],
            lambda name, stop: strategy.connect(records[name], stop, deadline),
            deadline=deadline,
        )
        try:
            with stripe:
                yield stripe
        finally:
            for lost in stripe.lost:
                self._lost[lost.source] = lost
                self._left.pop(lost.source, None)
            self._left.pop(stripe.first or names[0], None)


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
                stripe.read(plan, arrived=arrived, moved=verifier.moved if self._peers.verify != "off" else None)
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
