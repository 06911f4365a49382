"""Who serves which weights: the record of a source, and the Registry contract.

A record is small and is read for every source when a target looks around. The offer (manifest, endpoint,
checksums) is large and is read only for the source that a target tries. Both are foreign input: bounded,
decoded into strict types, and, where a signing key is set, used only with the right signature.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Literal

import msgspec

from modelexpress.errors import NotAvailable, RegistryError

logger = logging.getLogger(__name__)

# A record of a few hundred bytes is normal. An offer needs about 150 bytes a tensor: 20,000 tensors make
# 3 MB, and 100,000 make 15 MB.
MAX_RECORD_NBYTES = 16 * 1024
MAX_OFFER_NBYTES = 256 * 1024 * 1024

SourceKind = Literal["layout", "checkpoint"]


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One publication of one source.

    Attributes:
        source_id: 32 hex characters, random, kept over the generations of one source.
        generation: counts up each time the source publishes again.
        keys: what a target looks for: the key of its identity, or of its checkpoint's content.
        kind: "layout" serves a model as its engine holds it, "checkpoint" the raw tensors of the files.
        label: for people: which model, from where.
        nbytes: bytes that a target will move.
        offer_digest: hex SHA-256 of the offer, so that a signature on the record covers the offer too.
        published_at: seconds since the epoch, for people; nothing is decided by it.
    """

    source_id: str
    generation: int
    keys: tuple[str, ...]
    kind: SourceKind
    label: str
    host: str
    pid: int
    transport: str
    nbytes: int
    tensors: int
    offer_digest: str
    published_at: float
    signature: bytes = b""

    @property
    def name(self) -> str:
        """How logs and reports call this source."""
        return f"{self.host}/{self.pid}/{self.source_id[:8]}"


class FoundSource(msgspec.Struct, frozen=True):
    """A live record and how many targets read from it at this moment."""

    record: SourceRecord
    readers: int


class Registry(ABC):
    """Publishes, finds and withdraws sources. Safe to use from several threads.

    A publication lives on a lease: a publisher that dies without a word is not found any more, at once
    where the kernel tells (a directory on this host), after the lease ran out elsewhere (Redis).

    Every method raises RegistryError when the registry cannot be reached within its time limit.

    Args:
        signing_key: with a key, records are signed on the way in, and records without the right
            signature are never returned.
    """

    def __init__(self, *, signing_key: bytes | None) -> None:
        self._signing_key = signing_key

    def publish(self, record: SourceRecord, offer: bytes) -> SourceRecord:
        """Make a source findable. Returns the record as stored: with its offer digest and signature."""
        record = self._seal(record, offer)
        encoded = encode_record(record)
        for what, data, limit in (("record", encoded, MAX_RECORD_NBYTES), ("offer", offer, MAX_OFFER_NBYTES)):
            if len(data) > limit:
                raise RegistryError(f"the {what} of {record.name} has {len(data):,} bytes; the limit is {limit:,}")
        self._store(record, encoded, offer)
        return record

    def find(self, key: str | None) -> list[FoundSource]:
        """Live sources with this key, the least loaded first, equal ones in random order; all for None."""
        found = []
        for encoded, readers in self._search(key):
            record = self._accept(encoded)
            if record is not None and (key is None or key in record.keys):
                found.append(FoundSource(record, readers))
        random.shuffle(found)
        return sorted(found, key=lambda each: each.readers)

    def offer(self, record: SourceRecord) -> bytes:
        """The manifest, endpoint and checksums behind a record.

        Raises:
            NotAvailable: the source withdrew meanwhile, or the offer is not the one the record names.
        """
        offer = self._load_offer(record)
        if offer is None:
            raise NotAvailable(f"source {record.name} withdrew before its offer was read")
        if len(offer) > MAX_OFFER_NBYTES or hashlib.sha256(offer).hexdigest() != record.offer_digest:
            raise NotAvailable(f"the offer of source {record.name} is not the one its record names; it is ignored")
        return offer

    @abstractmethod
    def stands(self, record: SourceRecord) -> bool:
        """Whether this very generation is still published and its publisher alive."""

    @abstractmethod
    def renew(self, record: SourceRecord, offer: bytes) -> None:
        """Extend the lease of what `publish` returned; publish it again where the registry lost it."""

    @abstractmethod
    def withdraw(self, record: SourceRecord) -> None:
        """Make a source unfindable. Withdrawing what is gone already is no error."""

    @abstractmethod
    def reading(self, record: SourceRecord, *, lease_s: float) -> AbstractContextManager[None]:
        """Hold a reader's lease: the source keeps its memory still until the block ends.

        The lease ends by itself after `lease_s`, or at once when this process dies and the kernel tells.

        Raises:
            NotAvailable: on entry, when the source withdrew before the lease was in place.
        """

    @abstractmethod
    def readers(self, record: SourceRecord) -> int:
        """How many leases on this source are held now, withdrawn or not."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and locks. What this process published and did not withdraw is gone too."""

    @abstractmethod
    def _store(self, record: SourceRecord, encoded: bytes, offer: bytes) -> None:
        """Store both; the record becomes visible last, and never in part."""

    @abstractmethod
    def _search(self, key: str | None) -> list[tuple[bytes, int]]:
        """Encoded records of live sources with their number of readers. May return more than asked."""

    @abstractmethod
    def _load_offer(self, record: SourceRecord) -> bytes | None:
        """The stored offer of this generation, None when it is gone."""

    def _seal(self, record: SourceRecord, offer: bytes) -> SourceRecord:
        sealed = msgspec.structs.replace(record, offer_digest=hashlib.sha256(offer).hexdigest(), signature=b"")
        if self._signing_key is None:
            return sealed
        return msgspec.structs.replace(sealed, signature=_signature(sealed, self._signing_key))

    def _accept(self, encoded: bytes) -> SourceRecord | None:
        """Decode a foreign record; None, with a log line, when it is broken or not signed as it must be."""
        if len(encoded) > MAX_RECORD_NBYTES:
            logger.warning("ignored a record of %s bytes; the limit is %s", len(encoded), MAX_RECORD_NBYTES)
            return None
        try:
            record = msgspec.msgpack.decode(encoded, type=SourceRecord)
        except (msgspec.MsgspecError, ValueError) as exc:
            logger.warning("ignored a broken record in the registry: %s", exc)
            return None
        if self._signing_key is None:
            return record
        unsigned = msgspec.structs.replace(record, signature=b"")
        if hmac.compare_digest(record.signature, _signature(unsigned, self._signing_key)):
            return record
        logger.warning("ignored source %s: its record is not signed with our key", record.name)
        return None


def encode_record(record: SourceRecord) -> bytes:
    """The bytes that are stored and signed."""
    return msgspec.msgpack.encode(record)


def _signature(unsigned: SourceRecord, key: bytes) -> bytes:
    return hmac.digest(key, encode_record(unsigned), "sha256")
