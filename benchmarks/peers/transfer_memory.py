"""The model that moves from process to process: equal tensors, each with memory of its own that was touched."""

from __future__ import annotations

import numpy as np
import torch
from driver import Parameters

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def allocate(nbytes: int, tensors: int) -> Parameters:
    each = nbytes // tensors // 64 * 64
    return {f"layer.{number:05}.weight": torch.zeros(each, dtype=torch.uint8) for number in range(tensors)}


def fill(parameters: Parameters) -> None:
    """Bytes that no two places of the model share; those of benchmarks/transfer_source.py."""
    at = 0
    for tensor in parameters.values():
        words = tensor.numpy().view(np.uint64)
        words[:] = np.arange(at, at + len(words), dtype=np.uint64) * _MULTIPLIER
        at += len(words)
