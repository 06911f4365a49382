"""Which tensor of a checkpoint is where: everything is validated before a byte of a weight is used.

`folder.py` says which files count, `header.py` what a file may look like. No torch here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelexpress.checkpoint.files import FileState, opened, read_bytes
from modelexpress.checkpoint.folder import INDEX_NAME, find_files
from modelexpress.checkpoint.header import LENGTH_NBYTES, Entry, header_nbytes, parse_header
from modelexpress.errors import CheckpointError
from modelexpress.manifest import MAX_STORAGE_NBYTES, NO_STORAGE, Manifest, StorageSpec, TensorSpec, contiguous_stride

_MAX_TENSORS = 4_000_000  # forty times what the largest public models have
_LISTED = 5  # tensors that an error spells out
_START_NBYTES = 64  # enough to say what a file is that is no safetensors file


class Shard(msgspec.Struct, frozen=True):
    """One file. `name` is relative to the checkpoint's folder, `path` is real, `state` was found when the
    header was read. The data begin at byte `data_offset`.
    """

    name: str
    path: str
    state: FileState
    data_offset: int
    header_sha256: str

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.state.nbytes


class CheckpointIndex(msgspec.Struct, frozen=True):
    """A checkpoint whose files, headers and index agree with each other.

    Attributes:
        root: the folder, as the caller named it.
        single: the caller named one file in it.
        shards: sorted by name.
        manifest: storage n is shard n, `nbytes` its file's size; a tensor's offset counts from the start of
            the file. Every tensor is contiguous and a "parameter".
    """

    root: Path
    single: bool
    shards: tuple[Shard, ...]
    manifest: Manifest


def open_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Read and check the headers of the checkpoint at `path`: a folder, or one .safetensors file.

    Where there is an index it decides from which shard a tensor comes; a copy of it in another shard is
    ignored. A tensor that the index names must be in that shard, and a tensor in an indexed shard must be
    in the index: a weight that one of the two forgot would otherwise be lost in silence.

    Holds no file open. Peak memory is that of the manifest, and of one header.

    Raises:
        CheckpointError: names file, tensor and reason; no byte of a weight was read.
    """
    found = find_files(path)
    contents = [_read_shard(name, real) for name, real in found.files]
    if sum(len(entries) for _, entries in contents) > _MAX_TENSORS:
        raise CheckpointError(f"{found.root}: more than {_MAX_TENSORS:,} tensors")
    if found.shard_of is not None:
        _check_agreement(found.root, found.shard_of, contents)
    else:
        _check_unique(found.root, contents)
    shards = tuple(shard for shard, _ in contents)
    tensors = [
        _tensor(entry, number, shard.data_offset)
        for number, (shard, entries) in enumerate(contents)
        for entry in entries
        if found.shard_of is None or found.shard_of[entry.name] == shard.name
    ]
    storages = tuple(StorageSpec(shard.nbytes, 0, "file") for shard in shards)
    manifest = Manifest(storages, tuple(sorted(tensors, key=lambda t: t.name)))
    return CheckpointIndex(found.root, found.single, shards, manifest)


def _read_shard(name: str, real: str) -> tuple[Shard, tuple[Entry, ...]]:
    with opened(real, name) as (fd, state):
        if state.nbytes > MAX_STORAGE_NBYTES:  # a sparse file can claim exabytes
            raise CheckpointError(f"{name}: {state.nbytes:,} bytes; a shard has at most {MAX_STORAGE_NBYTES:,}")
        start = read_bytes(fd, name, 0, min(_START_NBYTES, state.nbytes))
        nbytes = header_nbytes(start, state.nbytes, name)
        header = read_bytes(fd, name, LENGTH_NBYTES, nbytes)
    data_offset = LENGTH_NBYTES + nbytes
    entries = parse_header(header, state.nbytes - data_offset, name)
    return Shard(name, real, state, data_offset, hashlib.sha256(header).hexdigest()), entries


def _tensor(entry: Entry, number: int, data_offset: int) -> TensorSpec:
    empty = entry.begin == entry.end
    return TensorSpec(
        entry.name,
        NO_STORAGE if empty else number,
        0 if empty else data_offset + entry.begin,
        entry.shape,
        contiguous_stride(entry.shape),
        entry.dtype,
        "parameter",
    )


def _check_agreement(root: Path, shard_of: dict[str, str], contents: list[tuple[Shard, tuple[Entry, ...]]]) -> None:
    inside = {shard.name: {entry.name for entry in entries} for shard, entries in contents}
    absent = [f"{name!r} (not in {shard})" for name, shard in shard_of.items() if name not in inside[shard]]
    if absent:
        raise CheckpointError(f"{root / INDEX_NAME}: {_listed(absent, 'tensors are not where the index says')}")
    forgotten = [
        f"{name!r} (in {shard})" for shard, names in inside.items() for name in sorted(names - shard_of.keys())
    ]
    if forgotten:
        raise CheckpointError(
            f"{root / INDEX_NAME}: {_listed(forgotten, 'tensors of its shards are not in the index')}"
        )


def _check_unique(root: Path, contents: list[tuple[Shard, tuple[Entry, ...]]]) -> None:
    first: dict[str, str] = {}
    for shard, entries in contents:
        for entry in entries:
            other = first.setdefault(entry.name, shard.name)
            if other != shard.name:
                raise CheckpointError(
                    f"{root}: tensor {entry.name!r} is in {other} and in {shard.name}, and there is no {INDEX_NAME} to "
                    "say which counts; remove one of the files, or add the index"
                )


def _listed(what: Iterable[str], kind: str) -> str:
    every = list(what)
    more = f", and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return f"{len(every)} {kind}: {', '.join(every[:_LISTED])}{more}"
