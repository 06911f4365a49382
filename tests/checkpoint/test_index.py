"""Folders, indexes and links: which files make up a checkpoint, and what is refused before any is opened."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelexpress.checkpoint.index import open_index
from modelexpress.errors import CheckpointError
from modelexpress.manifest import NO_STORAGE
from tests.checkpoint.destination import assert_same, empty_like, load
from tests.support.safetensors_writer import (
    raw,
    shard_name,
    three_shards,
    write_file,
    write_index,
    write_raw,
    write_sharded,
)

WATCHED_OPEN = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from modelexpress.checkpoint.index import open_index
from modelexpress.errors import CheckpointError
try:
    open_index(sys.argv[1])
except CheckpointError as exc:
    print(exc)
print("OPENED", *(path for path in opened if not path.endswith((".py", ".pyc"))), sep="\\n")
assert "torch" not in sys.modules
"""


def watched(path: Path) -> tuple[str, list[str]]:
    """What open_index said about `path` in a process of its own, and every file that process opened."""
    run = subprocess.run(
        [sys.executable, "-c", WATCHED_OPEN, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    said, opened = run.stdout.split("OPENED\n")
    return said.strip(), opened.split("\n")


def loaded(path: Path, tensors) -> bool:
    into = empty_like(tensors)
    load(path, into)
    assert_same(into, tensors)
    return True


# What the record holds


def test_manifest_has_a_storage_per_shard_and_file_offsets(tmp_path):
    tensors = {"b": raw("F32", 2, 3), "a": raw("U8", 5), "none": raw("F16", 0, 4), "one": raw("I64")}
    path = write_file(tmp_path / "model.safetensors", tensors)

    index = open_index(tmp_path)

    index.manifest.validate()
    assert [(s.nbytes, s.address, s.device) for s in index.manifest.storages] == [(path.stat().st_size, 0, "file")]
    found = {t.name: (t.storage, t.offset - index.shards[0].data_offset, t.shape) for t in index.manifest.tensors}
    assert list(found) == ["a", "b", "none", "one"]
    assert found["a"] == (0, 24, (5,))
    assert found["none"][0] == NO_STORAGE
    assert found["one"] == (0, 29, ())


def test_four_bit_values_are_counted_in_bytes(tmp_path):
    write_raw(tmp_path / "model.safetensors", '{"w":{"dtype":"F4","shape":[2,8],"data_offsets":[0,8]}}', bytes(8))

    (tensor,) = open_index(tmp_path).manifest.tensors

    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("float4_e2m1fn_x2", (2, 4), 8)


@pytest.mark.parametrize("named", ["folder", "file", "string"])
def test_a_single_file_is_found_by_its_folder_and_by_its_name(tmp_path, named):
    tensors = {"w": raw("BF16", 7)}
    path = write_file(tmp_path / "model.safetensors", tensors)

    assert loaded({"folder": tmp_path, "file": path, "string": str(tmp_path)}[named], tensors)


# A03, A08, A10: shards and their index


@pytest.mark.parametrize("cut", [1, 4096, 0.5])
def test_a03_a_short_shard_is_named_with_both_sizes(tmp_path, cut):
    three_shards(tmp_path)
    last = tmp_path / shard_name(3, 3)
    size = last.stat().st_size
    left = size // 2 if cut == 0.5 else size - cut
    os.truncate(last, left)

    with pytest.raises(CheckpointError, match=f"{last.name}: cut short: expected {size:,} bytes, found {left:,}"):
        open_index(tmp_path)


@pytest.mark.parametrize("broken", ["missing", "0 bytes", "a directory", "not a regular file"])
@pytest.mark.parametrize("indexed", [True, False])
def test_a08_a_shard_that_is_not_there_is_listed_before_any_is_read(tmp_path, broken, indexed):
    three_shards(tmp_path)
    second = tmp_path / shard_name(2, 3)
    second.unlink()
    makers = {"0 bytes": second.touch, "a directory": second.mkdir, "not a regular file": lambda: os.mkfifo(second)}
    makers.get(broken, lambda: None)()
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()

    said, opened = watched(tmp_path)

    assert second.name in said
    assert broken in said
    assert not [path for path in opened if path.endswith(".safetensors")]


def test_a08_all_missing_shards_are_listed_at_once(tmp_path):
    three_shards(tmp_path)
    for number in (1, 3):
        (tmp_path / shard_name(number, 3)).unlink()

    with pytest.raises(CheckpointError, match=r"2 of 3 shards .*00001-of-00003.*\(missing\), .*00003-of-00003"):
        open_index(tmp_path)


@pytest.mark.parametrize("stale_first", [True, False])
def test_a10_the_index_decides_between_two_copies(tmp_path, stale_first):
    right, stale, other = raw("F32", 9, seed=1), raw("F32", 9, seed=2), raw("F32", 4)
    first, last = ("b.safetensors", "a.safetensors") if stale_first else ("a.safetensors", "b.safetensors")
    write_sharded(tmp_path, {first: {"x": right}, last: {"y": other, "x": stale}}, index={"x": first, "y": last})

    assert loaded(tmp_path, {"x": right, "y": other})


def test_a10_copies_may_even_differ_in_shape(tmp_path):
    right, other = raw("F32", 9), raw("F32", 4)
    write_sharded(
        tmp_path,
        {"a.safetensors": {"x": raw("U8", 3), "y": other}, "b.safetensors": {"x": right}},
        index={"x": "b.safetensors", "y": "a.safetensors"},
    )

    assert loaded(tmp_path, {"x": right, "y": other})


def test_a_tensor_that_is_not_where_the_index_says_is_an_error(tmp_path):
    shards = {"a.safetensors": {"x": raw("U8", 1)}, "b.safetensors": {"y": raw("U8", 1)}}
    write_sharded(tmp_path, shards, index={"x": "b.safetensors", "y": "b.safetensors", "z": "a.safetensors"})

    with pytest.raises(CheckpointError, match=r"index.json: 2 tensors are not .* 'x' \(not in b.safetensors\), 'z'"):
        open_index(tmp_path)


def test_a_tensor_that_the_index_forgot_is_an_error(tmp_path):
    write_sharded(tmp_path, {"a.safetensors": {"x": raw("U8", 1), "lost": raw("U8", 1)}}, index={"x": "a.safetensors"})

    with pytest.raises(CheckpointError, match=r"1 tensors .* not in the index: 'lost' \(in a.safetensors\)"):
        open_index(tmp_path)


@pytest.mark.parametrize(("text", "words"), [
    ("", "starts with ''"),
    ("[]", "starts with"),
    ("{", "cannot be read"),
    ('{"weight_map": {}}', "no weight_map"),
    ('{"weight_map": ["a"]}', "no weight_map"),
    ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', "'x' occurs twice"),
    ('{"weight_map": {"x": 3}}', "'x' lies in 3: not a file name"),
])  # fmt: skip
def test_a_broken_index_is_an_error_and_no_reason_to_guess(tmp_path, text, words):
    write_file(tmp_path / "model.safetensors", {"x": raw("U8", 1)})
    (tmp_path / "model.safetensors.index.json").write_text(text or " ")

    with pytest.raises(CheckpointError, match=rf"model.safetensors.index.json: .*{words}"):
        open_index(tmp_path)


# A09, A11: links and names


def hub_snapshot(cache: Path, tensors) -> Path:
    """The hub cache: a snapshot folder of relative links into blobs."""
    model = cache / "models--org--name"
    snapshot = model / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    names = list(tensors)
    shards = {shard_name(at + 1, len(names)): {name: tensors[name]} for at, name in enumerate(names)}
    write_sharded(model / "blobs", shards)
    for at, file in enumerate(sorted((model / "blobs").iterdir())):
        blob = file.rename(file.with_name(f"{at:064x}"))
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_a09_hub_snapshot_of_links_loads_and_ignores_what_is_no_shard(tmp_path):
    tensors = {"x": raw("BF16", 5), "y": raw("BF16", 6)}
    snapshot = hub_snapshot(tmp_path, tensors)
    write_file(snapshot / "adapter_model.safetensors", {"x": raw("U8", 1)})
    (snapshot / "x.safetensors.json").write_text("{}")

    assert loaded(snapshot, tensors)
    (snapshot / "model.safetensors.index.json").unlink()
    assert loaded(snapshot, tensors)


def test_a09_dangling_link_names_link_and_target(tmp_path):
    snapshot = hub_snapshot(tmp_path, {"x": raw("U8", 5), "y": raw("U8", 6)})
    link = snapshot / shard_name(2, 2)
    link.resolve().unlink()

    with pytest.raises(CheckpointError, match=rf"{link}: a link to '\.\./\.\./blobs/0+1', where nothing is"):
        open_index(snapshot)


def test_a_dangling_index_is_an_error_and_not_a_folder_without_index(tmp_path):
    write_file(tmp_path / "model.safetensors", {"x": raw("U8", 1)})
    (tmp_path / "model.safetensors.index.json").symlink_to("gone")

    with pytest.raises(CheckpointError, match="a link to 'gone', where nothing is"):
        open_index(tmp_path)


def test_links_inside_the_folder_and_to_the_folder_are_fine(tmp_path):
    tensors = {"x": raw("U8", 5)}
    write_file(tmp_path / "real" / "data" / "w.safetensors", tensors)
    (tmp_path / "real" / "model.safetensors").symlink_to("data/w.safetensors")
    (tmp_path / "current").symlink_to("real")

    assert loaded(tmp_path / "current", tensors)


@pytest.mark.parametrize("through", ["shard", "folder", "fake blobs", "blobs link"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, through):
    outside = write_file(tmp_path / "outside" / "w.safetensors", {"x": raw("U8", 5)})
    root = tmp_path / ("models--a--b/snapshots/1" if "blobs" in through else "model")
    root.mkdir(parents=True)
    name = "sub/w.safetensors" if through == "folder" else "w.safetensors"
    if through == "folder":
        (root / "sub").symlink_to("../outside")
    elif through == "blobs link":
        (root / "../../blobs").symlink_to(outside.parent)
        (root / name).symlink_to("../../blobs/w.safetensors")
    else:
        (root / name).symlink_to(outside)
    write_index(root, {"x": name})

    said, opened = watched(root)

    assert f"{root / name}: leads to {outside}, outside the model folder" in said
    assert str(outside) not in opened


@pytest.mark.parametrize("value", [
    "../other/model.safetensors", "/etc/hostname", "sub/../../x.safetensors", "", ".", "./a.safetensors",
    "a//b.safetensors", "a.safetensors/", "a\0.safetensors", "pytorch_model.bin", "config.json",
])  # fmt: skip
def test_a11_index_values_that_are_no_plain_names_are_refused_before_any_open(tmp_path, value):
    write_file(tmp_path / "model" / "ok.safetensors", {"y": raw("U8", 1)})
    write_file(tmp_path / "other" / "model.safetensors", {"x": raw("U8", 1)})
    root = write_index(tmp_path / "model", {"y": "ok.safetensors", "x": value}).parent

    said, opened = watched(root)

    assert f"tensor 'x' lies in {value!r}: " in said
    assert not [path for path in opened if path.endswith((".safetensors", ".bin", "hostname"))]


def test_a11_a_fifo_as_shard_neither_hangs_nor_is_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.safetensors")
    write_index(tmp_path, {"x": "fifo.safetensors"})

    said, opened = watched(tmp_path)

    assert "fifo.safetensors (not a regular file)" in said
    assert not [path for path in opened if path.endswith("fifo.safetensors")]


def test_a11_a_plain_sub_folder_is_allowed(tmp_path):
    tensors = {"x": raw("U8", 5)}
    write_sharded(tmp_path, {"part/one.safetensors": tensors})

    assert loaded(tmp_path, tensors)


# Folders without an index


def test_model_safetensors_alone_counts_where_there_is_no_index(tmp_path):
    tensors = {"x": raw("U8", 5)}
    write_file(tmp_path / "model.safetensors", tensors)
    write_file(tmp_path / "extra.safetensors", {"x": raw("U8", 5, seed=1)})

    assert loaded(tmp_path, tensors)


def test_without_an_index_all_shards_count_but_adapters_hidden_files_and_other_names(tmp_path):
    tensors = {"x": raw("U8", 5), "y": raw("U8", 6)}
    for at, name in enumerate(tensors):
        write_file(tmp_path / shard_name(at + 1, 2), {name: tensors[name]})
    for name in (".hidden.safetensors", "adapter_model.safetensors", "x.safetensors.bak", "consolidated.safetensors"):
        write_file(tmp_path / name, {"x": raw("U8", 5, seed=1)})

    assert loaded(tmp_path, tensors)


def test_consolidated_counts_where_it_is_all_there_is(tmp_path):
    tensors = {"x": raw("U8", 5)}
    write_file(tmp_path / "consolidated.safetensors", tensors)

    assert loaded(tmp_path, tensors)


@pytest.mark.parametrize(("present", "words"), [
    (["model-00001-of-00003", "model-00003-of-00003"], "2 of 3 shards .* missing: model-00002-of-00003.safetensors"),
    (["model-00000-of-00003", "model-00001-of-00003"], "missing: model-00002-of-00003.safetensors"),
    (["model-00001-of-00002", "model-00002-of-00002", "model-00001-of-00003"], "1 of 3 shards"),
    (["model-00001-of-00001", "model-00002-of-00001"], "2 of 1 shards .* more than the total"),
])  # fmt: skip
def test_numbered_shards_without_an_index_must_be_complete(tmp_path, present, words):
    for name in present:
        write_file(tmp_path / f"{name}.safetensors", {name: raw("U8", 1)})

    with pytest.raises(CheckpointError, match=words):
        open_index(tmp_path)


def test_a_tensor_in_two_shards_without_an_index_is_an_error(tmp_path):
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.safetensors", {"x": raw("U8", 1)})

    with pytest.raises(CheckpointError, match=r"tensor 'x' is in a.safetensors and in b.safetensors"):
        open_index(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
@pytest.mark.parametrize("named", ["folder", "file"])
def test_pickles_are_refused_with_reason_and_next_step(tmp_path, name, named):
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")

    said, opened = watched(tmp_path if named == "folder" else tmp_path / name)

    assert name in said
    assert "can run code" in said
    assert "convert it to safetensors" in said
    assert not [path for path in opened if path.endswith(name)]


@pytest.mark.parametrize(("path", "words"), [
    ("gone", "does not exist"), ("config.json", "neither a folder nor named"), ("empty", "holds no"),
    ("fifo.safetensors", "not a regular file"), ("a\0b", "cannot be looked at"),
    ("config.json/model.safetensors", "cannot be looked at"),
])  # fmt: skip
def test_a_path_that_is_no_checkpoint_says_so(tmp_path, path, words):
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")

    with pytest.raises(CheckpointError, match=words):
        open_index(tmp_path / path)


def test_the_record_is_equal_for_equal_copies_of_a_checkpoint(tmp_path):
    three_shards(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")

    assert open_index(tmp_path / "one").manifest == open_index(tmp_path / "two").manifest
