"""Bytes from shards into memory that exists, and into tensors of the consumer's own."""

import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from modelexpress.checkpoint.index import open_index
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.errors import CheckpointError, ConfigError, ManifestMismatch
from modelexpress.manifest import PIECE_NBYTES, Manifest
from modelexpress.plan import plan_checkpoint
from tests.checkpoint.destination import TORCH, assert_same, bytes_of, empty_like, load, manifest_of, untouched
from tests.support.safetensors_writer import (
    Raw,
    raw,
    shard_name,
    three_shards,
    write_file,
    write_raw,
    write_sharded,
)


def both_ways(path: Path, expected) -> None:
    """Read into memory that exists, and as an iterator; both must hold the trusted bytes."""
    into = empty_like(expected)
    index = load(path, into)
    assert_same(into, expected)
    assert_same(dict(DiskTensors(index).tensors()), expected)


def open_shards() -> list[str]:
    """Every .safetensors that this process has open or mapped."""
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [name for name in [*names, *Path("/proc/self/maps").read_text().splitlines()] if ".safetensors" in name]


# A05, A06, A07: bytes as they are


def test_a05_odd_offsets_give_exact_bytes(tmp_path):
    tensors = {"u": raw("U8", 3), "f": raw("F32", 5), "b": raw("BF16", 7), "i": raw("I64", 3)}
    path = write_file(tmp_path / "model.safetensors", tensors, header_nbytes=61 + 200)

    both_ways(tmp_path, tensors)

    assert open_index(path).shards[0].data_offset % 8 == 5


def test_a06_empty_tensors_and_scalars_keep_shape_and_dtype(tmp_path):
    shapes = [(), (0,), (0, 8), (8, 0), (3,), (1, 1)]
    tensors = {f"t{at}": raw("BF16", *shape) for at, shape in enumerate(shapes)}
    write_file(tmp_path / "model.safetensors", tensors)

    both_ways(tmp_path, tensors)


def test_a06_a_checkpoint_of_nothing_but_empty_tensors(tmp_path):
    tensors = {"none": raw("F32", 0), "void": raw("I8", 4, 0)}
    write_file(tmp_path / "model.safetensors", tensors)

    both_ways(tmp_path, tensors)


@pytest.mark.parametrize("dtype", TORCH)
def test_a07_every_dtype_keeps_its_bytes(tmp_path, dtype):
    tensors = {"w": raw(dtype, 300), "x": raw(dtype, 2, 5)}
    write_file(tmp_path / "model.safetensors", tensors)

    both_ways(tmp_path, tensors)


def test_a07_nan_payload_minus_zero_and_subnormals_survive(tmp_path):
    patterns = b"".join(value.to_bytes(4, "little") for value in (0x7FA12345, 0xFFC00001, 0x80000000, 1, 0x807FFFFF))
    tensors = {"w": Raw("F32", (5,), patterns)}
    write_file(tmp_path / "model.safetensors", tensors)

    both_ways(tmp_path, tensors)


def test_four_bit_floats_keep_their_bytes(tmp_path):
    data = random.Random(4).randbytes(8)
    write_raw(tmp_path / "model.safetensors", '{"w":{"dtype":"F4","shape":[2,8],"data_offsets":[0,8]}}', data)

    ((name, tensor),) = DiskTensors(open_index(tmp_path)).tensors()

    assert (name, tensor.dtype, tuple(tensor.shape)) == ("w", torch.float4_e2m1fn_x2, (2, 4))
    assert tensor.view(torch.uint8).numpy().tobytes() == data


# A03, A13, A16: nothing written when something is wrong


@pytest.mark.parametrize(("held", "wanted", "words"), [
    (("BF16", 256, 500), ("BF16", 256, 512), r"shape differs .*w: target \[256, 512\], source \[256, 500\]"),
    (("BF16", 512), ("BF16", 256, 512), r"target \[256, 512\], source \[512\]"),
    (("BF16", 1, 512), ("BF16", 256, 512), r"target \[256, 512\], source \[1, 512\]"),
    (("F32", 4), ("BF16", 4), "dtype differs .*w: target bfloat16, source float32"),
    (("F32", 4), ("F16", 4), "target float16, source float32"),
    (("I64", 4), ("I32", 4), "target int32, source int64"),
    (("C64", 4), ("F32", 4), "target float32, source complex64"),
    (("U8", 4), ("BOOL", 4), "target bool, source uint8"),
])  # fmt: skip
def test_a13_a16_other_shape_or_dtype_is_refused_and_nothing_written(tmp_path, held, wanted, words):
    write_file(tmp_path / "model.safetensors", {"w": raw(*held)})
    into = empty_like({"w": raw(*wanted)})

    with pytest.raises(ManifestMismatch, match=words):
        load(tmp_path, into)

    assert untouched(into.values())


def test_a03_a_short_last_shard_leaves_no_tensor_of_the_first_in_the_model(tmp_path):
    tensors = three_shards(tmp_path)
    os.truncate(tmp_path / shard_name(3, 3), 5000)
    into = empty_like(tensors)

    with pytest.raises(CheckpointError, match=f"{shard_name(3, 3)}: cut short"):
        load(tmp_path, into)

    assert untouched(into.values())


def test_read_wants_a_plan_of_this_checkpoint(tmp_path):
    write_file(tmp_path / "model.safetensors", {"w": raw("U8", 4)})
    other = Manifest((), ())

    with pytest.raises(ConfigError, match=r"not the manifest of the checkpoint"):
        DiskTensors(open_index(tmp_path)).read(plan_checkpoint(other, other))


# Files that change


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)


@pytest.mark.parametrize("change", [overwrite, truncate, replace])
def test_a17_loaded_tensors_do_not_depend_on_the_file(tmp_path, change: Callable[[Path], None]):
    tensors = {"w": raw("F32", 30_000), "x": raw("U8", 3)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    into = empty_like(tensors)
    index = load(tmp_path, into)
    owned = dict(DiskTensors(index).tensors())

    change(path)

    assert_same(into, tensors)
    assert_same(owned, tensors)


@pytest.mark.parametrize(("change", "words"), [
    (overwrite, "it was written to"), (truncate, "found 100"), (replace, "replaced by another file"),
    (Path.unlink, "missing"), (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
])  # fmt: skip
def test_a_file_that_changed_since_it_was_validated_is_refused(tmp_path, change, words):
    tensors = {"w": raw("F32", 3000)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    os.utime(path, ns=(1, 1))
    disk = DiskTensors(open_index(tmp_path))
    into = empty_like(tensors)
    change(path)

    with pytest.raises(CheckpointError, match=f"^model.safetensors: .*{words}"):
        disk.read(plan_checkpoint(disk.manifest, manifest_of(into)))
    with pytest.raises(CheckpointError, match=f"^model.safetensors: .*{words}"):
        next(disk.tensors())

    assert untouched(into.values())


def test_a_file_that_is_cut_while_it_is_read_names_both_sizes(tmp_path):
    tensors = {"a": raw("U8", PIECE_NBYTES), "b": raw("U8", PIECE_NBYTES)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    disk = DiskTensors(open_index(tmp_path), threads=1)
    into = empty_like(tensors)
    plan = plan_checkpoint(disk.manifest, manifest_of(into))
    size = path.stat().st_size

    with pytest.raises(CheckpointError, match=f"cut short .*expected bytes up to {size:,}, found {size - 7:,}"):
        disk.read(plan, arrived=lambda _: os.truncate(path, size - 7))

    assert open_shards() == []


def test_a_file_that_is_written_while_it_is_read_is_found(tmp_path):
    tensors = {"a": raw("U8", 5000)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    disk = DiskTensors(open_index(tmp_path), threads=1)
    into = empty_like(tensors)
    plan = plan_checkpoint(disk.manifest, manifest_of(into))

    with pytest.raises(CheckpointError, match=r"model.safetensors: changed since .*written to"):
        disk.read(plan, arrived=lambda _: overwrite(path))


# Reading by a plan


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_shards_arrive_whole_with_any_number_of_threads(tmp_path, threads):
    tensors = three_shards(tmp_path)
    into = empty_like(tensors)

    load(tmp_path, into, threads=threads)

    assert_same(into, tensors)
    assert open_shards() == []


def test_pieces_larger_than_16_mib_and_their_neighbours(tmp_path):
    tensors = {"a": raw("U8", 5), "big": raw("U8", 2 * PIECE_NBYTES + 3), "c": raw("BF16", 9)}
    write_file(tmp_path / "model.safetensors", tensors)
    disk, into = DiskTensors(open_index(tmp_path), threads=3), empty_like(tensors)
    arrived: list[int] = []

    disk.read(plan_checkpoint(disk.manifest, manifest_of(into)), arrived=lambda chunk: arrived.append(chunk.nbytes))

    assert_same(into, tensors)
    assert sum(arrived) == sum(len(tensor.data) for tensor in tensors.values())
    assert max(arrived) <= PIECE_NBYTES


def test_neighbours_in_one_storage_are_one_read(tmp_path):
    """Merging: 5,000 tensors that lie in one block of memory in file order are one range."""
    names = [f"t{at:05d}" for at in range(5000)]
    tensors = {name: raw("U8", 3, seed=at) for at, name in enumerate(names)}
    write_file(tmp_path / "model.safetensors", tensors)
    arena = torch.zeros(15_000, dtype=torch.uint8)
    disk = DiskTensors(open_index(tmp_path))
    plan = plan_checkpoint(disk.manifest, manifest_of(dict(zip(names, arena.split(3), strict=True))))

    disk.read(plan)

    assert [len(chunk.ranges) for chunk in plan.chunks] == [1]
    assert bytes_of(arena) == b"".join(tensors[name].data for name in names)


def test_a22_20_000_tensors_with_memory_of_their_own(tmp_path):
    """More buffers than one preadv takes, in another order than the names."""
    names = [f"t{at * 7919 % 20_000:05d}" for at in range(20_000)]
    tensors = {name: raw("U8", 256, seed=at) for at, name in enumerate(names)}
    write_file(tmp_path / "model.safetensors", tensors)

    both_ways(tmp_path, tensors)


def test_a_tie_is_written_once_by_whichever_name_is_stored(tmp_path):
    tensors = {"embed": raw("F32", 8, 4)}
    write_file(tmp_path / "model.safetensors", tensors)
    embed = torch.zeros(8, 4)
    into = {"embed": embed, "head": embed}

    load(tmp_path, into)

    assert bytes_of(into["head"]) == tensors["embed"].data


def test_the_first_failure_stops_the_other_lanes_and_is_raised(tmp_path):
    tensors = {f"t{at}": raw("U8", PIECE_NBYTES // 2) for at in range(16)}
    write_file(tmp_path / "model.safetensors", tensors)
    disk = DiskTensors(open_index(tmp_path), threads=2)
    into = empty_like(tensors)
    plan = plan_checkpoint(disk.manifest, manifest_of(into))
    arrived: list[object] = []

    def fails_then_waits(chunk: object) -> None:
        arrived.append(chunk)
        if len(arrived) == 1:
            raise ZeroDivisionError("first")
        time.sleep(0.05)

    with pytest.raises(ZeroDivisionError, match="first"):
        disk.read(plan, arrived=fails_then_waits)

    assert len(arrived) <= 3 < len(plan.chunks)
    assert open_shards() == []


# Reading tensors


def test_tensors_come_in_file_order_and_by_name(tmp_path):
    tensors = {"z": raw("U8", 4), "a": raw("BF16", 4), "m": raw("F32", 4)}
    write_file(tmp_path / "model.safetensors", tensors)
    disk = DiskTensors(open_index(tmp_path))

    assert [name for name, _ in disk.tensors()] == ["z", "a", "m"]
    assert_same(dict(disk.tensors(["m", "z", "m"])), {"m": tensors["m"], "z": tensors["z"]})
    assert list(disk.tensors([])) == []


def test_unknown_names_are_refused_at_once(tmp_path):
    write_file(tmp_path / "model.safetensors", {"w": raw("U8", 4)})

    with pytest.raises(CheckpointError, match="no tensor 'nope', 'void' in it"):
        DiskTensors(open_index(tmp_path)).tensors(["w", "void", "nope"])


def test_tensors_share_no_memory(tmp_path):
    tensors = three_shards(tmp_path)

    found = [tensor for _, tensor in DiskTensors(open_index(tmp_path)).tensors()]

    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found)


def test_an_abandoned_iterator_closes_its_file_and_ends_its_thread(tmp_path):
    tensors = {f"t{at}": raw("U8", PIECE_NBYTES) for at in range(4)}
    write_file(tmp_path / "model.safetensors", tensors)
    iterator = DiskTensors(open_index(tmp_path)).tensors()
    next(iterator)
    assert open_shards() != []

    del iterator

    assert open_shards() == []
    assert threads_named("mx-") == []


def test_a18_tensors_do_not_change_while_slow_consumers_hold_them(tmp_path):
    sizes = random.Random(18)
    tensors = {f"t{at}": raw("U8", sizes.choice((1, 100, 3000, 70_000)), seed=at) for at in range(400)}
    write_file(tmp_path / "model.safetensors", tensors)

    def slow_copy(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        time.sleep(0.005)
        return name, tensor.clone()

    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            copies = [pool.submit(slow_copy, *each) for each in DiskTensors(open_index(tmp_path)).tensors()]
            assert_same(dict(copy.result() for copy in copies), tensors)


def test_the_iterator_keeps_at_most_two_groups(tmp_path):
    """A consumer that drops each tensor needs memory for two of 48 MiB, not for ten."""
    size = 3 * PIECE_NBYTES
    write_raw(tmp_path / "model.safetensors", one_size_header(10, size))
    os.truncate(tmp_path / "model.safetensors", len(one_size_header(10, size)) + 8 + 10 * size)

    peak = measured_in_a_process(tmp_path, "for each in disk.tensors(): del each")

    assert peak < 2.6 * size


def test_reading_into_memory_needs_a_buffer_a_thread_at_most(tmp_path):
    size = 3 * PIECE_NBYTES
    write_raw(tmp_path / "model.safetensors", one_size_header(4, size))
    os.truncate(tmp_path / "model.safetensors", len(one_size_header(4, size)) + 8 + 4 * size)

    peak = measured_in_a_process(tmp_path, "disk.read(plan)")

    assert peak < 2 * 4 * 1024 * 1024 + PIECE_NBYTES // 2  # of which it uses none where the kernel has the bytes


# A19, A22


def test_a19_300_shards_with_few_descriptors(tmp_path):
    tensors = {f"t{at:03d}": raw("BF16", 50, seed=at) for at in range(300)}
    write_sharded(tmp_path, {shard_name(at + 1, 300): {name: tensors[name]} for at, name in enumerate(tensors)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        both_ways(tmp_path, tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert open_shards() == []


@pytest.mark.slow
def test_a22_one_tensor_of_3_gib(tmp_path):
    """Above what one read call returns. A sparse file with marks at both ends and across the limit."""
    size, marks = 3 << 30, (0, 2_147_479_551, 2_147_479_552, (1 << 31) - 1, 1 << 31, (3 << 30) - 1)
    path = write_raw(tmp_path / "model.safetensors", one_size_header(1, size))
    with path.open("r+b") as file:
        data_offset = file.seek(0, os.SEEK_END)
        file.truncate(data_offset + size)
        for value, at in enumerate(marks, start=1):
            os.pwrite(file.fileno(), bytes([value]), data_offset + at)
    into = torch.full((size,), 0xAA, dtype=torch.uint8)

    index = load(tmp_path, {"t0": into})
    found = [into, *(tensor for _, tensor in DiskTensors(index).tensors())]

    assert [[int(tensor[at]) for at in marks] for tensor in found] == [[1, 2, 3, 4, 5, 6]] * 2
    assert [sum(int(part.count_nonzero()) for part in tensor.split(1 << 26)) for tensor in found] == [6, 6]


MEASURE = """
import resource, sys, torch
from modelexpress.checkpoint.index import open_index
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.plan import plan_checkpoint
from tests.checkpoint.destination import manifest_of
disk = DiskTensors(open_index(sys.argv[1]), threads=2)
into = {t.name: torch.full(t.shape, 7, dtype=torch.uint8) for t in disk.manifest.tensors if "plan" in sys.argv[2]}
plan = plan_checkpoint(disk.manifest, manifest_of(into)) if into else None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
exec(sys.argv[2])
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def measured_in_a_process(folder: Path, statement: str) -> int:
    """By how many bytes `statement` raised the peak memory of a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), statement], capture_output=True, text=True, check=True, timeout=60
    )
    return int(run.stdout)


def one_size_header(count: int, nbytes: int) -> str:
    """Tensors of equal size and type, for files that are too large to hold a trusted copy of."""
    return "{" + ",".join(
        f'"t{at}":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[{at * nbytes},{(at + 1) * nbytes}]}}'
        for at in range(count)
    ) + "}"  # fmt: skip


def threads_named(prefix: str) -> list[str]:
    """The living threads of this process whose name starts so."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
