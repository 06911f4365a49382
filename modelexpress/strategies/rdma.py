"""RdmaFromPeer: one-sided reads from processes that already hold the weights."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial

from modelexpress.checkpoint.observed import ObservedTensors
from modelexpress.checkpoint.peer import PeerTensors
from modelexpress.digest import Verifier, Verify
from modelexpress.errors import NotAvailable, SourceBusy, TransferFailed
from modelexpress.model_root import Dirt
from modelexpress.offer import decode_offer
from modelexpress.plan import Chunk, plan_transfer
from modelexpress.registry.base import FoundSource, Registry, SourceKind, SourceRecord
from modelexpress.strategies.base import LoadSource, LoadStrategy, LoadTarget, TransferStats, load_raw, raw_tolerance
from modelexpress.strategies.turn import SAMPLE, Turn, is_idle
from modelexpress.stripe import Lost, Session, Stripe
from modelexpress.transport import Transport

logger = logging.getLogger(__name__)

# A reader's lease outlives its transfer by this much, so that the source never frees memory under a read that
# ends in time.
_LEASE_MARGIN_S = 5.0

# Between two looks for a source in a registry that was emptied.
_BACK_LOOK_S = 0.1

# An attempt may wait for its turn for this part of its time, and then reads from a source that others read.
_WAITING = 0.5


class RdmaFromPeer(LoadStrategy):
    """Reads from sources in a registry: first those of the same layout, then those of the raw checkpoint.

    Args:
        open_transport: makes a transport for one source, which is closed with it.
        verify: compares what arrived with the checksums that the source made.
        transfer_timeout_s: for one attempt, from connecting to the last byte.
        max_sources: how many of each kind to read from, the least loaded first.
        max_readers: how many targets read from a source at one time; who comes later waits for a turn.
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
        max_readers: int,
        together: bool = True,
    ) -> None:
        self._registry = registry
        self._open_transport = open_transport
        self.verify: Verify = verify
        self.transfer_timeout_s = transfer_timeout_s
        self.max_sources = max_sources
        self.max_readers = max_readers
        self.together = together

    def sources(self, target: LoadTarget) -> Sequence[LoadSource]:
        identity = target.adapter.identity()
        layout = _Peers(self, identity.key, "layout", Dirt.LAYOUT_BYTES)
        raw = _Peers(self, identity.content_key, "checkpoint", raw_tolerance(target.adapter))
        if not layout.names and not raw.names:
            raise NotAvailable(
                f"no source in the registry for revision {identity.revision}"
                f"{f' of {identity.model}' if identity.model else ''}; `modelexpress sources` lists what there is"
            )
        return (
            *(_LayoutPeer(layout, name) for name in layout.names),
            *(_CheckpointPeer(raw, name) for name in raw.names),
        )

    def look(self, key: str, kind: SourceKind) -> list[FoundSource]:
        """Some of the sources of one kind, the least loaded first; each once."""
        found: dict[str, FoundSource] = {}
        for each in self._registry.find(key, at_most=max(SAMPLE, self.max_sources)):
            if each.record.kind == kind:
                found.setdefault(each.record.source_id, each)
        return list(found.values())

    def lease(self, record: SourceRecord, deadline: float, *, limit: int | None = None) -> AbstractContextManager[None]:
        """The source keeps its memory still until the block ends; raises as Registry.reading."""
        lease_s = max(0.0, deadline - time.monotonic()) + _LEASE_MARGIN_S
        return self._registry.reading(record, lease_s=lease_s, limit=limit)

    @contextmanager
    def connect(
        self, record: SourceRecord, stop: threading.Event, deadline: float, *, leased: bool = False
    ) -> Iterator[Session]:
        """Hold everything that reading one source needs, and give all of it back."""
        with (
            nullcontext() if leased else self.lease(record, deadline),
            closing(self._open_transport()) as transport,
        ):
            if not set(record.transport.split(",")) & set(transport.name.split(",")):
                raise NotAvailable(f"the source is reached by {record.transport}, and we have {transport.name}")
            offer = decode_offer(self._registry.offer(record))
            with closing(transport.connect(offer.endpoint, deadline=deadline, stop=stop)) as connection:
                yield Session(offer, connection, lambda: self._confirm(record, deadline))

    def _confirm(self, record: SourceRecord, deadline: float) -> None:
        """The bytes are good only if the generation that was read still stands now that the read is over.

        A registry that lost our lease as well was emptied, or started anew. A source that lives publishes again within
        a third of its lease, and the same generation only where it is the same bytes.
        """
        if self._registry.confirms(record):
            return
        back_by = min(deadline, time.monotonic() + self._registry.lease_ttl_s)
        while time.monotonic() < back_by and not self._registry.readers(record):
            time.sleep(_BACK_LOOK_S)
            if self._registry.stands(record):
                return
        raise TransferFailed(
            f"source {record.name} changed or withdrew generation {record.generation} while it was "
            "read; its bytes are not used"
        )


class _Peers:
    """The sources of one kind that a load may read from, and what became of each.

    Attributes:
        names: of those that an attempt is made for, the least loaded first.
    """

    def __init__(self, strategy: RdmaFromPeer, key: str, kind: SourceKind, tolerates: Dirt) -> None:
        self.verify: Verify = strategy.verify
        self._strategy = strategy
        self._look = partial(strategy.look, key, kind)
        self._tolerates = tolerates
        self._called: dict[str, str] = {}
        self._found: Sequence[FoundSource] | None = self._look()  # None: to be looked for again
        self.names = tuple(self._name(each.record) for each in self._found[: strategy.max_sources])
        self._left = set(self.names)
        self._used: set[str] = set()
        self._lost: dict[str, Lost] = {}

    def tolerates(self, source: str) -> Dirt:
        """The most dirt that an attempt called `source` can start on: any, where it has nothing to read from."""
        return self._tolerates if self._left else Dirt.ANYTHING

    @contextmanager
    def stripe(self, source: str) -> Iterator[Stripe]:
        """Read from `source`, or from another that is free, and from all that nothing has become of yet.

        An attempt that fails uses up at least the source whose bytes were read; where that was not `source`, the
        attempt that is called after the other one reads `source`. So every source is tried.

        Raises: what ended `source`, when no source is left.
        """
        if not self._left:
            raise self._lost[source].again(source) if source in self._lost else NotAvailable("it was tried before")
        strategy, deadline = self._strategy, time.monotonic() + self._strategy.transfer_timeout_s
        with ExitStack() as held:
            first, others, idle = self._take_turn(source, held, deadline)
            records = {self._name(each): each for each in (first, *others)}
            first_name = self._name(first)
            stripe = Stripe(
                list(records) if strategy.together else [first_name],
                lambda name, stop: strategy.connect(records[name], stop, deadline, leased=name == first_name),
                width=len(records) if idle else 1,
                deadline=deadline,
            )
            # An interrupt may come where a block is left, before its end is reached. The threads would wait for ever.
            stop = weakref.finalize(held, stripe.stop)
            stop.atexit = False
            try:
                yield held.enter_context(stripe)
            finally:
                held.close()
                stop()
                for lost in stripe.lost:
                    self._lost[lost.source] = lost
                    self._use_up(lost.source)
                self._use_up(stripe.first or first_name)

    def _take_turn(
        self, source: str, held: ExitStack, deadline: float
    ) -> tuple[SourceRecord, list[SourceRecord], bool]:
        """Wait until a source is free, and lease it; with it others to read from, and whether nobody reads any."""
        strategy, turn = self._strategy, Turn(self._strategy.max_readers)
        waits_until = deadline - (1 - _WAITING) * strategy.transfer_timeout_s
        while True:
            began = time.monotonic()
            found = self._candidates(source)
            now = time.monotonic()
            limit = turn.limit_of(found, now) if now < waits_until else None
            for each in found:
                if (limit is None or each.readers < limit) and self._leased(each.record, held, deadline, limit):
                    others = [other.record for other in found if other is not each]
                    return each.record, others[: strategy.max_sources - 1], is_idle(found)
            if limit is None or not found:
                raise self._lost[source].again(source) if source in self._lost else NotAvailable("it is gone")
            logger.debug("%s sources, each with %s readers or more", len(found), limit)
            time.sleep(min(turn.pause_s(now - began), max(0.0, waits_until - now)))

    def _candidates(self, source: str) -> list[FoundSource]:
        """Whom nothing has become of yet, the least loaded first, `source` before its equals."""
        found, self._found = self._look() if self._found is None else self._found, None
        found = [each for each in found if self._name(each.record) not in self._used]
        self._left = {self._name(each.record) for each in found}
        return sorted(found, key=lambda each: (each.readers, self._name(each.record) != source))

    def _name(self, record: SourceRecord) -> str:
        """What a source is called here: one that says it is called like another does not hide it."""
        if record.source_id not in self._called:
            names = (f"{record.name}{f'#{number}' if number > 1 else ''}" for number in itertools.count(1))
            self._called[record.source_id] = next(name for name in names if name not in self._called.values())
        return self._called[record.source_id]

    def _leased(self, record: SourceRecord, held: ExitStack, deadline: float, limit: int | None) -> bool:
        try:
            held.enter_context(self._strategy.lease(record, deadline, limit=limit))
        except SourceBusy:
            return False
        except NotAvailable as exc:
            name = self._name(record)
            self._lost[name] = Lost(name, type(exc), str(exc), 0, 0.0)
            self._use_up(name)
            return False
        return True

    def _use_up(self, source: str) -> None:
        self._used.add(source)
        self._left.discard(source)


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
