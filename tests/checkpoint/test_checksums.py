"""Recorded checksums: written whole, compared by a load, refused when broken."""

import array
import json
import os

import pytest
import xxhash

from modelexpress.checkpoint.checksums import CHECKSUMS_NAME, check_checksums, read_checksums, write_checksums
from modelexpress.checkpoint.index import open_index
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.digest import Verifier, checksums_of
from modelexpress.errors import CheckpointError, VerificationFailed
from modelexpress.manifest import PIECE_NBYTES
from modelexpress.plan import plan_checkpoint
from tests.checkpoint.destination import assert_same, empty_like, load, manifest_of
from tests.support.safetensors_writer import raw, shard_name, three_shards, write_file


def verified_load(path, into):
    index = open_index(path)
    disk = DiskTensors(index, threads=2)
    plan = plan_checkpoint(index.manifest, manifest_of(into))
    recorded = read_checksums(index)
    assert recorded is not None
    disk.read(plan, arrived=Verifier(plan, recorded, "on").check)


def test_nothing_recorded_is_none(tmp_path):
    three_shards(tmp_path)

    assert read_checksums(open_index(tmp_path)) is None


def test_checksums_are_xxh3_of_each_piece_in_file_order(tmp_path):
    tensors = {"z": raw("U8", PIECE_NBYTES + 5), "a": raw("U8", 7), "none": raw("F32", 0)}
    write_file(tmp_path / "model.safetensors", tensors)
    index = open_index(tmp_path)

    path = write_checksums(index)

    big = tensors["z"].data
    expected = [xxhash.xxh3_64_intdigest(part) for part in (big[:PIECE_NBYTES], big[PIECE_NBYTES:], tensors["a"].data)]
    assert path == tmp_path / CHECKSUMS_NAME
    assert read_checksums(index) == array.array("Q", expected).tobytes()
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", CHECKSUMS_NAME]


def test_they_are_what_the_same_bytes_in_memory_give(tmp_path):
    """File and memory are cut alike where tensors lie in file order in storages of their own."""
    tensors = {"a": raw("BF16", 9), "b": raw("F32", 5)}
    write_file(tmp_path / "model.safetensors", tensors)
    into = empty_like(tensors)
    index = load(tmp_path, into)
    write_checksums(index)

    assert read_checksums(index) == checksums_of(manifest_of(into), threads=1)


def test_a37_a_good_checkpoint_passes_and_a_flipped_bit_names_the_tensor(tmp_path):
    tensors = three_shards(tmp_path)
    write_checksums(open_index(tmp_path), threads=2)
    into = empty_like(tensors)
    verified_load(tmp_path, into)
    assert_same(into, tensors)

    with (tmp_path / shard_name(2, 3)).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([tensors["layer.1.b"].data[-1] ^ 4]))

    with pytest.raises(VerificationFailed, match=r"tensor layer\.1\.b"):
        verified_load(tmp_path, empty_like(tensors))


def test_recording_again_replaces_the_file(tmp_path):
    three_shards(tmp_path)
    index = open_index(tmp_path)
    first = write_checksums(index).read_bytes()

    assert write_checksums(index, threads=1).read_bytes() == first


def test_checksums_of_another_layout_are_refused(tmp_path):
    write_file(tmp_path / "model.safetensors", {"w": raw("U8", 4)})
    write_checksums(open_index(tmp_path))
    write_file(tmp_path / "model.safetensors", {"w": raw("U8", 5)})

    with pytest.raises(CheckpointError, match=f"{CHECKSUMS_NAME}: recorded for files with other tensors"):
        read_checksums(open_index(tmp_path))


@pytest.mark.parametrize(("change", "words"), [
    ({"version": 2}, "another version"),
    ({"piece_nbytes": 5}, "another version"),
    ({"xxh3_64": "AAAA"}, "3 bytes of checksums for 7 pieces"),
    ({"xxh3_64": "?"}, "cannot be read"),
    ({"xxh3_64": None}, "cannot be read"),
    ({"more": 1}, "cannot be read"),
])  # fmt: skip
def test_a_broken_file_is_refused_with_the_next_step(tmp_path, change, words):
    three_shards(tmp_path)
    index = open_index(tmp_path)
    path = write_checksums(index)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(CheckpointError, match=rf"{CHECKSUMS_NAME}: .*{words}.*--record-checksums"):
        read_checksums(index)


@pytest.mark.parametrize("make", ["fifo", "folder", "link out", "empty"])
def test_what_is_no_file_of_this_folder_is_refused(tmp_path, make):
    three_shards(tmp_path / "model")
    path = tmp_path / "model" / CHECKSUMS_NAME
    makers = {"fifo": lambda: os.mkfifo(path), "folder": path.mkdir, "empty": path.touch}
    makers.get(make, lambda: path.symlink_to("/etc/hostname"))()

    with pytest.raises(CheckpointError, match=CHECKSUMS_NAME):
        read_checksums(open_index(tmp_path / "model"))


def test_a_folder_that_cannot_be_written_to_is_an_error_and_leaves_nothing(tmp_path):
    three_shards(tmp_path)
    index = open_index(tmp_path)
    (tmp_path / CHECKSUMS_NAME).mkdir()

    with pytest.raises(CheckpointError, match=f"{CHECKSUMS_NAME}: cannot be written"):
        write_checksums(index)

    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_shard_that_changed_is_not_recorded(tmp_path):
    three_shards(tmp_path)
    index = open_index(tmp_path)
    os.truncate(tmp_path / shard_name(2, 3), 5000)

    with pytest.raises(CheckpointError, match=shard_name(2, 3)):
        write_checksums(index)
    assert not (tmp_path / CHECKSUMS_NAME).exists()


def test_a_file_named_by_itself_has_checksums_of_its_own(tmp_path):
    three_shards(tmp_path)
    shard = open_index(tmp_path / shard_name(2, 3))
    write_checksums(open_index(tmp_path))

    assert read_checksums(shard) is None
    assert write_checksums(shard) == tmp_path / f"{shard_name(2, 3)}.checksums.json"
    check_checksums(shard)


def test_check_names_the_tensor_that_changed_and_says_when_nothing_was_recorded(tmp_path):
    tensors = three_shards(tmp_path)
    index = open_index(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checksums were recorded; .*--record-checksums"):
        check_checksums(index)
    write_checksums(index)
    check_checksums(index, threads=1)
    with (tmp_path / shard_name(1, 3)).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00" if tensors["layer.0.b"].data[-1] else b"\x01")

    with pytest.raises(VerificationFailed, match=r"tensor layer\.0\.b"):
        check_checksums(open_index(tmp_path))
