"""The registry of one host: a directory, no server.

Three kinds of files, each locked by the process that made it (see `locked_file`), so that a killed publisher
or reader is known dead at once:

    <source_id>.<digest of the record>.record    a publication; it is there exactly as long as it stands
    <source_id>.<digest of the record>.offer     its offer, made before the record and removed after it
    <source_id>.<random>.lease                   a reader; may outlast the record, and ends by itself too

Whoever looks around removes what dead processes left.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from modelexpress.errors import NotAvailable, RegistryError, SourceBusy
from modelexpress.registry.base import (
    MAX_OFFER_NBYTES,
    MAX_RECORD_NBYTES,
    Registry,
    SourceRecord,
    StoredRecord,
    checked_lease_s,
    encode_record,
)
from modelexpress.registry.locked_file import (
    LockedFile,
    Witness,
    create,
    is_live,
    now,
    read_live,
    remove_abandoned_temp,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})\.(record|offer|lease)")


class _Entry(NamedTuple):
    """One name in the directory; all but the path are empty when it is not one of ours."""

    path: str
    source_id: str
    distinction: str
    kind: str


@dataclass(frozen=True, slots=True)
class _Publication:
    """What this process published: both files, locked."""

    encoded: bytes
    record: LockedFile
    offer: LockedFile

    def in_place(self) -> bool:
        return self.record.in_place() and self.offer.in_place()

    def remove(self) -> None:
        self.record.remove()
        self.offer.remove()


class DirectoryRegistry(Registry):
    """Sources and targets of one host, or of containers that share a directory of it.

    The directory has to be on a local file system: locks on a network file system tell other hosts nothing
    in time. A stopped publisher (SIGSTOP) is alive, and its memory can be read.

    Args:
        path: created with mode 0700 when it is missing. One that other users can write to, or that belongs
            to another user than us or root, is used only with a signing key.

    Raises:
        RegistryError: the directory cannot be used; names it and the reason.
    """

    def __init__(self, path: str | os.PathLike[str], *, signing_key: bytes | None) -> None:
        super().__init__(signing_key=signing_key)
        self.path = Path(path)
        # Re-entrant: a signal handler may withdraw while the interrupted code publishes.
        self._lock = threading.RLock()
        self._held: dict[str, _Publication] = {}
        self._owner_pid = os.getpid()
        self._closed = False
        with self._translated("use"):
            self._prepare()

    def stands(self, record: SourceRecord) -> bool:
        encoded = encode_record(record)
        with self._translated("read"):
            path = self._place(record, encoded, "record")
            return read_live(path, Witness.here(), max_nbytes=MAX_RECORD_NBYTES) == encoded

    def renew(self, record: SourceRecord, offer: bytes) -> None:
        encoded = encode_record(record)
        with self._publishing(), self._translated("write to"):
            held = self._held.get(record.source_id)
            if held is None or held.encoded != encoded:
                raise RegistryError(f"{record.name} is not published by this registry any more; publish it again")
            if not held.in_place():
                logger.warning("source %s was removed from %s; publishing it again", record.name, self.path)
                self._replace(record, encoded, offer)

    def withdraw(self, record: SourceRecord) -> None:
        encoded = encode_record(record)
        with self._publishing(), self._translated("remove a source from"):
            held = self._held.get(record.source_id)
            if held is not None and held.encoded == encoded:
                del self._held[record.source_id]
                held.remove()
            else:
                self._place(record, encoded, "record").unlink(missing_ok=True)

    @contextmanager
    def reading(self, record: SourceRecord, *, lease_s: float, limit: int | None = None) -> Iterator[None]:
        expires_at = now() + checked_lease_s(lease_s)
        with self._translated("write a lease to"):
            self._prepare()
            lease = create(
                self.path / _name(record.source_id, secrets.token_hex(8), "lease"), b"", expires_at=expires_at
            )
        try:
            # After the lease, because a publisher withdraws first and then counts leases: one of the two
            # sees the other.
            if not self.stands(record):
                raise NotAvailable(f"source {record.name} withdrew before it could be read")
            if limit is not None and self.readers(record) > limit:
                raise SourceBusy(f"source {record.name} has {limit} readers, as many as it may have")
            yield
        finally:
            lease.remove()

    def readers(self, record: SourceRecord) -> int:
        witness = Witness.here()
        with self._translated("read"):
            leases = [each for each in self._entries() if (each.source_id, each.kind) == (record.source_id, "lease")]
            return sum(is_live(each.path, witness) for each in leases)

    def close(self) -> None:
        if os.getpid() == self._owner_pid:
            with self._lock:
                self._closed = True
                self._remove_held()
        else:
            # The parent's lock may have been held by another thread at the fork: nobody would release it.
            self._closed = True
            self._remove_held()

    def _store(self, record: SourceRecord, encoded: bytes, offer: bytes) -> None:
        with self._publishing(), self._translated("write to"):
            self._replace(record, encoded, offer)

    def _search(self, key: str | None, at_most: int | None) -> list[StoredRecord]:
        witness = Witness.here()
        with self._translated("read"):
            self._prepare()
            entries = self._entries()
            found = list(self._live_records(entries, witness))
            readers = Counter(
                each.source_id for each in entries if each.kind == "lease" and is_live(each.path, witness)
            )
            self._tidy(entries, {(entry.source_id, entry.distinction) for entry, _ in found}, witness)
        return [StoredRecord(entry.source_id, encoded, readers[entry.source_id]) for entry, encoded in found]

    def _load_offer(self, record: SourceRecord) -> bytes | None:
        with self._translated("read"):
            path = self._place(record, encode_record(record), "offer")
            return read_live(path, Witness.here(), max_nbytes=MAX_OFFER_NBYTES)

    def _replace(self, record: SourceRecord, encoded: bytes, offer: bytes) -> None:
        """Publish in place of what this process published of the same source, which goes first."""
        previous = self._held.pop(record.source_id, None)
        if previous is not None:
            previous.remove()
        self._prepare()
        offer_file = create(self._place(record, encoded, "offer"), offer)
        try:
            record_file = create(self._place(record, encoded, "record"), encoded)
        except BaseException:
            offer_file.remove()
            raise
        self._held[record.source_id] = _Publication(encoded, record_file, offer_file)

    def _remove_held(self) -> None:
        for publication in self._held.values():
            publication.remove()
        self._held.clear()

    def _live_records(self, entries: list[_Entry], witness: Witness) -> Iterator[tuple[_Entry, bytes]]:
        for entry in entries:
            if entry.kind != "record":
                continue
            encoded = read_live(entry.path, witness, max_nbytes=MAX_RECORD_NBYTES)
            if encoded is None:
                continue
            if entry.distinction == _digest(encoded):
                yield entry, encoded
            else:
                logger.warning("ignored %s: it was changed after it was published", entry.path)

    def _tidy(self, entries: list[_Entry], live: set[tuple[str, str]], witness: Witness) -> None:
        """Remove the offers and unfinished files of dead publishers; records and leases were looked at."""
        for entry in entries:
            if entry.kind == "offer" and (entry.source_id, entry.distinction) not in live:
                is_live(entry.path, witness)
            elif entry.kind == "":
                logger.debug("passed by %s: not a name of ours", entry.path)
                remove_abandoned_temp(entry.path)

    def _entries(self) -> list[_Entry]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        # Of thousands of files, each in the fewest steps.
        folder, match, nothing = f"{self.path}{os.sep}", _NAME.fullmatch, ("", "", "")
        return [_Entry(folder + name, *(found.groups() if (found := match(name)) else nothing)) for name in names]

    def _place(self, record: SourceRecord, encoded: bytes, kind: str) -> Path:
        return self.path / _name(record.source_id, _digest(encoded), kind)

    def _prepare(self) -> None:
        """Make sure of the directory: it is there, and only who may offer weights can write to it."""
        for missing in reversed([self.path, *self.path.parents]):
            if not missing.exists():
                missing.mkdir(mode=0o700 if missing == self.path else 0o755, exist_ok=True)
        info = os.stat(self.path)
        if not stat.S_ISDIR(info.st_mode):
            raise RegistryError(f"registry {self.path} is not a directory; name one, or a path that does not exist yet")
        if self._signing_key is not None:
            return
        mode = stat.S_IMODE(info.st_mode)
        if mode & 0o022:
            raise RegistryError(
                f"registry directory {self.path} can be written to by other users (mode {mode:04o}), who could offer "
                "weights of theirs; chmod 700 it, name another directory, or set a signing key"
            )
        if info.st_uid not in (0, os.geteuid()):
            raise RegistryError(
                f"registry directory {self.path} belongs to user {info.st_uid}, and this process runs as "
                f"{os.geteuid()}; name a directory of your own, or set a signing key"
            )

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        """One change at a time, and only by the process that opened this registry."""
        if os.getpid() != self._owner_pid:
            raise RegistryError(
                f"registry {self.path} was opened by process {self._owner_pid}, before a fork; "
                f"open it again in process {os.getpid()}"
            )
        with self._lock:
            if self._closed:
                raise RegistryError(f"registry {self.path} is closed")
            yield

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            place = exc.filename or self.path
            raise RegistryError(
                f"cannot {doing} registry directory {self.path}: {exc.strerror or exc} ({place}); "
                "check its permissions and free space, or name another directory"
            ) from exc


def _name(source_id: str, distinction: str, kind: str) -> str:
    return f"{source_id}.{distinction}.{kind}"


def _digest(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:16]
