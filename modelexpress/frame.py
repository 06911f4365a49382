"""A frame around what describes an endpoint, so that nothing damaged is taken for one."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec
import xxhash

from modelexpress.errors import NotAvailable

T = TypeVar("T")

_FRAME = struct.Struct("<8sI16s")  # magic, length of the body, xxh3_128 of the body


def framed(magic: bytes, body: object) -> bytes:
    """`body` as msgpack behind `magic` (8 bytes, of which the last is the version), its length and its checksum."""
    data = msgspec.msgpack.encode(body)
    return _FRAME.pack(magic, len(data), xxhash.xxh3_128_digest(data)) + data


def unframed(magic: bytes, data: bytes, kind: type[T], *, what: str) -> T:
    """What `framed` was given.

    Raises:
        NotAvailable: says what is wrong with it.
    """
    if len(data) < _FRAME.size:
        raise NotAvailable(f"the source's endpoint has {len(data)} bytes, fewer than its header")
    found, nbytes, digest = _FRAME.unpack_from(data)
    body = data[_FRAME.size :]
    if found != magic:
        raise NotAvailable(f"the source's endpoint is not one of this version of modelexpress' {what}")
    if len(body) != nbytes or xxhash.xxh3_128_digest(body) != digest:
        raise NotAvailable(f"the source's endpoint is damaged: {len(body)} of {nbytes} bytes, or a wrong checksum")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise NotAvailable(f"the source's endpoint cannot be read: {exc}") from exc
