"""What a source offers to whoever wants to read it: where the bytes lie, how to reach them, their checksums."""

from __future__ import annotations

import msgspec

from modelexpress.errors import ManifestMismatch
from modelexpress.manifest import Manifest


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One generation of one source. `checksums` is empty when the source made none."""

    manifest: Manifest
    endpoint: bytes
    checksums: bytes

    def encode(self) -> bytes:
        """The bytes that go into a registry."""
        return msgspec.msgpack.encode(self)


def decode_offer(data: bytes) -> Offer:
    """Read an offer that came from outside.

    Raises:
        ManifestMismatch: the bytes are no offer, or one that describes impossible tensors.
    """
    try:
        offer = msgspec.msgpack.decode(data, type=Offer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ManifestMismatch(f"the source's offer cannot be read: {exc}") from exc
    offer.manifest.validate()
    return offer
