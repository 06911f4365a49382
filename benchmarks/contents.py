"""What parameters hold: bytes that no two places share, bytes that are wrong everywhere, and their digest.

Also for the drivers of peers, so without modelexpress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
import xxhash

SPOILED_EVERY = 64 * 1024
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def fill(tensors: Iterable[torch.Tensor]) -> None:
    """Bytes that no two places of the model share; for tensors of bytes, in multiples of 8."""
    at = 0
    for tensor in tensors:
        words = tensor.detach().numpy().view(np.uint64)
        words[:] = np.arange(at, at + len(words), dtype=np.uint64) * _MULTIPLIER
        at += len(words)


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    """Make a byte wrong in each 64 KiB."""
    for tensor in tensors:
        _bytes_of(tensor)[::SPOILED_EVERY] ^= 0xFF


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3_128 of the bytes of tensors by name."""
    found = xxhash.xxh3_128()
    for _, tensor in sorted(tensors.items()):
        found.update(_bytes_of(tensor).numpy())
    return found.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)
