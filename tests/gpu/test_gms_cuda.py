"""CudaMemory on a GPU. It was written without one, and has not run yet. On a machine with one:

pip install -e '.[cuda,dev]' && python -m pytest -m gpu tests/gpu/test_gms_cuda.py
"""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from contextlib import closing

import pytest
import torch
from torch import nn

from modelexpress.errors import GmsError
from modelexpress.gms.archive import restore, save
from modelexpress.gms.arena import Arena
from modelexpress.gms.client import Where, drop, open_session
from modelexpress.gms.cuda import CudaMemory
from modelexpress.gms.server import GmsServer
from modelexpress.gms.weights import bind_model, contents_of, match_model, publish_model
from tests.gms.service import adapter_of, where_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]

NBYTES = 3 * 1024 * 1024 + 100
CONTENT = os.urandom(NBYTES)


@pytest.fixture
def memory():
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings: pip install '.[cuda]'")
    memory = CudaMemory(0)
    os.close(memory.allocate(1))  # the first call opens descriptors of the driver's own
    before = len(os.listdir("/proc/self/fd"))
    yield memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def fd(memory):
    fd = memory.allocate(NBYTES)
    source = ctypes.create_string_buffer(CONTENT, NBYTES)
    memory.fill(fd, [(ctypes.addressof(source), 0, NBYTES)])
    yield fd
    os.close(fd)


@pytest.fixture
def service(tmp_path, memory):
    with GmsServer(tmp_path / "gms.sock", memory, quota_nbytes=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield str(server.path)
        server.stop()
        thread.join(20)


def bytes_of(mapping):
    return bytes(mapping.tensor(mapping.lease(), 0, mapping.nbytes).cpu().numpy())


def test_bytes_of_the_host_arrive(memory, fd):
    with closing(memory.map(fd, NBYTES)) as mapping:
        assert bytes_of(mapping) == CONTENT


def test_bytes_of_the_device_arrive(memory, fd):
    """A kernel on a stream of its own still writes the source when the copy is asked for."""
    with torch.cuda.stream(torch.cuda.Stream()):
        source = torch.full((NBYTES,), 1, dtype=torch.uint8, device="cuda:0")
        for _ in range(50):
            source.add_(1)
    memory.fill(fd, [(source.data_ptr(), 0, NBYTES)])
    with closing(memory.map(fd, NBYTES)) as mapping:
        assert bytes_of(mapping) == bytes([51]) * NBYTES


def test_the_address_stays_while_the_memory_is_away(memory, fd):
    with closing(memory.map(fd, NBYTES)) as mapping:
        lease = mapping.lease()
        tensor = mapping.tensor(lease, 100, 1000)
        address = tensor.data_ptr()
        mapping.release()
        mapping.restore(fd)
        assert tensor.data_ptr() == address == mapping.address + 100
        assert bytes(tensor.cpu().numpy()) == CONTENT[100:1100]


def test_a_tensor_keeps_the_lease(memory, fd):
    with closing(memory.map(fd, NBYTES)) as mapping:
        lease = mapping.lease()
        gone = weakref.ref(lease)
        tensor = mapping.tensor(lease, 0, 10)
        del lease
        gc.collect()
        assert gone() is not None
        del tensor
        gc.collect()
        assert gone() is None


def test_the_memory_outlives_every_mapping_while_a_descriptor_is_open(memory, fd):
    memory.map(fd, NBYTES).close()
    gc.collect()
    with closing(memory.map(fd, NBYTES)) as mapping:
        assert bytes_of(mapping) == CONTENT


def test_memory_comes_back_when_the_descriptor_is_closed(memory):
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    fd = memory.allocate(256 * 1024 * 1024)
    assert torch.cuda.mem_get_info(0)[0] <= free - 256 * 1024 * 1024
    os.close(fd)
    assert torch.cuda.mem_get_info(0)[0] >= free - 8 * 1024 * 1024
    with pytest.raises(GmsError, match="does not fit in"):
        memory.allocate(2 * total)


def test_what_is_no_device_memory_is_not_accepted(memory, fd):
    assert memory.is_sealed(fd, NBYTES)
    other = os.memfd_create("host memory")
    os.ftruncate(other, NBYTES)
    assert not memory.is_sealed(other, NBYTES)
    os.close(other)


def test_what_a_writer_writes_is_in_the_segment_until_it_freezes(memory, fd):
    mapping = memory.map(fd, NBYTES, writable=True)
    tensor = mapping.tensor(mapping.lease(), 0, NBYTES)
    tensor[:5] = 7
    address = mapping.address
    mapping.freeze(fd)
    assert mapping.address == address
    assert tensor[:6].tolist() == [7] * 5 + [CONTENT[5]]
    with closing(memory.map(fd, NBYTES)) as other:
        assert bytes_of(other) == bytes([7] * 5) + CONTENT[5:]
    mapping.close()


def test_a_smaller_segment_than_was_announced_cannot_be_mapped(memory, fd):
    with pytest.raises(GmsError, match="cuMemMap failed"):
        memory.map(fd, 100 * NBYTES)


WRITING = """
import ctypes, os, sys, torch
from modelexpress.gms.cuda import CudaMemory
memory = CudaMemory(0)
fd = memory.allocate(1000)
mapping = memory.map(fd, 1000)
tensor = mapping.tensor(mapping.lease(), 0, 1000)
try:
    tensor.fill_(1)
    torch.cuda.synchronize()
except RuntimeError:
    print("faulted", flush=True)
    os._exit(0)  # the context is lost
print("written", flush=True)
"""


@pytest.mark.slow
def test_a_kernel_that_writes_faults(memory):
    """In a process of its own, which loses its context by it."""
    done = subprocess.run([sys.executable, "-c", WRITING], capture_output=True, text=True, timeout=100)
    assert done.stdout == "faulted\n", done.stderr


def test_every_method_works_from_a_thread_that_never_saw_the_device(memory):
    result = []

    def work():
        fd = memory.allocate(NBYTES)
        source = ctypes.create_string_buffer(CONTENT, NBYTES)
        memory.fill(fd, [(ctypes.addressof(source), 0, NBYTES)])
        with closing(memory.map(fd, NBYTES)) as mapping:
            result.append(bytes_of(mapping))
        os.close(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert result == [CONTENT]


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layer = nn.Linear(1000, 1000, device=device)
        self.register_buffer("scale", torch.empty(3, device=device))


def test_weights_that_land_in_the_service_are_published_where_they_are_and_imported(service, memory):
    adapter = adapter_of(lambda: Model("meta"))
    staging = open_session(where_of(service, adapter), "RW", memory, wait_s=5)
    arena = Arena(staging)
    with arena.landing():
        model = Model("cuda:0")
        model.scale.fill_(2)
    expected, address, old_scale = model.layer.weight.cpu(), model.layer.weight.data_ptr(), model.scale.data_ptr()

    options = {"kind": "layout", "label": "", "checksums": False, "threads": 1}
    publish_model(staging, adapter, model, pieces=arena.settle(), **options)

    assert model.layer.weight.data_ptr() == address
    assert model.scale.data_ptr() != old_scale
    model.scale.add_(1)  # its own memory: no fault
    imported = open_session(where_of(service, adapter), "RO", memory, wait_s=5)
    segments = imported.take_segments()
    contents = contents_of(imported.body, [each.mapping.nbytes for each in segments])
    reader = Model("meta")
    bind_model(contents, match_model(contents, adapter, reader), segments)
    assert torch.equal(reader.layer.weight.cpu(), expected)
    assert torch.equal(reader.layer(torch.ones(2, 1000, device="cuda:0")), model.layer(torch.ones(2, 1000).cuda()))
    assert reader.scale.tolist() == [2, 2, 2]


def test_memory_that_kernels_still_use_is_not_given_out_again_before_they_end(service, memory):
    staging = open_session(Where(service, "k"), "RW", memory, wait_s=5)
    with staging, Arena(staging).landing():
        first = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
        address = first.data_ptr()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                first.fill_(1)
        del first
        second = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0").fill_(2)
        assert second.data_ptr() == address
        torch.cuda.synchronize()
        assert second.min().item() == 2


def test_a_service_of_device_memory_is_saved_and_restored(service, memory, tmp_path):
    source = ctypes.create_string_buffer(CONTENT, NBYTES)
    with open_session(Where(service, "k"), "RW", memory, wait_s=5) as staging:
        staging.add(NBYTES, [(ctypes.addressof(source), 0, NBYTES)])
        staging.commit("a model", b"body").close()
    folder = save(service, tmp_path / "saved", backend=memory, threads=2)
    drop(Where(service, "k"))

    restore(service, folder, backend=memory, threads=2)

    with closing(open_session(Where(service, "k"), "RO", memory, wait_s=5)) as imported:
        (segment,) = imported.take_segments()
        assert bytes_of(segment.mapping) == CONTENT
        del segment
