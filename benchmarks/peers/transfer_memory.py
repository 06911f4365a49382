"""The model that moves from process to process: equal tensors, each with memory of its own that was touched."""

from __future__ import annotations

import torch
from driver import Parameters


def allocate(nbytes: int, tensors: int) -> Parameters:
    each = nbytes // tensors // 64 * 64
    return {f"layer.{number:05}.weight": torch.zeros(each, dtype=torch.uint8) for number in range(tensors)}
