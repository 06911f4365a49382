"""Which bytes of a storage a tensor covers, and which were written: runs of bytes, and arithmetic on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

# [n, 2]: where bytes start and end in their storage, sorted by start.
Runs = npt.NDArray[np.int64]


class Writes:
    """The bytes of one storage that were written, and the checkpoint tensors behind them."""

    def __init__(self) -> None:
        self.nbytes = 0  # from the checkpoint
        self._names: list[frozenset[str]] = []
        self._runs: list[tuple[int, int] | Runs] = []  # one run, or several

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, target: torch.Tensor, names: frozenset[str]) -> None:
        """`target` is filled from the tensors of these names."""
        if target.is_contiguous():
            start = target.storage_offset() * target.element_size()
            self._runs.append((int(start), int(start) + target.nbytes))
        else:
            self._runs.append(runs_of(target))
        self._names.append(names)
        if names:
            self.nbytes += target.nbytes

    def runs(self) -> Runs:
        """Every run of bytes, sorted by its start."""
        if not self._runs:
            return np.empty((0, 2), dtype=np.int64)
        joined = np.concatenate([np.reshape(np.asarray(each, dtype=np.int64), (-1, 2)) for each in self._runs])
        return joined[joined[:, 0].argsort(kind="stable")]

    def names_in(self, runs: Runs) -> set[str]:
        """The tensors behind any byte of `runs`."""
        return {
            name
            for names, each in zip(self._names, self._runs, strict=True)
            if overlap(np.reshape(np.asarray(each), (-1, 2)), runs)
            for name in names
        }

    def written_twice(self) -> Iterator[frozenset[str]]:
        """The tensors behind both of each two writes that overlap."""
        every = [
            (int(start), int(end), at)
            for at, each in enumerate(self._runs)
            for start, end in ([each] if isinstance(each, tuple) else each)
        ]
        reach, owner = 0, -1
        for start, end, at in sorted(every):
            if start < reach:
                yield self._names[owner] | self._names[at]
            if end > reach:
                reach, owner = end, at


def runs_of(tensor: torch.Tensor) -> Runs:
    """The bytes under a tensor as [n, 2] starts and ends in its storage, sorted; one run where it is dense."""
    itemsize = tensor.element_size()
    run = itemsize
    outer: list[tuple[int, int]] = []
    for step, size in sorted(
        (step * itemsize, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step == run and not outer:
            run *= size
        else:
            outer.append((step, size))
    starts = np.array([tensor.storage_offset() * itemsize], dtype=np.int64)
    for step, size in outer:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64)[None, :] * step).ravel()
    starts.sort()
    return np.stack([starts, starts + run], axis=1)


def gaps_of(wanted: Runs, written: Runs) -> Runs:
    """The parts of `wanted` that `written` leaves out; both sorted, `written` without overlaps."""
    gaps = []
    for start, end in wanted:
        first = int(np.searchsorted(written[:, 1], start, side="right"))
        at = int(start)
        for low, high in written[first:]:
            if low >= end:
                break
            if low > at:
                gaps.append((at, int(low)))
            at = max(at, int(high))
        if at < end:
            gaps.append((at, int(end)))
    return np.array(gaps, dtype=np.int64).reshape(-1, 2)


def covers(runs: Runs, at: int) -> bool:
    """Whether a byte is in any of the runs."""
    return bool(((runs[:, 0] <= at) & (at < runs[:, 1])).any())


def overlap(runs: Runs, others: Runs) -> bool:
    """Whether two lists of runs have a byte in common."""
    return any(bool(((runs[:, 0] < end) & (start < runs[:, 1])).any()) for start, end in others)
