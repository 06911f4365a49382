"""A mode of torch's dispatcher that costs no more than it must."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Base of ours: each says in `__torch_dispatch__` what an operation of its thread does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor this

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps `__torch_dispatch__`, imports its compiler for it, and each operation costs twice as much.
        return False
