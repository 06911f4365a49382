"""Checksums of weights where they lie in memory, and the check of a transfer against them.

xxh3_64 finds damage at memory speed (10.7 GB/s on one core, where SHA-256 runs at 1.25). It is no defence
against a forger; that is the registry's signing key.
"""

from __future__ import annotations

import array
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import xxhash

from modelexpress.errors import ManifestMismatch, VerificationFailed
from modelexpress.manifest import PIECE_NBYTES, Manifest, Piece, cut, pieces
from modelexpress.memory import readable_at
from modelexpress.plan import Chunk, Range, TransferPlan

if TYPE_CHECKING:
    import torch

Verify = Literal["on", "off", "sampled"]

_SAMPLED_EVERY = 8  # "sampled" checks one piece in eight, chosen at random for each load, and at least one


def checksum_at(address: int, nbytes: int, device: str) -> int:
    """xxh3_64 of `nbytes` at `address`. Device memory is copied to the host first, a piece at a time."""
    return xxhash.xxh3_64_intdigest(readable_at(address, nbytes, device))


def checksums_of(manifest: Manifest, *, threads: int) -> bytes:
    """One checksum per piece of the manifest's memory, 8 bytes each in native order of the pieces.

    Reads every byte under a tensor once. The caller keeps the memory alive and unchanged.
    """

    def of(piece: Piece) -> int:
        storage = manifest.storages[piece.storage]
        return checksum_at(storage.address + piece.offset, piece.nbytes, storage.device)

    with ThreadPoolExecutor(threads, thread_name_prefix="mx-checksum") as pool:
        return array.array("Q", pool.map(of, pieces(manifest))).tobytes()


class PieceChecksums:
    """The checksums that belong to a manifest: what each of its pieces must have.

    Raises:
        ManifestMismatch: they were made for another manifest, or there are none.
    """

    def __init__(self, manifest: Manifest, packed: bytes) -> None:
        self._spans = manifest.spans()
        # Counted before they are made: a manifest from outside may claim more pieces than there is memory.
        count = sum(-(-span.nbytes // PIECE_NBYTES) for span in self._spans)
        if len(packed) != 8 * count:
            raise ManifestMismatch(
                f"there are {len(packed) / 8:g} checksums for {count} pieces of weights; the source must publish with "
                "verify on, or load with verify='off'"
            )
        self._expected = array.array("Q", packed)
        self.pieces = tuple(cut(self._spans))

    def names(self, piece: Piece) -> tuple[str, ...]:
        """The tensors that look at a piece."""
        return self._spans[piece.span].names

    def start(self, piece: Piece) -> int:
        """Where a piece begins, in bytes from the first byte of its tensors."""
        return piece.offset - self._spans[piece.span].offset

    def compare(self, number: int, found: int) -> None:
        """Compare the checksum that piece `number` has now.

        Raises:
            VerificationFailed: names the tensors and both values.
        """
        if found != self._expected[number]:
            piece = self.pieces[number]
            raise VerificationFailed(
                f"tensor {', '.join(self.names(piece))}: {piece.nbytes:,} bytes at offset {piece.offset:,} of storage "
                f"{piece.storage} have checksum {found:016x}, and {self._expected[number]:016x} was recorded; the "
                "source's memory or file is damaged"
            )


class Verifier:
    """Compares each chunk that arrived with the checksums that the source made when it published.

    Args:
        checksums: 8 bytes per piece of the plan's source.
        mode: "on" checks every piece, "sampled" one in eight, "off" none.

    Raises:
        ManifestMismatch: the checksums do not belong to this manifest. Nothing was written.
    """

    def __init__(self, plan: TransferPlan, checksums: bytes, mode: Verify) -> None:
        self._plan = plan
        self._expected = PieceChecksums(plan.source, checksums) if mode != "off" else None
        self.chosen = _choose([number for chunk in plan.chunks for number, _ in chunk.pieces], mode)
        self._steps: dict[int, _Steps] = {}

    def moved(self, chunk: Chunk, start: int, nbytes: int) -> None:
        """Read ahead what `check` will ask for, while it is in the cache: a step of a chunk that is in place.

        Steps of one chunk come from one thread, follow each other and begin at 0.

        Raises:
            VerificationFailed: as `check`, as soon as a whole piece is there.
        """
        if self._expected is None:
            return
        if start == 0:
            self._steps[chunk.pieces[0][0]] = _Steps(chunk, self._view, self._expected.compare)
        self._steps[chunk.pieces[0][0]].move(start + nbytes)

    def check(self, chunk: Chunk) -> None:
        """Check one chunk that has arrived in the target.

        Raises:
            VerificationFailed: names the tensors under the first piece that is wrong.
        """
        if self._expected is None:
            return
        steps = self._steps.pop(chunk.pieces[0][0], None) or _Steps(chunk, self._view, self._expected.compare)
        steps.move(chunk.nbytes)

    def _view(self, number: int, part: Range) -> memoryview | None:
        """A piece in the target; None where it is not checked."""
        if number not in self.chosen:
            return None
        device = self._plan.target.storages[part.target_storage].device
        return readable_at(self._plan.target_address(part), part.nbytes, device)


class _Steps:
    """How far one chunk has been checked.

    Args:
        view: the bytes of a piece to look at, or None. Asked for when its first bytes are there; on a device, where
            that makes a copy, nobody moves a piece by steps.
        compare: called with the number and the checksum of each piece that is whole.
    """

    def __init__(
        self, chunk: Chunk, view: Callable[[int, Range], memoryview | None], compare: Callable[[int, int], None]
    ) -> None:
        self._pieces = iter(chunk.pieces)
        self._view_of = view
        self._compare = compare
        self._hasher = xxhash.xxh3_64()
        self._done = 0  # bytes of the chunk
        self._number = 0
        self._piece: memoryview | None = None
        self._begin = self._end = 0  # of the piece, in bytes of the chunk

    def move(self, until: int) -> None:
        """Take every byte of the chunk up to `until` that was not taken yet, piece by piece."""
        while self._done < until:
            if self._done == self._end:
                self._number, part = next(self._pieces)
                self._begin, self._end = self._end, self._end + part.nbytes
                self._piece = self._view_of(self._number, part)
                self._hasher.reset()
            upto = min(self._end, until)
            if self._piece is not None:
                self._hasher.update(self._piece[self._done - self._begin : upto - self._begin])
                if upto == self._end:
                    self._compare(self._number, self._hasher.intdigest())
            self._done = upto


class TensorVerifier:
    """The same for raw checkpoint tensors that arrive whole, one by one, in memory of their own."""

    def __init__(self, manifest: Manifest, checksums: bytes, mode: Verify) -> None:
        self._expected = PieceChecksums(manifest, checksums) if mode != "off" else None
        self._numbers: dict[str, list[int]] = {}
        if self._expected is not None:
            for number, piece in enumerate(self._expected.pieces):
                self._numbers.setdefault(self._expected.names(piece)[0], []).append(number)
        self._chosen = _choose([number for numbers in self._numbers.values() for number in numbers], mode)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Check one contiguous tensor.

        Raises:
            VerificationFailed: names the tensor.
        """
        if self._expected is None:
            return
        for number in self._numbers.get(name, ()):
            if number in self._chosen:
                piece = self._expected.pieces[number]
                if self._expected.start(piece) + piece.nbytes > tensor.nbytes:
                    raise VerificationFailed(
                        f"tensor {name}: it has {tensor.nbytes:,} bytes, and its checksums cover more; it is not used"
                    )
                start = tensor.data_ptr() + self._expected.start(piece)
                self._expected.compare(number, checksum_at(start, piece.nbytes, str(tensor.device)))


def _choose(numbers: list[int], mode: Verify) -> frozenset[int]:
    if mode == "sampled" and numbers:
        return frozenset(random.sample(numbers, max(1, len(numbers) // _SAMPLED_EVERY)))
    return frozenset(numbers if mode == "on" else ())
