"""SGLang's LoRA code where no pinned memory exists.

It asks for pinned host tensors whatever the platform says (lora/layers.py, lora/lora.py, lora/backend/torch_backend.py
in 0.5.23), and a torch without an accelerator has no allocator for them.
"""

from types import ModuleType

import torch

_FACTORIES = frozenset({"arange", "empty", "empty_like", "full", "ones", "tensor", "zeros"})


class UnpinnedTorch:
    """torch, except that the functions which make tensors ignore `pin_memory`."""

    def __getattr__(self, name: str) -> object:
        found = getattr(torch, name)
        return _ignoring_pin_memory(found) if name in _FACTORIES else found


def replace_torch(*modules: ModuleType) -> None:
    """Let these modules, and nobody else, see `UnpinnedTorch`; make `Tensor.pin_memory` a no-op for everybody.

    Without an accelerator `Tensor.pin_memory` always raises, so nothing can have relied on it.
    """
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for module in modules:
        module.torch = UnpinnedTorch()


def _ignoring_pin_memory(make):
    def without(*args, pin_memory=False, **options):
        return make(*args, **options)

    return without
