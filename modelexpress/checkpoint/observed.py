"""A checkpoint whose bytes are checked against checksums and counted as they arrive, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.digest import TensorVerifier, Verifier, Verify
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.transport import Arrived, Moved


class ObservedTensors(CheckpointTensors):
    """Wraps a checkpoint.

    Args:
        checksums: one per piece of the manifest; ignored where `verify` is "off".
        progress: called with the bytes that just came into place, from any thread.
    """

    def __init__(
        self, inner: CheckpointTensors, *, checksums: bytes, verify: Verify, progress: Callable[[int], None] | None
    ) -> None:
        self.label = inner.label
        self.manifest = inner.manifest
        self._inner = inner
        self._checksums = checksums
        self._verify = verify
        self._progress = progress

    def read(self, plan: TransferPlan, *, arrived: Arrived | None = None, moved: Moved | None = None) -> None:
        verifier = Verifier(plan, self._checksums, self._verify)

        def observe(chunk: Chunk) -> None:
            verifier.check(chunk)
            if self._progress is not None:
                self._progress(chunk.nbytes)
            if arrived is not None:
                arrived(chunk)

        def observe_step(chunk: Chunk, start: int, nbytes: int) -> None:
            verifier.moved(chunk, start, nbytes)
            if moved is not None:
                moved(chunk, start, nbytes)

        steps = observe_step if self._verify != "off" or moved is not None else None
        self._inner.read(plan, arrived=observe, moved=steps)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        verifier = TensorVerifier(self.manifest, self._checksums, self._verify)
        for name, tensor in self._inner.tensors(names):
            verifier.check(name, tensor)
            if self._progress is not None:
                self._progress(tensor.nbytes)
            yield name, tensor
