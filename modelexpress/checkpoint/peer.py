"""A checkpoint that lies in the memory of another process, read as if it lay on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.discovery import FoundTensor, manifest_of, torch_dtype
from modelexpress.errors import NotAvailable
from modelexpress.manifest import PIECE_NBYTES, Manifest, TensorSpec, batches
from modelexpress.plan import TransferPlan, plan_checkpoint
from modelexpress.stripe import Stripe
from modelexpress.transport import Arrived, Moved

# Small tensors are asked for together, so that a round trip is paid per block and not per tensor.
_BLOCK_NBYTES = 4 * PIECE_NBYTES


class PeerTensors(CheckpointTensors):
    """Raw tensors in other processes' memory. The stripe's owner closes it.

    Raises:
        ManifestMismatch: the manifest is not one of raw tensors.
    """

    def __init__(self, label: str, stripe: Stripe) -> None:
        stripe.offer().manifest.raw_spans()
        self.label = label
        self.manifest = stripe.offer().manifest
        self._stripe = stripe

    def read(self, plan: TransferPlan, *, arrived: Arrived | None = None, moved: Moved | None = None) -> None:
        self._stripe.read(plan, arrived=arrived, moved=moved)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = None if names is None else set(names)
        chosen = [spec for spec in self.manifest.tensors if wanted is None or spec.name in wanted]
        chosen.sort(key=lambda spec: (spec.storage, spec.offset, spec.name))
        for block in batches(chosen, _BLOCK_NBYTES):
            fresh = {spec.name: _empty(spec, self.label) for spec in block}
            here = manifest_of(tuple(FoundTensor(name, each, "parameter", True) for name, each in fresh.items()))
            there = Manifest(self.manifest.storages, tuple(sorted(block, key=lambda spec: spec.name)))
            self.read(plan_checkpoint(there, here))
            yield from fresh.items()


def _empty(spec: TensorSpec, label: str) -> torch.Tensor:
    """Memory for one tensor. How large it is the peer says, so there may be none."""
    try:
        return torch.empty(spec.shape, dtype=torch_dtype(spec), device="cpu")
    except RuntimeError as exc:
        raise NotAvailable(f"{label}: no memory for tensor {spec.name!r} of {spec.nbytes:,} bytes") from exc
