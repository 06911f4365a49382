"""Who serves which weights: the record of a source, and the Registry contract.

A record is small and is read for every source when a target looks around. The offer (manifest, endpoint,
checksums) is large and is read only for the source that a target tries. Both are foreign input: bounded,
decoded into strict types, and, where a signing key is set, used only with the right signature.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Annotated, Literal, NamedTuple

import msgspec

from modelexpress.errors import ConfigError, NotAvailable, RegistryError

logger = logging.getLogger(__name__)

# A record of a few hundred bytes is normal. An offer needs about 150 bytes a tensor: 20,000 tensors make
# 3 MB, and 100,000 make 15 MB.
MAX_RECORD_NBYTES = 16 * 1024
_RETIRING_S = 0.05
MAX_OFFER_NBYTES = 256 * 1024 * 1024

SourceKind = Literal["layout", "checkpoint"]

# Foreign text ends up in file names, key names, logs and terminals: no control characters, no paths.
# `\Z`, because `$` would let a newline through.
_SourceId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Line = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0)]


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

    source_id: _SourceId
    generation: _Count
    keys: tuple[_Line, ...]
    kind: SourceKind
    label: _Line
    host: _Line
    pid: _Count
    transport: _Line
    nbytes: _Count
    tensors: _Count
    offer_digest: _Line
    published_at: float
    signature: bytes = b""

    @property
    def name(self) -> str:
        """How logs and reports call this source."""
        return f"{self.host}/{self.pid}/{self.source_id[:8]}"


_DECODER = msgspec.msgpack.Decoder(SourceRecord)


class FoundSource(msgspec.Struct, frozen=True):
    """A live record and how many targets read from it at this moment."""

    record: SourceRecord
    readers: int


class StoredRecord(NamedTuple):
    """What an implementation found, before anything is known about it.

    Attributes:
        source_id: the place it was stored at; a record that names another source is not used.
    """

    source_id: str
    encoded: bytes
    readers: int


class Registry(ABC):
    """Publishes, finds and withdraws sources. Safe to use from several threads.

    A publication lives on a lease: a publisher that dies without a word is not found any more, at once
    where the kernel tells (a directory on this host), after the lease ran out elsewhere (Redis).

    Every method raises RegistryError when the registry cannot be reached within its time limit.

    After fork(), a child may look around with its parent's Registry; what the parent published and leased
    stays the parent's, whatever the child does.

    Args:
        signing_key: with a key, records are signed on the way in, and records without the right
            signature are never returned. A key cannot tell an old signed record from a new one: who can
            write to the registry can bring a withdrawn record back, but no record or offer of their own.

    Attributes:
        lease_ttl_s: how long a publication that is neither renewed nor withdrawn can still be found, in
            seconds; 0 where the kernel tells at once. After a `publish` or `withdraw` that raised, a source
            may still be found for this long, and must keep its memory as it is.
    """

    lease_ttl_s: float = 0.0

    def __init__(self, *, signing_key: bytes | None) -> None:
        if signing_key is not None and not signing_key:
            raise ConfigError("the signing key of the registry is empty; set at least one byte, or no key")
        self._signing_key = signing_key

    def publish(self, record: SourceRecord, offer: bytes) -> SourceRecord:
        """Make a source findable. Returns the record as stored: with its offer digest and signature.

        Takes the place of an earlier generation of the same source that this Registry published.

        Raises:
            ConfigError: the record is not one that others would accept.
        """
        record = self._seal(record, offer)
        encoded = _encode_checked(record)
        for what, data, limit in (("record", encoded, MAX_RECORD_NBYTES), ("offer", offer, MAX_OFFER_NBYTES)):
            if len(data) > limit:
                raise RegistryError(f"the {what} of {record.name} has {len(data):,} bytes; the limit is {limit:,}")
        self._store(record, encoded, offer)
        return record

    def find(self, key: str | None, *, at_most: int | None = None) -> list[FoundSource]:
        """Live sources with this key, the least loaded first, equal ones in random order; all for None.

        Args:
            at_most: for who looks often: of more than this many, a choice is enough. Whoever looks again gets
                another one.
        """
        found = []
        for stored in self._search(key, at_most):
            record = self._accept(stored)
            if record is not None and (key is None or key in record.keys):
                found.append(FoundSource(record, stored.readers))
        random.shuffle(found)
        return sorted(found, key=lambda each: each.readers)[:at_most]

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

    def retire(self, record: SourceRecord, offer: bytes) -> SourceRecord:
        """Stop offering what `publish` returned, and let those who read it finish. Withdraw it after that.

        Returns the record as stored from now on: nobody finds it by a key, and `confirms` still knows it.
        """
        return self.publish(msgspec.structs.replace(record, keys=()), offer)

    def confirms(self, record: SourceRecord) -> bool:
        """Whether the generation that `record` names is still there, offered or retired: its bytes are good."""
        if self.stands(record):
            return True
        if self._is_retired(record):
            return True
        time.sleep(_RETIRING_S)  # retiring puts one record in the place of another; for a moment there is neither
        return self._is_retired(record)

    def _is_retired(self, record: SourceRecord) -> bool:
        wanted = (record.source_id, record.generation, record.offer_digest)
        stored = (self._accept(each) for each in self._search(None, None) if each.source_id == record.source_id)
        return any(
            each is not None and (each.source_id, each.generation, each.offer_digest) == wanted for each in stored
        )

    @abstractmethod
    def stands(self, record: SourceRecord) -> bool:
        """Whether this very generation is still published and its publisher alive."""

    @abstractmethod
    def renew(self, record: SourceRecord, offer: bytes) -> None:
        """Extend the lease of what `publish` returned; publish it again where the registry lost it.

        Raises:
            RegistryError: also when this Registry withdrew or replaced the record meanwhile: a renewal that
                lost a race against `withdraw` never brings the source back.
        """

    @abstractmethod
    def withdraw(self, record: SourceRecord) -> None:
        """Make a source unfindable. Withdrawing what is gone already is no error.

        Another generation of the same source stays. When this returned, `stands` is false everywhere and
        `readers` counts everyone who may still read.
        """

    @abstractmethod
    def reading(
        self, record: SourceRecord, *, lease_s: float, limit: int | None = None
    ) -> AbstractContextManager[None]:
        """Hold a reader's lease: the source keeps its memory still until the block ends.

        The lease ends by itself `lease_s` seconds after entry, whether the block is done or not, or at once
        when this process dies and the kernel tells. So a deadline for the read is taken before entry. A
        lease that cannot be given back when the block ends is logged and runs out.

        Args:
            limit: how many readers the source may have, this one included.

        Raises:
            SourceBusy: on entry, when it had that many. Two that ask at the same moment may both be told so.
            NotAvailable: on entry, when the source withdrew before the lease was in place.
            ConfigError: `lease_s` is not a positive number.
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
    def _search(self, key: str | None, at_most: int | None) -> list[StoredRecord]:
        """What is stored of live sources. May return more than asked."""

    @abstractmethod
    def _load_offer(self, record: SourceRecord) -> bytes | None:
        """The stored offer of this generation, None when it is gone."""

    def _seal(self, record: SourceRecord, offer: bytes) -> SourceRecord:
        sealed = msgspec.structs.replace(record, offer_digest=hashlib.sha256(offer).hexdigest(), signature=b"")
        if self._signing_key is None:
            return sealed
        return msgspec.structs.replace(sealed, signature=_signature(sealed, self._signing_key))

    def _accept(self, stored: StoredRecord) -> SourceRecord | None:
        """Decode a foreign record; None, with a log line, when it is broken or not signed as it must be."""
        encoded = stored.encoded
        if len(encoded) > MAX_RECORD_NBYTES:
            logger.warning("ignored a record of %s bytes; the limit is %s", len(encoded), MAX_RECORD_NBYTES)
            return None
        try:
            record = _DECODER.decode(encoded)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            logger.warning("ignored a broken record in the registry, at %s: %s", stored.source_id, exc)
            return None
        if record.source_id != stored.source_id:
            logger.warning("ignored source %s: its record is stored at %s", record.name, stored.source_id)
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


def checked_lease_s(lease_s: float) -> float:
    """The same number. Raises ConfigError for what is no length of time."""
    if not (math.isfinite(lease_s) and lease_s > 0):
        raise ConfigError(f"a reader's lease of {lease_s} s is no lease; give a positive number of seconds")
    return lease_s


def _encode_checked(record: SourceRecord) -> bytes:
    """Encode as `encode_record` does, and make sure that others will decode it."""
    try:
        encoded = encode_record(record)
        _DECODER.decode(encoded)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as exc:
        raise ConfigError(f"source {record.name!r} cannot be published: {exc}") from exc
    return encoded


def _signature(unsigned: SourceRecord, key: bytes) -> bytes:
    return hmac.digest(key, encode_record(unsigned), "sha256")
