"""Reads past the page cache: the same bytes in every case, and the page cache left as it was."""

import ctypes
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexpress.checkpoint import shard_reader
from modelexpress.checkpoint.files import DIRECT_NBYTES, fill_direct, open_direct, opened
from modelexpress.checkpoint.index import CheckpointIndex, Shard, open_index
from modelexpress.checkpoint.page_cache import ask_cachestat, ask_mincore, ask_nowait, cached_runs
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.checkpoint.shard_reader import Place, ShardReader
from modelexpress.errors import CheckpointError
from modelexpress.manifest import PIECE_NBYTES, Manifest
from modelexpress.memory import ask_for_huge_pages
from modelexpress.plan import plan_checkpoint
from tests.checkpoint.destination import assert_same, empty_like, load, manifest_of
from tests.support.safetensors_writer import raw, write_file

MIB = 1024 * 1024


def evict(path: Path, start: int = 0, nbytes: int | None = None) -> None:
    """Make the kernel forget the pages of a file, or of a part of it alone; skips where it does not."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if ask_cachestat(fd, 0, path.stat().st_size):
            pytest.skip("the files of this folder are never out of memory, as in tmpfs")
        if nbytes is not None:  # a page that is a part of a larger one is not forgotten alone
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(fd, start, 0)
            os.pread(fd, path.stat().st_size, start + nbytes)
    finally:
        os.close(fd)


def cached_share(path: Path) -> float | None:
    with opened(str(path), path.name) as (fd, state):
        return ask_cachestat(fd, 0, state.nbytes)


def random_file(path: Path, nbytes: int) -> bytes:
    data = random.Random(nbytes).randbytes(nbytes)
    path.write_bytes(data)
    return data


# What is in memory


@pytest.mark.parametrize("ask", [ask_cachestat, ask_mincore, ask_nowait])
def test_each_way_of_asking_tells_what_is_in_memory(tmp_path, ask):
    path = tmp_path / "file"
    random_file(path, 2 * MIB + 5)
    with opened(str(path), "file") as (fd, _):
        assert ask(fd, 0, 2 * MIB + 5) == 1
        evict(path)
        assert ask(fd, 4097, 2 * MIB + 5 - 4097) == 0


@pytest.mark.parametrize("ask", [ask_cachestat, ask_mincore])
def test_shares_are_counted_in_pages(tmp_path, ask):
    path = tmp_path / "file"
    random_file(path, 4 * MIB)
    evict(path, MIB, 3 * MIB)
    with opened(str(path), "file") as (fd, _):
        assert ask(fd, 0, 4 * MIB) == 0.25


@pytest.mark.parametrize("ask", [ask_mincore, ask_nowait])
def test_what_cannot_be_told_is_none(ask):
    reading, writing = os.pipe()
    try:
        assert ask(reading, 0, 5000) is None
    finally:
        os.close(reading)
        os.close(writing)


def test_runs_cover_the_range_and_meet_where_the_memory_ends(tmp_path):
    path = tmp_path / "file"
    random_file(path, 16 * MIB)
    evict(path, 3 * MIB, 8 * MIB)
    with opened(str(path), "file") as (fd, _):
        runs = list(cached_runs(fd, 17, 16 * MIB - 17 - 5))

    assert [(run.offset, run.nbytes, run.cached) for run in runs] == [
        (17, 3 * MIB - 17, True), (3 * MIB, 8 * MIB, False), (11 * MIB, 5 * MIB - 5, True),
    ]  # fmt: skip


# The same bytes


@pytest.mark.parametrize("cached", ["all", "none", "some", "edges"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_in_memory_makes_no_difference_to_the_bytes(tmp_path, cached, direct):
    tensors = {f"t{at}": raw("U8", nbytes, seed=at) for at, nbytes in enumerate((3, 5 * MIB + 1, 700, 20 * MIB, 9))}
    path = write_file(tmp_path / "model.safetensors", tensors)
    if cached == "none":
        evict(path)
    elif cached != "all":
        evict(path, *((6 * MIB, 5 * MIB) if cached == "some" else (MIB // 2, 24 * MIB)))
    into = empty_like(tensors)
    disk = DiskTensors(open_index(tmp_path), threads=3, direct=direct)

    disk.read(plan_checkpoint(disk.manifest, manifest_of(into)))
    found = dict(disk.tensors())

    assert_same(into, tensors)
    assert_same(found, tensors)


def test_only_reads_through_the_page_cache_fill_it(tmp_path):
    tensors = {"w": raw("U8", 9 * MIB)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    index, into = open_index(tmp_path), empty_like(tensors)
    plan = plan_checkpoint(index.manifest, manifest_of(into))
    evict(path)

    DiskTensors(index, threads=2, direct=True).read(plan)
    past = cached_share(path)
    DiskTensors(index, threads=2, direct=False).read(plan)

    assert (past, cached_share(path)) == (0, 1)


def index_of(path: Path) -> CheckpointIndex:
    """A file whose bytes are asked for as they lie."""
    with opened(str(path), path.name) as (_, state):
        return CheckpointIndex(path.parent, True, (Shard(path.name, str(path), state, 0, ""),), Manifest((), ()))


@pytest.fixture(scope="module")
def odd_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("odd") / "file"
    return path, random_file(path, 300_001)


@settings(max_examples=150, deadline=None)
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 90_000), st.integers(1, 70_000), st.integers(0, 70)), min_size=1, max_size=6
    ),
    buffer_nbytes=st.sampled_from([0, DIRECT_NBYTES, 3 * DIRECT_NBYTES, 65_536]),
    dropped=st.sampled_from([None, (), (100_000, 60_000)]),
    told=st.booleans(),
)
def test_any_places_get_the_bytes_that_a_plain_read_gives(odd_file, cuts, buffer_nbytes, dropped, told):
    """Odd offsets, lengths and addresses, gaps and none, from memory, past it, and from both."""
    path, data = odd_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reader, "_ASKED_NBYTES", 1)
        patch.setattr(shard_reader, "_STEP_NBYTES", 10_000)
        if dropped is not None:
            evict(path, *dropped)
        memory = bytearray(b"\xaa" * 1_000_000)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        places, expected, offset, at = [], bytearray(memory), 0, 0
        for gap, nbytes, skipped in cuts:
            offset, at = (offset + gap) % len(data), at + skipped
            nbytes = min(nbytes, len(data) - offset)
            places.append(Place(0, offset, nbytes, base + at))
            expected[at : at + nbytes] = data[offset : offset + nbytes]
            offset, at = (offset + nbytes) % len(data), at + nbytes
        landed: list[int] = []

        with ShardReader(index_of(path), direct=True, most_nbytes=buffer_nbytes) as reader:
            reader.read(places, landed.append if told else None)

        assert memory == expected
        assert sum(landed) == (sum(place.nbytes for place in places) if told else 0)


# File systems that refuse


def test_a_file_system_without_direct_reads_is_told_apart():
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not os.path.exists(path):
        pytest.skip("this kernel has no such file")
    with opened(path, "enabled") as (_, state):
        assert open_direct(path, "enabled", state) is None


def test_a_read_that_is_refused_is_told_apart_from_one_that_failed(tmp_path):
    path = tmp_path / "file"
    random_file(path, MIB)
    with opened(str(path), "file") as (_, state):
        fd = open_direct(str(path), "file", state)
    if fd is None:
        pytest.skip("this folder has no direct reads")
    memory = memoryview(mmap.mmap(-1, MIB))
    try:
        assert fill_direct(fd, "file", 1, memory, 5) is False  # no disk reads from byte 1 on
        with pytest.raises(CheckpointError, match=r"file: cut short .*bytes up to 1,048,577, found 1,048,576"):
            fill_direct(fd, "file", 0, memory, MIB + 1)
    finally:
        os.close(fd)


@pytest.mark.parametrize("refused_after", [0, 2])
def test_what_is_refused_is_read_through_the_page_cache(tmp_path, monkeypatch, refused_after):
    tensors = {"a": raw("U8", 9 * MIB + 3), "b": raw("U8", 12 * MIB)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    evict(path)
    asked: list[int] = []

    def refuses(fd, shown, offset, view, wanted):
        asked.append(offset)
        return len(asked) <= refused_after and fill_direct(fd, shown, offset, view, wanted)

    monkeypatch.setattr(shard_reader, "fill_direct", refuses)
    into = empty_like(tensors)

    load(tmp_path, into, threads=1)

    assert_same(into, tensors)
    assert len(asked) == refused_after + 1


def test_a_file_that_cannot_be_opened_for_direct_reads_is_read_through_the_page_cache(tmp_path, monkeypatch):
    tensors = {"a": raw("U8", 9 * MIB + 3)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    evict(path)
    monkeypatch.setattr(shard_reader, "open_direct", lambda *_: None)
    into = empty_like(tensors)

    load(tmp_path, into)

    assert_same(into, tensors)
    assert cached_share(path) == 1


def test_files_in_memory_with_holes(tmp_path):
    """tmpfs has no page for a hole, and has direct reads or none, by its release."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no tmpfs to write to")
    path = folder / f"{tmp_path.name}-{os.getpid()}"
    try:
        path.write_bytes(b"")
        os.truncate(path, 3 * MIB)
        memory = bytearray(b"\xaa" * 3 * MIB)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with ShardReader(index_of(path), direct=True, most_nbytes=MIB) as reader:
            reader.read([Place(0, 5, 2 * MIB, address)])
    finally:
        path.unlink()

    assert memory == bytes(2 * MIB) + b"\xaa" * MIB


# Files that change


def test_a_file_that_is_cut_during_direct_reads_names_both_sizes(tmp_path):
    tensors = {"a": raw("U8", PIECE_NBYTES), "b": raw("U8", PIECE_NBYTES)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    disk, into = DiskTensors(open_index(tmp_path), threads=1), empty_like(tensors)
    plan = plan_checkpoint(disk.manifest, manifest_of(into))
    size = path.stat().st_size
    evict(path)

    with pytest.raises(CheckpointError, match=f"cut short .*expected bytes up to [0-9,]+, found {size - 7:,}"):
        disk.read(plan, arrived=lambda _: os.truncate(path, size - 7))


def test_a_file_that_is_replaced_before_direct_reads_is_refused(tmp_path):
    path, other = tmp_path / "file", tmp_path / "other"
    random_file(path, MIB)
    with opened(str(path), "file") as (_, state):
        random_file(other, MIB)
        os.replace(other, path)
        with pytest.raises(CheckpointError, match=r"file: changed since .*replaced by another file"):
            open_direct(str(path), "file", state)


def test_nothing_stays_open_when_a_reader_of_a_cold_iterator_stops_early(tmp_path):
    tensors = {f"t{at}": raw("U8", PIECE_NBYTES) for at in range(5)}
    evict(write_file(tmp_path / "model.safetensors", tensors))
    iterator = DiskTensors(open_index(tmp_path)).tensors()
    name, kept = next(iterator)
    before = set(os.listdir("/proc/self/fd"))

    iterator.close()

    assert len(before) > len(os.listdir("/proc/self/fd"))
    assert not [
        each for each in os.listdir("/proc/self/fd") if ".safetensors" in os.path.realpath(f"/proc/self/fd/{each}")
    ]
    assert_same({name: kept}, {name: tensors[name]})


# Steps, and memory


def test_steps_of_a_chunk_follow_each_other_and_begin_at_0(tmp_path):
    tensors = {"a": raw("U8", PIECE_NBYTES + 77), "b": raw("U8", 5000), "c": raw("U8", 3 * MIB)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    disk, into = DiskTensors(open_index(tmp_path), threads=1), empty_like(tensors)
    plan = plan_checkpoint(disk.manifest, manifest_of(into))
    evict(path, 6 * MIB, 6 * MIB)
    seen: dict[int, list[tuple[int, int]]] = {}

    disk.read(plan, moved=lambda chunk, start, nbytes: seen.setdefault(id(chunk), []).append((start, nbytes)))

    for chunk in plan.chunks:
        steps = seen[id(chunk)]
        assert [start for start, _ in steps] == [sum(n for _, n in steps[:at]) for at in range(len(steps))]
        assert sum(nbytes for _, nbytes in steps) == chunk.nbytes


PEAK = """
import os, resource, sys, torch
from modelexpress.checkpoint.index import open_index
from modelexpress.checkpoint.reader import DiskTensors
from modelexpress.plan import plan_checkpoint
from tests.checkpoint.destination import manifest_of
disk = DiskTensors(open_index(sys.argv[1]), threads=int(sys.argv[2]))
into = {t.name: torch.full(t.shape, 7, dtype=torch.uint8) for t in disk.manifest.tensors}
plan = plan_checkpoint(disk.manifest, manifest_of(into))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
disk.read(plan)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize("threads", [2, 40])
def test_all_buffers_together_are_bounded(tmp_path, threads):
    tensors = {f"t{at}": raw("U8", 8 * MIB, seed=at) for at in range(20)}
    evict(write_file(tmp_path / "model.safetensors", tensors))

    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), str(threads)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert int(run.stdout) < min(4 * threads, 64) * MIB + 8 * MIB


def test_huge_pages_are_asked_for_under_memory_that_nobody_touched():
    fresh = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(fresh))

    assert ask_for_huge_pages(address + 100, 9 * MIB)
    assert not ask_for_huge_pages(address, 3 * MIB)
    fresh.write(bytes(16 * MIB))
    assert not ask_for_huge_pages(address + 100, 9 * MIB)
    assert not ask_for_huge_pages(torch.ones(8 * MIB, dtype=torch.uint8).data_ptr(), 8 * MIB)
