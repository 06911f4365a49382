"""Recorded checksums of a checkpoint: what finds a flipped bit in a file, where headers and sizes cannot.

One xxh3_64 for each piece of the checkpoint's manifest, in a file beside the shards. Who writes it vouches
that the files are good at that moment; every later load can compare.
"""

from __future__ import annotations

import array
import base64
import binascii
import os
import secrets
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from modelexpress.checkpoint.files import check_unchanged, fill, opened, read_bytes
from modelexpress.checkpoint.folder import resolve_inside
from modelexpress.checkpoint.index import CheckpointIndex
from modelexpress.digest import PieceChecksums
from modelexpress.errors import CheckpointError
from modelexpress.manifest import PIECE_NBYTES, Piece, pieces

CHECKSUMS_NAME = "modelexpress.checksums.json"

_MAX_FILE_NBYTES = 256 * 1024 * 1024  # 10 bytes a piece: more than 300 TB of weights
_NEXT_STEP = "run `modelexpress inspect --record-checksums` on files that you know to be good"


class _Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. `xxh3_64`: 8 bytes a piece, little-endian, in base64. `piece_nbytes` is how they were cut."""

    version: int
    layout_digest: str
    piece_nbytes: int
    xxh3_64: str


def write_checksums(index: CheckpointIndex, *, threads: int = 4) -> Path:
    """Read every weight once and record its checksums beside the shards; returns the file.

    The file appears whole or not at all, and replaces an older one. Peak memory: 16 MiB a thread.

    Raises:
        CheckpointError: a shard changed since the index was made or cannot be read, or the folder cannot
            be written to.
    """
    values = array.array("Q", _checksums(index, threads))
    recorded = _Recorded(1, index.manifest.layout_digest, PIECE_NBYTES, base64.b64encode(_little(values)).decode())
    path = checksums_path(index)
    try:
        _replace(path, msgspec.json.encode(recorded))
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be written: {exc.strerror}; it must lie beside the shards") from exc
    return path


def read_checksums(index: CheckpointIndex) -> bytes | None:
    """The recorded checksums, 8 bytes a piece in native order as `digest.checksums_of` makes them.

    None when nobody recorded any.

    Raises:
        CheckpointError: the file is broken, or was recorded for files with another layout.
    """
    path = checksums_path(index)
    if not os.path.lexists(path):
        return None
    with opened(resolve_inside(index.root, path.name), str(path)) as (fd, state):
        if state.nbytes > _MAX_FILE_NBYTES:
            raise CheckpointError(f"{path}: {state.nbytes:,} bytes; checksums take at most {_MAX_FILE_NBYTES:,}")
        data = read_bytes(fd, str(path), 0, state.nbytes)
    try:
        recorded = msgspec.json.decode(data, type=_Recorded)
        packed = base64.b64decode(recorded.xxh3_64, validate=True)
    except (msgspec.MsgspecError, binascii.Error, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc}; {_NEXT_STEP}") from exc
    if recorded.version != 1 or recorded.piece_nbytes != PIECE_NBYTES:
        raise CheckpointError(f"{path}: recorded by another version of modelexpress; {_NEXT_STEP}")
    if recorded.layout_digest != index.manifest.layout_digest:
        raise CheckpointError(f"{path}: recorded for files with other tensors than those here; {_NEXT_STEP}")
    count = sum(1 for _ in pieces(index.manifest))
    if len(packed) != 8 * count:
        raise CheckpointError(f"{path}: holds {len(packed):,} bytes of checksums for {count:,} pieces; {_NEXT_STEP}")
    values = array.array("Q")
    values.frombytes(packed)
    return _little(values)


def check_checksums(index: CheckpointIndex, *, threads: int = 4) -> None:
    """Read every weight once and compare it with what was recorded.

    Raises:
        CheckpointError: nothing was recorded, or what was cannot be used, or a shard cannot be read.
        VerificationFailed: names the tensor under the first piece that is not as recorded.
    """
    recorded = read_checksums(index)
    if recorded is None:
        raise CheckpointError(f"{checksums_path(index)}: no checksums were recorded; {_NEXT_STEP}")
    expected = PieceChecksums(index.manifest, recorded)
    for number, found in enumerate(_checksums(index, threads)):
        expected.compare(number, found)


def checksums_path(index: CheckpointIndex) -> Path:
    """Where checksums are recorded: one file for a folder, and one for each file that is named by itself."""
    if not index.single:
        return index.root / CHECKSUMS_NAME
    return index.root / f"{index.shards[0].name}.checksums.json"


def _checksums(index: CheckpointIndex, threads: int) -> list[int]:
    buffers = threading.local()  # one for each thread: fresh memory for every piece would cost more than the reading

    def of(piece: Piece) -> int:
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(PIECE_NBYTES))
        view = buffers.view[: piece.nbytes]
        shard = index.shards[piece.storage]
        with opened(shard.path, shard.name) as (fd, _):
            fill(fd, shard.name, piece.offset, [view])
            check_unchanged(fd, shard.name, shard.state)
        return xxhash.xxh3_64_intdigest(view)

    with ThreadPoolExecutor(threads, thread_name_prefix="mx-checksum") as pool:
        return list(pool.map(of, pieces(index.manifest)))


def _little(values: array.array[int]) -> bytes:
    """Native to little-endian, or back: the same swap."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _replace(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step that also survives a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
