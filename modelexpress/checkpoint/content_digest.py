"""What a checkpoint's files are, as one digest, without reading all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import xxhash

from modelexpress.checkpoint.files import check_unchanged, fill, opened
from modelexpress.checkpoint.index import CheckpointIndex, Shard

_SCHEME = b"modelexpress content digest 1"
_WHOLE_NBYTES = 64 * 1024 * 1024  # a shard up to this size is read whole
_HEAD_NBYTES = 4 * 1024  # of every tensor in a larger one
_BLOCK_NBYTES = 64 * 1024
_BLOCKS = 64  # evenly spread over the data of a larger one, the first and the last bytes among them
_BUFFER_NBYTES = 1024 * 1024


def content_digest(index: CheckpointIndex, *, threads: int = 4) -> str:
    """`sha256:<64 hex>` over what the files hold; equal on every host that holds the same files.

    Covers, in the order of the shards' names: name, size, the whole header, and of the data either all (a
    shard up to 64 MiB) or samples (a larger one): the first 4 KiB of every tensor, and 64 blocks of 64 KiB,
    evenly spread, the first and the last among them. Covers too which tensor comes from which shard.

    Guarantee: it changes when a file is replaced by one with another header or size, and when any byte of a
    shard up to 64 MiB changes. In a larger shard it changes when weights were trained, converted or
    quantised, since that touches the start of some tensor. It does **not** see a change of a larger shard
    that keeps header and size and touches sampled bytes nowhere: a flipped bit, an edited row in the middle
    of an embedding. Recorded checksums (`checksums.py`) see those.

    It is no defence against a forger who picks the bytes between the samples.

    Reads about 4 MiB and 4 KiB per tensor of a large shard. `threads` shards at a time, one open file each.

    Raises:
        CheckpointError: a file changed since its header was validated, or cannot be read.
    """
    heads: list[list[int]] = [[] for _ in index.shards]
    for tensor in index.manifest.tensors:
        if tensor.storage >= 0:
            heads[tensor.storage].append(tensor.offset)
    with ThreadPoolExecutor(threads, thread_name_prefix="mx-digest") as pool:
        sampled = list(pool.map(_data_digest, index.shards, heads))
    whole = hashlib.sha256(_SCHEME)
    for shard, data in zip(index.shards, sampled, strict=True):
        name = os.fsencode(shard.name)
        for part in (name, str(shard.nbytes).encode(), bytes.fromhex(shard.header_sha256), data):
            whole.update(len(part).to_bytes(8, "little") + part)
    whole.update(bytes.fromhex(index.manifest.layout_digest))
    return f"sha256:{whole.hexdigest()}"


def _data_digest(shard: Shard, heads: list[int]) -> bytes:
    """xxh3_128 of the shard's bytes, or of its samples."""
    buffer = memoryview(bytearray(_BUFFER_NBYTES))
    running = xxhash.xxh3_128()
    with opened(shard.path, shard.name) as (fd, _):
        check_unchanged(fd, shard.name, shard.state)
        for start, end in _covered(shard, heads):
            for at in range(start, end, _BUFFER_NBYTES):
                view = buffer[: min(_BUFFER_NBYTES, end - at)]
                fill(fd, shard.name, at, [view])
                running.update(view)
    return running.digest()


def _covered(shard: Shard, heads: list[int]) -> Iterator[tuple[int, int]]:
    if shard.nbytes <= _WHOLE_NBYTES:
        yield 0, shard.nbytes
        return
    for offset in sorted(heads):
        yield offset, min(offset + _HEAD_NBYTES, shard.nbytes)
    last = shard.nbytes - _BLOCK_NBYTES
    for number in range(_BLOCKS):
        start = shard.data_offset + (last - shard.data_offset) * number // (_BLOCKS - 1)
        yield max(0, start), max(0, start) + _BLOCK_NBYTES
