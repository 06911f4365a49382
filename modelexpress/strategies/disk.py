"""DiskCheckpoint: the engine's native loading, from validated files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.checkpoint.checksums import read_checksums
from modelexpress.checkpoint.index import CheckpointIndex, open_index
from modelexpress.checkpoint.observed import ObservedTensors
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.digest import Verify
from modelexpress.errors import CheckpointError, ManifestMismatch, printable
from modelexpress.strategies.base import LoadSource, LoadStrategy, LoadTarget, TransferStats, load_raw, raw_tolerance

_LEAST_READERS = 4  # a disk wants that many requests at once; a reader mostly waits


def open_files(
    index: CheckpointIndex,
    *,
    threads: int,
    verify: Verify,
    progress: Callable[[int], None] | None,
    direct: bool = True,
) -> CheckpointTensors:
    """The tensors of validated files, compared with recorded checksums where there are any and `verify` asks for it.

    Args:
        threads: of the machine that there are to use; at least 4 read.
        direct: see DiskTensors.

    Raises:
        CheckpointError: the recorded checksums cannot be used.
    """
    checksums = read_checksums(index) if verify != "off" else None
    return ObservedTensors(
        DiskTensors(index, threads=max(threads, _LEAST_READERS), direct=direct),
        checksums=checksums or b"",
        verify=verify if checksums is not None else "off",
        progress=progress,
    )


class DiskCheckpoint(LoadStrategy):
    """Loads from a checkpoint on a file system.

    Args:
        verify: compares with recorded checksums (`modelexpress inspect --record-checksums`) where the folder
            has them; files without a record have nothing to be compared with.
        fetch: brings the checkpoint to this machine and says where it is; called when this way is tried.
        direct: see DiskTensors.
    """

    name = "disk"

    def __init__(
        self,
        checkpoint: Path,
        *,
        threads: int,
        verify: Verify,
        fetch: Callable[[], Path] | None = None,
        direct: bool = True,
    ) -> None:
        self._checkpoint = checkpoint
        self._open = partial(open_files, threads=threads, verify=verify, direct=direct)
        self._fetch = fetch

    def sources(self, target: LoadTarget) -> Sequence[LoadSource]:
        checkpoint = self._checkpoint if self._fetch is None else self._fetch()
        return (_Folder(checkpoint, target, self._open),)


class _Folder(LoadSource):
    def __init__(self, checkpoint: Path, target: LoadTarget, opened: Callable[..., CheckpointTensors]) -> None:
        self.name = printable(str(checkpoint))
        self.tolerates = raw_tolerance(target.adapter)
        self._checkpoint = checkpoint
        self._open = opened

    def load(self, target: LoadTarget) -> TransferStats:
        index = open_index(self._checkpoint)
        tensors = self._open(index, progress=target.progress)
        try:
            return load_raw(target, tensors, confirm=lambda: None)
        except ManifestMismatch as exc:
            raise CheckpointError(f"{self._checkpoint}: {exc}") from exc
