"""The registry of many hosts: keys with a time to live in one Redis server.

    mx1:record:<source_id>             the record; gone when the publisher withdraws or stops renewing
    mx1:offer:<source_id>:<digest>     its offer
    mx1:index:<key>, mx1:sources       sorted sets: source id -> when its lease runs out
    mx1:readers:<source_id>            sorted set: reader -> when its lease runs out

Every moment is one of the server's clock, in milliseconds, so clocks of hosts do not matter. What has to
happen in one step is a Lua script. A command that a client gave up on may still reach the server much later,
from a socket buffer somewhere; so whatever makes a source visible says until when it may be carried out.

A server that loses acknowledged writes (a failover to a replica that lags) can bring back a withdrawn source
for at most `lease_ttl_s`.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry
from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_exponential, wait_random

from modelexpress.errors import ConfigError, NotAvailable, RegistryError, SourceBusy
from modelexpress.registry.base import (
    MAX_OFFER_NBYTES,
    MAX_RECORD_NBYTES,
    Registry,
    SourceRecord,
    StoredRecord,
    checked_lease_s,
    encode_record,
)
from modelexpress.registry.url import redact

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX: Final = "mx1:"
_SOURCES: Final = f"{_PREFIX}sources"
_SOURCE_ID = re.compile(rb"[0-9a-f]{32}")
# A script stops the whole server while it runs: 500 sources take it about a millisecond.
_BATCH: Final = 500
_MAX_FOUND: Final = 10_000
_FULL: Final = 2  # what the script that takes a lease says of a source with as many readers as it may have
# The waiting time of one try. Two tries fit into `timeout_s`: the first may have had a connection that a
# firewall dropped without a word.
_TRIES_PER_TIMEOUT: Final = 3

_LUA_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# STRLEN first: whatever lies under the key, no more than our own record is copied.
_LUA_IS = """
local function is(key, value)
  return redis.pcall('STRLEN', key) == #value and redis.call('GET', key) == value
end
"""
_LUA_EXTEND = """
local function extend(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end
"""
_LUA_INDEX = """
for i = 3, #KEYS do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
  redis.call('ZADD', KEYS[i], now + ttl_ms, ARGV[2])
  extend(KEYS[i], ttl_ms)
end
"""
# KEYS: record, offer, indexes. ARGV: encoded, source id, ttl_ms, not after.
_PUBLISH = f"""{_LUA_NOW}{_LUA_EXTEND}
local ttl_ms = tonumber(ARGV[3])
if now > tonumber(ARGV[4]) then return 'late' end
if redis.call('PEXPIRE', KEYS[2], ttl_ms) == 0 then return 'lost' end
{_LUA_INDEX}
redis.call('SET', KEYS[1], ARGV[1], 'PX', ttl_ms)
return 'done'
"""
_RENEW = f"""{_LUA_NOW}{_LUA_IS}{_LUA_EXTEND}
local ttl_ms = tonumber(ARGV[3])
if now > tonumber(ARGV[4]) then return 'late' end
if not is(KEYS[1], ARGV[1]) or redis.call('PEXPIRE', KEYS[2], ttl_ms) == 0 then return 'lost' end
{_LUA_INDEX}
redis.call('PEXPIRE', KEYS[1], ttl_ms)
return 'done'
"""
# KEYS: record, offer, indexes. ARGV: encoded, source id.
_WITHDRAW = f"""{_LUA_IS}
redis.call('DEL', KEYS[2])
if not is(KEYS[1], ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
for i = 3, #KEYS do redis.pcall('ZREM', KEYS[i], ARGV[2]) end
return 1
"""
# KEYS: record. ARGV: encoded.
_STANDS = f"""{_LUA_IS}
return is(KEYS[1], ARGV[1]) and 1 or 0
"""
# KEYS: index. ARGV: limit, and where to begin when there are more: a share of them.
_LOOK = f"""{_LUA_NOW}
local limit = tonumber(ARGV[1])
local function live(first, n)
  return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf', 'LIMIT', first, n)
end
local count = redis.call('ZCOUNT', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
if count <= limit then return live(0, limit) end
local found = live(math.floor(tonumber(ARGV[2]) * count), limit)
if #found < limit then
  for _, each in ipairs(live(0, limit - #found)) do found[#found + 1] = each end
end
return found
"""
# KEYS: n records, then the readers of each. ARGV: limit in bytes. Returns record, number of readers, ...
_COLLECT = f"""{_LUA_NOW}
local found = {{}}
local n = #KEYS / 2
for i = 1, n do
  local nbytes = redis.pcall('STRLEN', KEYS[i])
  local whole = type(nbytes) == 'number' and nbytes <= tonumber(ARGV[1])
  local readers = redis.pcall('ZCOUNT', KEYS[n + i], '(' .. string.format('%.0f', now), '+inf')
  found[#found + 1] = whole and redis.call('GET', KEYS[i]) or ''
  found[#found + 1] = type(readers) == 'number' and readers or 0
end
return found
"""
# KEYS: record, readers. ARGV: encoded, reader, lease_ms, limit or 0.
_LEASE = f"""{_LUA_NOW}{_LUA_IS}{_LUA_EXTEND}
if not is(KEYS[1], ARGV[1]) then return 0 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if tonumber(ARGV[4]) > 0 and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return 2 end
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[2])
extend(KEYS[2], tonumber(ARGV[3]))
return 1
"""
# KEYS: readers.
_READERS = f"""{_LUA_NOW}
return redis.call('ZCOUNT', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
"""


@dataclass(frozen=True, slots=True)
class _Publication:
    record: SourceRecord
    encoded: bytes


class RedisRegistry(Registry):
    """Sources and targets of many hosts, through one Redis server (version 6 or later, or Valkey).

    A call waits for the server for about `timeout_s` in total, its retries included. The user that the URL
    names needs the keys `mx1:*` and the commands TIME, EVAL and what the scripts above call.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`. Options after `?`: db, username, password,
            client_name, ssl_*.
        lease_ttl_s: how long a source stays that is not renewed. Renew it three times as often.

    Raises:
        ConfigError: the URL or a number is wrong. The server is first reached when it is needed.
    """

    def __init__(self, url: str, *, signing_key: bytes | None, timeout_s: float, lease_ttl_s: float) -> None:
        super().__init__(signing_key=signing_key)
        _check_url(url)
        for what, seconds in (("timeout", timeout_s), ("lease", lease_ttl_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"registry {redact(url)}: a {what} of {seconds} s; give a positive number of seconds")
        self.timeout_s = timeout_s
        self.lease_ttl_s = lease_ttl_s
        self._url = redact(url)
        self._secrets = _secrets(url)
        self._try_s = timeout_s / _TRIES_PER_TIMEOUT
        self._redis = self._connectable(url)
        # Re-entrant: a signal handler may withdraw while the interrupted code publishes.
        self._lock = threading.RLock()
        self._held: dict[str, _Publication] = {}
        self._owner_pid = os.getpid()
        self._closed = False

    def stands(self, record: SourceRecord) -> bool:
        encoded = encode_record(record)
        return bool(self._tried("look for a source", lambda: self._eval(_STANDS, [_record_key(record)], encoded)))

    def renew(self, record: SourceRecord, offer: bytes) -> None:
        encoded = encode_record(record)
        with self._publishing():
            held = self._held.get(record.source_id)
            if held is None or held.encoded != encoded:
                raise RegistryError(f"{record.name} is not published by this registry any more; publish it again")
            if self._tried("renew a source", lambda: self._make_visible(_RENEW, held)) == "lost":
                logger.warning("source %s was lost by %s; publishing it again", record.name, self._url)
                self._publish_whole(held, offer)

    def withdraw(self, record: SourceRecord) -> None:
        publication = _Publication(record, encode_record(record))
        with self._publishing():
            held = self._held.get(record.source_id)
            if held is not None and held.encoded == publication.encoded:
                del self._held[record.source_id]
            self._remove(publication)

    @contextmanager
    def reading(self, record: SourceRecord, *, lease_s: float, limit: int | None = None) -> Iterator[None]:
        lease_ms = _ms(checked_lease_s(lease_s))
        pid = os.getpid()
        reader = secrets.token_hex(8)
        keys = [_record_key(record), _readers_key(record.source_id)]
        taking = (encode_record(record), reader, lease_ms, limit or 0)
        answer = self._tried("lease a source", lambda: self._eval(_LEASE, keys, *taking))
        if answer == _FULL:
            raise SourceBusy(f"source {record.name} has {limit} readers, as many as it may have")
        if not answer:
            raise NotAvailable(f"source {record.name} withdrew before it could be read")
        try:
            yield
        finally:
            if os.getpid() == pid:
                self._give_back(record, reader)

    def readers(self, record: SourceRecord) -> int:
        key = _readers_key(record.source_id)
        return self._tried("count readers", lambda: _a(int, self._eval(_READERS, [key])))

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            # The parent's lock may have been held by another thread at the fork: nobody would release it.
            self._closed = True
            self._redis.close()
            return
        with self._lock:
            if self._closed:
                return
            try:
                while self._held:
                    self._remove(self._held.popitem()[1])
            finally:
                self._closed = True
                self._redis.close()

    def _store(self, record: SourceRecord, encoded: bytes, offer: bytes) -> None:
        publication = _Publication(record, encoded)
        with self._publishing():
            previous = self._held.pop(record.source_id, None)
            if previous is not None:
                self._remove(previous)
            self._publish_whole(publication, offer)
            self._held[record.source_id] = publication

    def _search(self, key: str | None, at_most: int | None) -> list[StoredRecord]:
        index = _SOURCES if key is None else _index_key(key)
        limit = _MAX_FOUND if at_most is None else min(at_most, _MAX_FOUND)
        return self._tried("look for sources", lambda: self._collect(index, limit))

    def _load_offer(self, record: SourceRecord) -> bytes | None:
        # One byte more than allowed, so that `offer` sees that it is too large.
        key = _offer_key(record)
        offer = self._tried("read an offer", lambda: _a(bytes, self._redis.getrange(key, 0, MAX_OFFER_NBYTES)))
        return offer or None

    def _publish_whole(self, publication: _Publication, offer: bytes) -> None:
        key, ttl_ms = _offer_key(publication.record), _ms(self.lease_ttl_s)
        try:
            # On its own: it may be large, and nobody looks for it before the record is there.
            self._tried("store an offer", lambda: self._redis.set(key, offer, px=ttl_ms))
            outcome = self._tried("publish a source", lambda: self._make_visible(_PUBLISH, publication))
        except RegistryError:
            self._take_back(publication)
            raise
        if outcome == "lost":
            raise RegistryError(
                f"Redis at {self._url} dropped the offer of {publication.record.name} ({len(offer):,} bytes) at once; "
                "give it more memory (maxmemory), or a longer lease"
            )

    def _make_visible(self, script: str, publication: _Publication) -> str:
        """Run a script that must not be carried out after we gave up waiting for it."""
        seconds, micros = self._redis.time()
        not_after = seconds * 1000 + micros // 1000 + _ms(self._try_s)
        source_id = publication.record.source_id
        argv = (publication.encoded, source_id, _ms(self.lease_ttl_s), not_after)
        outcome = _a(bytes, self._eval(script, _keys(publication.record), *argv))
        if outcome == b"late":
            raise TimeoutError("the server took too long to get to it")
        return outcome.decode()

    def _remove(self, publication: _Publication) -> None:
        keys, argv = _keys(publication.record), (publication.encoded, publication.record.source_id)
        try:
            self._tried("withdraw a source", lambda: self._eval(_WITHDRAW, keys, *argv))
        except RegistryError as exc:
            raise RegistryError(
                f"{exc}. Source {publication.record.name} may be found for another {self.lease_ttl_s:g} s"
            ) from exc

    def _take_back(self, publication: _Publication) -> None:
        """After a publication of which nobody knows whether it arrived: one try, and the lease does the rest."""
        keys, argv = _keys(publication.record), (publication.encoded, publication.record.source_id)
        try:
            self._eval(_WITHDRAW, keys, *argv)
        except (RedisError, OSError, ValueError, TypeError, RecursionError) as exc:
            logger.warning(
                "source %s may be found for another %g s: %s",
                publication.record.name,
                self.lease_ttl_s,
                self._clean(exc),
            )

    def _give_back(self, record: SourceRecord, reader: str) -> None:
        try:
            self._tried("give back a lease", lambda: self._redis.zrem(_readers_key(record.source_id), reader))
        except RegistryError as exc:
            logger.warning("the lease on source %s was not given back and will run out: %s", record.name, exc)

    def _collect(self, index: str, limit: int) -> list[StoredRecord]:
        members = _a(list, self._eval(_LOOK, [index], limit, f"{random.random():.6f}"))[:limit]  # noqa: S311 - no secret
        ids = [member.decode() for member in members if _SOURCE_ID.fullmatch(_a(bytes, member))]
        found = []
        for start in range(0, len(ids), _BATCH):
            batch = ids[start : start + _BATCH]
            keys = [f"{_PREFIX}record:{each}" for each in batch] + [_readers_key(each) for each in batch]
            flat = _a(list, self._eval(_COLLECT, keys, MAX_RECORD_NBYTES))
            found += [
                StoredRecord(source_id, _a(bytes, encoded), _a(int, readers))
                for source_id, encoded, readers in zip(batch, flat[::2], flat[1::2], strict=True)
                if encoded
            ]
        return found

    def _eval(self, script: str, keys: Sequence[str], *argv: bytes | str | int) -> Any:  # noqa: ANN401 - what the script returns
        return self._redis.eval(script, len(keys), *keys, *argv)

    def _tried(self, doing: str, call: Callable[[], T]) -> T:
        """Make a call that may be repeated, for at most about `timeout_s`; translate what went wrong."""
        if self._closed:
            raise RegistryError(f"registry {self._url} is closed")
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential(multiplier=0.05, max=1.0) + wait_random(0, 0.05),
            stop=stop_before_delay(self.timeout_s - self._try_s),
            reraise=True,
        )
        try:
            return retrying(call)
        # ValueError, TypeError, RecursionError: what redis-py says about an answer that is no Redis protocol.
        except (RedisError, OSError, ValueError, TypeError, RecursionError) as exc:
            text = self._clean(exc)
            error = RegistryError(f"cannot {doing}: {self._diagnosis(exc, text)}")
            # A server that does not know AUTH repeats its arguments: such an error must not be shown as cause.
            raise error from (exc if text == _one_line(exc) else None)

    def _diagnosis(self, exc: Exception, text: str) -> str:
        match exc:
            case AuthenticationError() | AuthorizationError():
                return f"Redis at {self._url} refused us ({text}); check user and password in the registry URL"
            case NoPermissionError():
                return f"Redis at {self._url} does not allow it ({text}); its user needs the keys {_PREFIX}* and EVAL"
            case OutOfMemoryError():
                return f"Redis at {self._url} is full ({text}); give it more memory (maxmemory)"
            case TimeoutError():
                return (
                    f"Redis at {self._url} did not answer within {self.timeout_s:g} s ({text}); "
                    "see whether it runs and is reachable from here, or allow more time"
                )
            case ConnectionError() | OSError():
                return f"no connection to Redis at {self._url} ({text}); see whether it runs and the URL is right"
            case _:
                return f"Redis at {self._url} answered {text}; see whether something else uses keys {_PREFIX}* there"

    def _clean(self, exc: Exception) -> str:
        text = _one_line(exc)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _connectable(self, url: str) -> Redis:
        """A client that has not connected yet. Its own retries are off; ours are bounded in total."""
        try:
            client = Redis.from_url(
                url.removeprefix("redis+"),
                socket_timeout=self._try_s,
                socket_connect_timeout=self._try_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
            client.connection_pool.make_connection()
        # Without cause: redis-py's messages about a URL may repeat its password.
        except (RedisError, ValueError, TypeError, OSError):
            raise ConfigError(f"registry URL {self._url!r} has an option that redis-py does not accept") from None
        return client

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        """One change at a time, and only by the process that opened this registry."""
        if os.getpid() != self._owner_pid:
            raise RegistryError(
                f"registry {self._url} was opened by process {self._owner_pid}, before a fork; "
                f"open it again in process {os.getpid()}"
            )
        with self._lock:
            yield


def _check_url(url: str) -> None:
    shown = redact(url)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Without cause: the message repeats what it takes for the port, which may be a password.
        raise ConfigError(
            f"registry URL {shown!r} cannot be read; write special characters in a password as %XX, / as %2F"
        ) from None
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in ("db", "username", "password", "client_name") and not name.startswith("ssl_"):
            # With an @ behind the ?, what looks like an option is the rest of a password.
            what = "an unescaped ? in its password, write %3F" if "@" in parts.query else f"no option {name!r}"
            raise ConfigError(f"registry URL {shown!r}: {what}; accepted: db, username, password, ssl_*")
    # redis-py takes a database that is no number for database 0.
    if not parts.scheme.endswith("unix") and not re.fullmatch(r"/?[0-9]*", parts.path):
        raise ConfigError(f"registry URL {shown!r}: the path has to be the number of a database, as in redis://host/0")
    if parts.scheme.endswith("unix") and not parts.path.startswith("/"):
        raise ConfigError(f"registry URL {shown!r} names no socket; accepted: unix:///path/of/redis.sock")


def _secrets(url: str) -> list[str]:
    """Passwords in the URL, as they are written and as they are meant."""
    parts = urlsplit(url)
    written = [parts.password or "", *(value for name, value in parse_qsl(parts.query) if name.endswith("password"))]
    return [each for secret in written if secret for each in {secret, unquote(secret)}]


def _a(kind: type[T], answer: object) -> T:
    """The answer, where it is of the kind that a script or command gives; else an error like Redis' own."""
    if not isinstance(answer, kind):
        raise ResponseError(f"with a {type(answer).__name__} where a {kind.__name__} belongs")
    return answer


def _may_pass(exc: BaseException) -> bool:
    refused = isinstance(exc, AuthenticationError | AuthorizationError)
    return isinstance(exc, ConnectionError | TimeoutError) and not refused


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


def _ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))


def _keys(record: SourceRecord) -> list[str]:
    """What the scripts of a publisher work on: record, offer, indexes."""
    return [_record_key(record), _offer_key(record), _SOURCES, *(_index_key(key) for key in record.keys)]


def _record_key(record: SourceRecord) -> str:
    return f"{_PREFIX}record:{record.source_id}"


def _offer_key(record: SourceRecord) -> str:
    return f"{_PREFIX}offer:{record.source_id}:{record.offer_digest[:16]}"


def _readers_key(source_id: str) -> str:
    return f"{_PREFIX}readers:{source_id}"


def _index_key(key: str) -> str:
    return f"{_PREFIX}index:{key}"
