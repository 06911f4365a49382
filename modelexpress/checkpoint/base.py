"""The contract between a checkpoint's bytes and whoever fills a model from them.

The bytes may lie on disk or in the memory of a peer; an engine adapter cannot tell, and must not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch

from modelexpress.manifest import Manifest
from modelexpress.plan import TransferPlan
from modelexpress.transport import Arrived, Moved


class CheckpointTensors(ABC):
    """The raw tensors of one checkpoint, validated before a byte of them is used.

    Attributes:
        label: for messages: the folder, or the peer.
        manifest: one storage per shard; every tensor contiguous, kind "parameter", sorted by name.
    """

    label: str
    manifest: Manifest

    @abstractmethod
    def read(self, plan: TransferPlan, *, arrived: Arrived | None = None, moved: Moved | None = None) -> None:
        """Fill the plan's target memory; `plan.source` is this manifest.

        Calls `arrived` once per chunk, from the thread that moved it; what it raises ends the read. `moved` is
        called before that, as in Connection.read, by what moves chunks in steps. When
        this returns or raises, nothing writes to the target any more. Peak memory beyond the target is
        bounded and does not depend on the model.
        """

    @abstractmethod
    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors (all for None), in file order, each owned by the consumer.

        A tensor never changes after it was handed out, whoever holds it and for how long, and never
        aliases a file, a buffer of ours or another tensor.
        """
