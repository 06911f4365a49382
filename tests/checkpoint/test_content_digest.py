"""The digest of a checkpoint's files: what it sees, and what it promises not to see."""

import json
import os
import shutil

import pytest

from modelexpress.checkpoint.content_digest import content_digest
from modelexpress.checkpoint.index import open_index
from modelexpress.errors import CheckpointError
from tests.support.safetensors_writer import raw, shard_name, three_shards, write_file, write_raw, write_sharded

LARGE_NBYTES = 80 * 1024 * 1024  # sampled; sparse, so it costs no disk


def digest_of(path):
    return content_digest(open_index(path))


def flip(path, at):
    """One bit of the file, with the old time of change: a digest must not rest on times."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def large_file(path):
    """Two tensors, the second in the upper half of the file; returns where the data begin."""
    half = LARGE_NBYTES // 2
    header = json.dumps({
        "a": {"dtype": "U8", "shape": [half - 9], "data_offsets": [0, half - 9]},
        "b": {"dtype": "U8", "shape": [half + 9], "data_offsets": [half - 9, 2 * half]},
    })  # fmt: skip
    write_raw(path, header)
    os.truncate(path, 8 + len(header) + LARGE_NBYTES)
    return 8 + len(header)


def test_equal_files_have_equal_digests_whatever_the_folder_and_the_threads(tmp_path):
    three_shards(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")

    digest = digest_of(tmp_path / "one")

    assert digest.startswith("sha256:")
    assert len(digest) == 7 + 64
    assert content_digest(open_index(tmp_path / "two"), threads=1) == digest


def test_the_digest_is_pinned(tmp_path):
    """It names weights in registries: another scheme needs another label, not another value."""
    write_raw(tmp_path / "model.safetensors", '{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"\1\2\3\4")

    assert digest_of(tmp_path) == "sha256:a81616148f1fb85fa38c18f96a4a797593b7b887bcf51dfae07b7b36e4a6bde8"


@pytest.mark.parametrize("from_end", [1, 500, 8580])
def test_any_flipped_bit_of_a_small_shard_changes_it(tmp_path, from_end):
    three_shards(tmp_path)
    before = digest_of(tmp_path)
    path = tmp_path / shard_name(2, 3)

    flip(path, path.stat().st_size - from_end)

    assert digest_of(tmp_path) != before


def test_a_header_that_says_the_same_in_other_bytes_changes_it(tmp_path):
    for name, padding in (("one", 0), ("two", 200)):
        write_file(tmp_path / name / "model.safetensors", {"w": raw("U8", 9)}, header_nbytes=padding)

    assert digest_of(tmp_path / "one") != digest_of(tmp_path / "two")


def test_the_shard_that_the_index_chooses_changes_it(tmp_path):
    shards = {
        "a.safetensors": {"x": raw("U8", 9), "y": raw("U8", 8)},
        "b.safetensors": {"x": raw("U8", 9), "z": raw("U8", 7)},
    }
    for name in ("a", "b"):
        index = {"x": f"{name}.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
        write_sharded(tmp_path / name, shards, index=index)

    assert digest_of(tmp_path / "a") != digest_of(tmp_path / "b")


def test_a_large_shard_is_sampled_where_the_docstring_says(tmp_path):
    """Seen: the start of every tensor, and both ends. Not seen: a bit between the samples."""
    path = tmp_path / "model.safetensors"
    data = large_file(path)
    before = digest_of(tmp_path)
    second = data + LARGE_NBYTES // 2 - 9
    seen = {"first": data, "last": data + LARGE_NBYTES - 1, "start of b": second, "4 KiB into b": second + 4095}

    for what, at in seen.items():
        flip(path, at)
        assert digest_of(tmp_path) != before, what
        flip(path, at)
    flip(path, data + 300_000)
    assert digest_of(tmp_path) == before


def test_a_file_that_changed_since_it_was_validated_is_an_error(tmp_path):
    three_shards(tmp_path)
    index = open_index(tmp_path)
    os.truncate(tmp_path / shard_name(2, 3), 5000)

    with pytest.raises(CheckpointError, match=rf"{shard_name(2, 3)}: changed since .*found 5,000"):
        content_digest(index)
