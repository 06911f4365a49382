"""Where a transport that copies in steps puts the bytes of a chunk: the target's memory, or a buffer before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from modelexpress.devices import bind_thread
from modelexpress.manifest import PIECE_NBYTES
from modelexpress.memory import device_memory_at
from modelexpress.plan import Chunk, TransferPlan

if TYPE_CHECKING:
    import torch

# One step of a chunk whose bytes are looked at right after it: they still lie in the core's own cache. Copy and xxh3
# together, two threads: steps of 256 KiB to 512 KiB took 0.86 of the CPU time of whole chunks of 16 MiB.
STEP_NBYTES = 512 * 1024

_MOST_RUNS = 1024  # UIO_MAXIOV, <linux/uio.h>: more in one call is EINVAL

Run = tuple[int, int, int]  # local address, remote address, bytes


class Destination:
    """The memory of one lane. Used by one thread.

    Attributes:
        staged: whether the chunk that is being moved is, in part, only in the buffer.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._buffer: torch.Tensor | None = None
        self._staged: list[tuple[torch.Tensor, int, str]] = []

    @property
    def staged(self) -> bool:
        return bool(self._staged)

    def runs(self, chunk: Chunk) -> list[Run]:
        """The copies that a chunk takes, all of them into host memory. Call `land` when they are done.

        The buffer holds a whole chunk, since a chunk is at most a piece.
        """
        runs: list[Run] = []
        filled = 0
        self._staged.clear()
        for part in chunk.ranges:
            local = self._plan.target_address(part)
            device = self._plan.target.storages[part.target_storage].device
            if device != "cpu":
                bind_thread(device)
                place = self._host()[filled : filled + part.nbytes]
                filled += part.nbytes
                self._staged.append((place, local, device))
                local = place.data_ptr()
            runs.append((local, self._plan.source_address(part), part.nbytes))
        return runs

    def land(self) -> None:
        """Copy what was staged to its device, and wait for it."""
        for place, address, device in self._staged:
            device_memory_at(address, place.nbytes, device).copy_(place)
        self._staged.clear()

    def _host(self) -> torch.Tensor:
        if self._buffer is None:
            import torch  # here, so that `modelexpress sources` need not wait for it

            self._buffer = torch.empty(PIECE_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._buffer


def steps(runs: Sequence[Run], *, most: int) -> Iterator[list[Run]]:
    """Cut runs into steps of at most `most` bytes that one call to the kernel can take, in their order."""
    step: list[Run] = []
    room = most
    for local, remote, nbytes in runs:
        at = 0
        while at < nbytes:
            if not room or len(step) == _MOST_RUNS:
                yield step
                step, room = [], most
            taken = min(room, nbytes - at)
            step.append((local + at, remote + at, taken))
            at += taken
            room -= taken
    if step:
        yield step
