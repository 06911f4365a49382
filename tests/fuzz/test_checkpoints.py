"""Checkpoint folders that somebody made to do harm: refused, or read exactly as the reference library reads them."""

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from modelexpress.checkpoint.checksums import CHECKSUMS_NAME, read_checksums, write_checksums
from modelexpress.checkpoint.content_digest import content_digest
from modelexpress.checkpoint.header import DTYPES
from modelexpress.checkpoint.index import open_index
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.errors import CheckpointError
from tests.fuzz.inputs import anything_near, fuzzed, json_near, values_near
from tests.support.safetensors_writer import Raw, header_of, raw, shard_name, three_shards, write_file

TENSORS = {"a": raw("F32", 2, 3), "b": raw("BF16", 5), "e": raw("U8", 0, 4), "s": raw("I64"), "z": raw("F8_E4M3", 3)}
HEADER = header_of(TENSORS, {"format": "pt"})
DATA = b"".join(tensor.data for tensor in TENSORS.values())
GOOD = len(HEADER).to_bytes(8, "little") + HEADER + DATA

FILES = st.one_of(
    anything_near(GOOD),
    st.tuples(json_near(json.loads(HEADER)), st.sampled_from([0, 0, 0, 1, -1, 4096])).map(
        lambda pair: len(pair[0]).to_bytes(8, "little") + pair[0] + (DATA + bytes(4096))[: max(0, len(DATA) + pair[1])]
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@contextmanager
def no_descriptor_more():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@fuzzed
@given(data=FILES)
def test_a_file_is_refused_or_read_as_the_library_reads_it(folder, data):
    path = folder / "model.safetensors"
    path.write_bytes(data)
    with no_descriptor_more():
        try:
            index = open_index(path)
            found = dict(DiskTensors(index, threads=1).tensors())
        except CheckpointError as exc:
            assert str(exc).startswith(("model.safetensors: ", f"{path}: "))  # noqa: PT017 - the form of any refusal
            return

    theirs = dict(deserialize(data))  # raises where we accepted what the library refuses
    assert found.keys() == theirs.keys()
    for name, info in theirs.items():
        ours = found[name]
        assert ours.dtype == getattr(torch, DTYPES[info["dtype"]])
        assert bytes(ours.flatten().view(torch.uint8).tolist()) == bytes(info["data"])
        assert list(ours.shape) == list(info["shape"]) or info["dtype"] == "F4"


INDEX = {
    "metadata": {"total_size": 1},
    "weight_map": {"embed": shard_name(1, 3), "layer.0.a": shard_name(1, 3), "layer.0.b": shard_name(1, 3),
                   "layer.1.a": shard_name(2, 3), "layer.1.b": shard_name(2, 3), "norm": shard_name(3, 3),
                   "head": shard_name(3, 3)},
}  # fmt: skip
PLACES = st.sampled_from(
    [shard_name(1, 3), shard_name(2, 3), "../outside.safetensors", "/etc/hostname", "link.safetensors",
     "fifo.safetensors", "sub/inside.safetensors", "sub/../../outside.safetensors", "dir.safetensors",
     "./x.safetensors", "up/outside.safetensors", "loop.safetensors", "inside.safetensors", "model.bin",
     "a\0.safetensors", "x" * 300 + ".safetensors"]
)  # fmt: skip


class HostileFolder:
    """A folder, and the trusted copy of its tensors. Shown in a line, which megabytes of bytes are not."""

    def __init__(self, path, trusted):
        self.path = path
        self.trusted = trusted


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory):
    """Three good shards among links out of the folder, a pipe, a loop and a directory, each named like a shard."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    trusted = three_shards(folder)
    secret = {name: Raw(t.dtype, t.shape, b"\xee" * len(t.data)) for name, t in trusted.items()}
    write_file(folder.parent / "outside.safetensors", secret)
    (folder / "link.safetensors").symlink_to("../outside.safetensors")
    (folder / "up").symlink_to("..")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "inside.safetensors").symlink_to(shard_name(1, 3))
    (folder / "dir.safetensors").mkdir()
    os.mkfifo(folder / "fifo.safetensors")
    return HostileFolder(folder, trusted)


@fuzzed
@given(
    data=st.one_of(
        json_near(INDEX),
        st.tuples(st.sampled_from(sorted(INDEX["weight_map"])), PLACES).map(
            lambda pair: json.dumps({"weight_map": {**INDEX["weight_map"], pair[0]: pair[1]}}).encode()
        ),
        values_near(INDEX["weight_map"]).map(lambda m: json.dumps({"weight_map": m}, default=str).encode()),
    )
)
def test_an_index_is_refused_or_leads_to_the_shards_of_its_own_folder(hostile_folder, data):
    folder, trusted = hostile_folder.path, hostile_folder.trusted
    (folder / "model.safetensors.index.json").write_bytes(data)
    with no_descriptor_more():
        try:
            index = open_index(folder)
            found = dict(DiskTensors(index, threads=1).tensors())
        except CheckpointError:
            return

    for shard in index.shards:
        assert Path(shard.path).is_relative_to(os.path.realpath(folder))
    for name, tensor in found.items():
        assert bytes(tensor.flatten().view(torch.uint8).tolist()) == trusted[name].data


def _recorded(folder: Path) -> dict[str, object]:
    write_file(folder / "model.safetensors", TENSORS)
    path = write_checksums(open_index(folder))
    try:
        return json.loads(path.read_text())
    finally:
        path.unlink()


with tempfile.TemporaryDirectory() as _folder:
    RECORDED = _recorded(Path(_folder))


@fuzzed
@given(data=json_near(RECORDED))
@example(data=b"[" * 100_000)
def test_recorded_checksums_are_refused_or_one_for_each_piece(folder, data):
    write_file(folder / "model.safetensors", TENSORS)
    (folder / CHECKSUMS_NAME).write_bytes(data)
    index = open_index(folder)
    try:
        found = read_checksums(index)
    except CheckpointError:
        return
    assert found is not None
    assert len(found) == 8 * sum(1 for tensor in TENSORS.values() if tensor.data)


@pytest.mark.parametrize("nbytes", [(1 << 48) + 1, 1 << 60])
def test_a_sparse_file_of_exabytes_costs_nothing(nbytes):
    """Found by thought: checksums were counted piece by piece over a file that claims to be 2**60 bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "model.safetensors")
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + nbytes)

        with pytest.raises(CheckpointError, match="a shard has at most 281,474,976,710,656"):
            open_index(folder)


def test_a_sparse_file_within_the_limit_is_digested_by_samples():
    nbytes = 1 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "model.safetensors")
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + nbytes)

        assert content_digest(open_index(folder)).startswith("sha256:")
        assert path.stat().st_blocks * 512 < 1 << 20  # nothing was written into its holes


def test_the_library_refuses_what_it_always_did():
    """The oracle of this file works."""
    with pytest.raises(SafetensorError):
        deserialize(GOOD[:-1])
    assert {name for name, _ in deserialize(GOOD)} == set(TENSORS)
