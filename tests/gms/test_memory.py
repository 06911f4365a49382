"""The contract of a memory back end, over every one that this machine has, and what the kernel enforces for it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from modelexpress.errors import GmsError
from modelexpress.gms import memory
from modelexpress.gms.memory import HostMemory, free_host_bytes
from modelexpress.memory import memory_at

NBYTES = 3 * mmap.PAGESIZE + 100
CONTENT = os.urandom(NBYTES)


@pytest.fixture(params=[HostMemory])
def backend(request):
    before = len(os.listdir("/proc/self/fd"))
    yield request.param()
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def segment(backend, *, sealed):
    fd = backend.allocate(NBYTES)
    try:
        source = ctypes.create_string_buffer(CONTENT, NBYTES)
        backend.fill(fd, [(ctypes.addressof(source), 0, NBYTES)])
        if sealed:
            backend.seal(fd, NBYTES)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def mapped(backend, fd):
    mapping = backend.map(fd, NBYTES)
    try:
        yield mapping
    finally:
        mapping.close()


def bytes_of(mapping):
    return bytes(memory_at(mapping.address, NBYTES))


# The contract


def test_a_filled_segment_is_mapped_with_its_bytes(backend):
    with segment(backend, sealed=True) as fd, mapped(backend, fd) as mapping:
        assert bytes_of(mapping) == CONTENT


def test_parts_go_where_they_belong(backend):
    source = ctypes.create_string_buffer(b"abcdefgh", 8)
    address = ctypes.addressof(source)
    with segment(backend, sealed=False) as fd:
        backend.fill(fd, [(address + 4, 0, 4), (address, mmap.PAGESIZE, 2), (address, 5, 0)])
        with mapped(backend, fd) as mapping:
            expected = b"efgh" + CONTENT[4 : mmap.PAGESIZE] + b"ab" + CONTENT[mmap.PAGESIZE + 2 :]
            assert bytes_of(mapping) == expected


def test_what_a_client_writes_is_its_own(backend):
    with segment(backend, sealed=True) as fd, mapped(backend, fd) as one, mapped(backend, fd) as other:
        memory_at(one.address, NBYTES)[:5] = b"mine!"

        assert bytes_of(one) == b"mine!" + CONTENT[5:]
        assert bytes_of(other) == CONTENT
        with mapped(backend, fd) as later:
            assert bytes_of(later) == CONTENT


def test_a_mapping_outlives_the_descriptor(backend):
    with segment(backend, sealed=True) as fd:
        mapping = backend.map(fd, NBYTES)

    assert bytes_of(mapping) == CONTENT
    mapping.close()


def test_a_segment_comes_back_at_the_same_address(backend):
    with segment(backend, sealed=True) as fd, mapped(backend, fd) as mapping:
        address = mapping.address
        memory_at(address, NBYTES)[:5] = b"mine!"
        mapping.release()
        with mapped(backend, fd) as other:
            assert not address <= other.address < address + NBYTES
        mapping.restore(fd)

        assert mapping.address == address
        assert bytes_of(mapping) == CONTENT


def test_what_a_writer_writes_is_in_the_segment_until_it_is_frozen(backend):
    with segment(backend, sealed=False) as fd:
        mapping = backend.map(fd, NBYTES, writable=True)
        address = mapping.address
        memory_at(address, NBYTES)[:5] = b"early"
        mapping.freeze(fd)
        memory_at(address, NBYTES)[:5] = b"late!"

        backend.seal(fd, NBYTES)
        assert mapping.address == address
        assert bytes_of(mapping) == b"late!" + CONTENT[5:]
        with mapped(backend, fd) as other:
            assert bytes_of(other) == b"early" + CONTENT[5:]
        mapping.close()


def test_a_closed_mapping_stays_closed(backend):
    with segment(backend, sealed=True) as fd:
        mapping = backend.map(fd, NBYTES)
        mapping.close()
        mapping.close()
        with pytest.raises(GmsError, match="closed"):
            mapping.release()
        with pytest.raises(GmsError, match="closed"):
            mapping.restore(fd)


def test_a_segment_is_sealed_once_and_for_all(backend):
    with segment(backend, sealed=False) as fd:
        assert not backend.is_sealed(fd, NBYTES)
        backend.seal(fd, NBYTES)
        backend.seal(fd, NBYTES)
        assert backend.is_sealed(fd, NBYTES)
        assert not backend.is_sealed(fd, NBYTES + 1)


def test_a_sealed_segment_takes_no_bytes(backend):
    source = ctypes.create_string_buffer(b"x", 1)
    with segment(backend, sealed=True) as fd:
        with pytest.raises(GmsError, match="cannot be written"):
            backend.fill(fd, [(ctypes.addressof(source), 0, 1)])
        with mapped(backend, fd) as mapping:
            assert bytes_of(mapping) == CONTENT


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_more_than_there_is_is_an_error_with_numbers(backend, nbytes):
    with pytest.raises(GmsError, match=rf"{nbytes:,} bytes .* [\d,]+ bytes of free"):
        backend.allocate(nbytes)


def test_no_descriptor_left_is_an_error(backend):
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    try:
        with pytest.raises(GmsError, match="Too many open files"):
            backend.allocate(NBYTES)
    finally:
        for fd in taken:
            os.close(fd)


# What the kernel enforces


def everything_that_changes_a_file(fd):
    """What each way of changing a memfd raised; None: it worked."""
    return {
        "write": raised(os.pwrite, fd, b"x", 0),
        "shrink": raised(os.ftruncate, fd, NBYTES - 1),
        "grow": raised(os.ftruncate, fd, NBYTES + 1),
        "append": raised(os.pwrite, fd, b"x", NBYTES),
        "hole": raised(punch_hole, fd),
        "shared map": raised(lambda: mmap.mmap(fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()),
        "reopen": raised(write_by_path, fd),
        "unseal": raised(fcntl.fcntl, fd, fcntl.F_ADD_SEALS, 0),
    }


def raised(function, *args):
    try:
        function(*args)
    except OSError as exc:
        return type(exc).__name__
    return None


def punch_hole(fd):
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_and_punch = 0x01 | 0x02
    if libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)):
        raise OSError(ctypes.get_errno(), "fallocate")


def write_by_path(fd):
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        os.pwrite(other, b"x", 0)
    finally:
        os.close(other)


def test_nobody_changes_a_sealed_segment():
    with segment(HostMemory(), sealed=True) as fd:
        assert set(everything_that_changes_a_file(fd).values()) == {"PermissionError"}


def test_no_other_process_changes_a_sealed_segment():
    script = "import sys; from tests.gms.test_memory import *; print(everything_that_changes_a_file(int(sys.argv[1])))"
    with segment(HostMemory(), sealed=True) as fd:
        argv = [sys.executable, "-c", script, str(fd)]
        said = subprocess.run(argv, pass_fds=[fd], capture_output=True, text=True, check=True, timeout=60).stdout
        assert said.count("'PermissionError'") == 8, said
        assert os.pread(fd, NBYTES, 0) == CONTENT


def test_a_writer_does_not_get_more_than_was_counted():
    with segment(HostMemory(), sealed=False) as fd:
        assert raised(os.ftruncate, fd, NBYTES + 1) == "PermissionError"
        assert raised(os.pwrite, fd, b"x", 10 * NBYTES) == "PermissionError"


def test_a_segment_that_somebody_can_write_is_not_sealed():
    with segment(HostMemory(), sealed=False) as fd:
        with (
            mmap.mmap(fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            pytest.raises(GmsError, match="somebody still maps it writable"),
        ):
            HostMemory().seal(fd, NBYTES)
        HostMemory().seal(fd, NBYTES)


@pytest.mark.parametrize("harm", [punch_hole, lambda fd: os.ftruncate(fd, 100), lambda fd: os.ftruncate(fd, 0)])
def test_a_segment_that_lost_memory_is_not_sealed(harm):
    """Its readers would meet a SIGBUS."""
    with segment(HostMemory(), sealed=False) as fd:
        harm(fd)
        with pytest.raises(GmsError, match=f"of {NBYTES:,} bytes are left"):
            HostMemory().seal(fd, NBYTES)


def test_a_private_mapping_does_not_keep_a_segment_from_being_sealed():
    with segment(HostMemory(), sealed=False) as fd, mapped(HostMemory(), fd) as mapping:
        memory_at(mapping.address, NBYTES)[:1] = b"x"
        HostMemory().seal(fd, NBYTES)


def test_memory_is_there_and_not_only_promised():
    nbytes = 64 * 1024 * 1024
    fd = HostMemory().allocate(nbytes)
    assert os.fstat(fd).st_blocks * 512 >= nbytes
    os.close(fd)


@pytest.mark.parametrize("setting", ["always within_size [advise] never deny force", "always [never]", None])
def test_asking_for_huge_pages_changes_nothing_else(tmp_path, monkeypatch, setting):
    """Whatever the kernel makes of it: all memory is there, of the size that was asked for, and can be sealed."""
    monkeypatch.setattr(memory, "_SHMEM_HUGE", tmp_path / "shmem_enabled")
    if setting is not None:
        (tmp_path / "shmem_enabled").write_text(f"{setting}\n")
    with segment(HostMemory(), sealed=True) as fd, mapped(HostMemory(), fd) as mapping:
        assert bytes_of(mapping) == CONTENT
        assert os.fstat(fd).st_blocks * 512 >= NBYTES


HUGE_PAGES = """
import os, sys
from pathlib import Path
from modelexpress.gms import memory
os.chdir(sys.argv[1])
Path("shmem_enabled").write_text("[advise]")
memory._SHMEM_HUGE = Path("shmem_enabled")
fd = os.open("segment", os.O_RDWR | os.O_CREAT)
memory._ask_for_huge_pages(fd, 64 << 20)
mapping = memory.HostMemory().map(fd, 64 << 20)
memory.memory_at(mapping.address, 64 << 20)[:: 1 << 12].tobytes()
huge = [line.split()[1] for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("ShmemPmd")]
print(sum(map(int, huge)), "kB")
"""


def test_the_kernel_gives_huge_pages_to_those_who_ask(tmp_path):
    """On a mount of our own, since the setting for memfds is the machine's. Readers map them without asking."""
    mount = f"mount -t tmpfs -o huge=advise,size=100m none {tmp_path}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here, or a kernel without huge pages in tmpfs")
    script = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    argv = ["unshare", "-m", "sh", "-c", script, sys.executable, HUGE_PAGES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{64 << 10} kB\n", done.stderr


def test_a_gigabyte_is_reserved_while_other_threads_run():
    """The interpreter must not stand still: the service has other sessions."""
    done = threading.Event()
    turns = 0

    def allocate():
        os.close(HostMemory().allocate(1 << 30))
        done.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


def test_free_memory_is_what_the_machine_can_give():
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))

    assert 0 < free_host_bytes() <= int(available.split()[1]) * 1024 * 1.2


@pytest.mark.parametrize("version", [1, 2])
def test_a_memory_cgroup_limits_what_is_free(tmp_path, monkeypatch, version):
    """Its page cache makes way, and counts as free."""
    root = tmp_path / ("memory" if version == 1 else "")
    root.mkdir(exist_ok=True)
    limit, usage, prefix = ("limit_in_bytes", "usage_in_bytes", "total_") if version == 1 else ("max", "current", "")
    (root / f"memory.{limit}").write_text("10000000\n")
    (root / f"memory.{usage}").write_text("7000000\n")
    (root / "memory.stat").write_text(f"{prefix}active_file 1000\n{prefix}inactive_file 200\nother 5\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)

    assert free_host_bytes() == 3_001_200
