"""torchvision beside a CPU build of torch.

The published torchvision is built against CUDA's torch. Its C library does not load beside torch+cpu, and importing
it then ends in "operator torchvision::nms does not exist", because its Python part describes operators that nobody
declared. SGLang imports torchvision.transforms but calls no operator of it: declaring the names is enough.
"""

import torch

_NAMES = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators() -> None:
    """Declare each name that no loaded library has declared."""
    for name in _NAMES:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
