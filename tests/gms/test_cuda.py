"""What of CudaMemory can be proved without a GPU: its arithmetic, its bookkeeping and its errors.

The driver is replaced by one that records its calls and keeps count of what is open. Whether the real one does
what it is asked is for tests/gpu/test_gms_cuda.py.
"""

import enum
import os

import pytest

from modelexpress.errors import GmsError, NotAvailable
from modelexpress.gms import client
from modelexpress.gms.cuda import CudaError, CudaMemory, Properties, result_of
from modelexpress.gms.weights import publish_model
from tests.gms.service import adapter_of, serving
from tests.support.tensors import TinyModel

GRANULE = 2 * 1024 * 1024


class RecordingDriver:
    """Device 1 of a machine. Fails in the call that `fails` names, as CUDA would."""

    ordinal = 1

    def __init__(self):
        self.calls = []
        self.handles = {}
        self.reserved = {}
        self.mapped = {}
        self.contexts = ["the engine's"]
        self.found = Properties(True, 1, True)
        self.fails = None
        self.error = "CUDA_ERROR_UNKNOWN"

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if self.fails == name:
            raise CudaError(name, self.error)
        assert name in ("granularity", "uuid", "set_context", "push_context") or self.contexts[-1] == "ours", name

    def granularity(self):
        self._call("granularity")
        return GRANULE

    def uuid(self):
        self._call("uuid")
        return "0123abcd"

    def set_context(self):
        self._call("set_context")
        self.contexts[-1] = "ours"

    def push_context(self):
        self._call("push_context")
        self.contexts.append("ours")

    def pop_context(self):
        self.contexts.pop()

    def synchronize(self):
        self._call("synchronize")

    def free_nbytes(self):
        return 5 * GRANULE

    def create(self, size):
        self._call("create", size)
        return self._handle(size)

    def export_fd(self, handle):
        self._call("export_fd", handle)
        return os.memfd_create("device memory")

    def import_fd(self, fd):
        self._call("import_fd", fd)
        return self._handle(None)

    def _handle(self, size):
        handle = f"handle {len(self.calls)}"
        self.handles[handle] = size
        return handle

    def properties(self, handle):
        self._call("properties", handle)
        return self.found

    def release(self, handle):
        self._call("release", handle)
        del self.handles[handle]

    def reserve(self, size):
        self._call("reserve", size)
        address = 0x7000_0000_0000 + GRANULE * len(self.calls)
        self.reserved[address] = size
        return address

    def free_address(self, address, size):
        self._call("free_address", address, size)
        assert address not in self.mapped
        assert self.reserved.pop(address) == size

    def map(self, address, size, handle):
        self._call("map", address, size, handle)
        assert self.reserved[address] == size
        assert address not in self.mapped
        self.mapped[address] = "nothing"

    def unmap(self, address, size):
        self._call("unmap", address, size)
        assert self.reserved[address] == size
        del self.mapped[address]

    def set_access(self, address, size, *, writable):
        self._call("set_access", address, size, writable)
        self.mapped[address] = "write" if writable else "read"

    def copy(self, to, source, nbytes):
        self._call("copy", to, source, nbytes)
        inside = [at for at, size in self.reserved.items() if at <= to and to + nbytes <= at + size]
        assert [self.mapped[at] for at in inside] == ["write"]

    def named(self, name):
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def driver():
    driver = RecordingDriver()
    yield driver
    assert driver.contexts[0] == "the engine's"
    assert len(driver.contexts) == 1
    assert driver.handles == {}


@pytest.fixture
def memory(driver):
    return CudaMemory(1, driver)


@pytest.fixture
def fd(memory):
    fd = memory.allocate(100)
    yield fd
    os.close(fd)


def test_it_names_its_device(memory):
    assert memory.device == "cuda:1"
    assert memory.device_id() == "cuda:1 GPU-0123abcd"


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(1, GRANULE), (GRANULE, GRANULE), (GRANULE + 1, 2 * GRANULE), (7 * GRANULE - 1, 7 * GRANULE)],
)
def test_sizes_are_rounded_up_to_the_granularity(memory, driver, nbytes, size):
    fd = memory.allocate(nbytes)
    mapping = memory.map(fd, nbytes)
    os.close(fd)

    assert driver.named("create") == [("create", size)]
    assert driver.reserved == {mapping.address: size}
    assert mapping.nbytes == nbytes
    mapping.close()


def test_a_descriptor_is_not_inherited(fd):
    assert not os.get_inheritable(fd)


def test_too_little_memory_is_said_with_numbers(memory, driver):
    driver.fails, driver.error = "create", "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(GmsError, match=r"segment of 99,999,999 bytes does not fit in 10,485,760 bytes .* of cuda:1"):
        memory.allocate(99_999_999)


@pytest.mark.parametrize("call", ["push_context", "create", "export_fd"])
def test_an_allocation_that_fails_leaves_nothing(memory, driver, call):
    driver.fails = call
    with pytest.raises(GmsError, match=f"{call} failed: CUDA_ERROR_UNKNOWN"):
        memory.allocate(1)


def test_parts_are_copied_between_two_waits_and_unmapped(memory, driver, fd):
    memory.fill(fd, [(0x1000, 0, 10), (0x2000, GRANULE, 20), (0x3000, 5, 0)])

    (reserved,) = driver.named("reserve")
    (access,) = driver.named("set_access")
    start = access[1]
    assert reserved == ("reserve", 2 * GRANULE)
    assert access[3] is True
    at = [call[0] for call in driver.calls].index("synchronize")
    assert driver.calls[at : at + 4] == [
        ("synchronize",),
        ("copy", start, 0x1000, 10),
        ("copy", start + GRANULE, 0x2000, 20),
        ("synchronize",),
    ]
    assert driver.mapped == driver.reserved == {}


def test_nothing_to_copy(memory, driver, fd):
    memory.fill(fd, [])
    memory.fill(fd, [(0x1000, 0, 0)])
    assert driver.named("reserve") == []


@pytest.mark.parametrize("call", ["push_context", "reserve", "import_fd", "map", "set_access", "synchronize", "copy"])
def test_a_copy_that_fails_leaves_nothing_mapped(memory, driver, fd, call):
    driver.fails = call
    with pytest.raises(GmsError, match=f"{call} failed"):
        memory.fill(fd, [(0x1000, 0, 10)])
    assert driver.mapped == driver.reserved == {}


@pytest.mark.parametrize("call", ["push_context", "reserve", "import_fd", "map", "set_access"])
def test_a_mapping_that_fails_leaves_nothing(memory, driver, fd, call):
    driver.fails = call
    with pytest.raises(GmsError, match=f"{call} failed"):
        memory.map(fd, 100)
    assert driver.mapped == driver.reserved == {}


def test_readers_map_for_reading_and_keep_the_address(memory, driver, fd):
    mapping = memory.map(fd, 100)
    address = mapping.address
    assert driver.mapped == {address: "read"}

    mapping.release()
    assert driver.mapped == {}
    assert driver.reserved == {address: GRANULE}
    mapping.release()

    mapping.restore(fd)
    assert driver.mapped == {address: "read"}
    assert mapping.address == address

    mapping.close()
    mapping.close()
    assert driver.mapped == driver.reserved == {}
    with pytest.raises(GmsError, match="closed"):
        mapping.restore(fd)


def test_a_writer_maps_for_writing_until_it_freezes(memory, driver, fd):
    mapping = memory.map(fd, 100, writable=True)
    assert driver.mapped == {mapping.address: "write"}

    mapping.freeze(fd)

    assert driver.mapped == {mapping.address: "read"}
    names = [call[0] for call in driver.calls]
    assert names[-2:] == ["synchronize", "set_access"]  # kernels that still write come first
    mapping.close()


@pytest.mark.parametrize("call", ["push_context", "synchronize", "set_access"])
def test_a_mapping_that_cannot_be_frozen_is_what_it_was(memory, driver, fd, call):
    mapping = memory.map(fd, 100, writable=True)
    driver.fails = call
    with pytest.raises(GmsError, match=f"{call} failed"):
        mapping.freeze(fd)
    assert driver.mapped == {mapping.address: "write"}
    driver.fails = None
    mapping.close()


def test_the_quota_counts_what_a_segment_really_takes(memory, tmp_path):
    """A byte costs a granule of 2 MiB."""
    with (
        serving(tmp_path / "gms.sock", memory, quota_nbytes=2 * GRANULE) as path,
        client.open_session(client.Where(path, "k"), "RW", memory, wait_s=5) as staging,
    ):
        staging.add(1, [])
        staging.add(GRANULE, [])
        assert client.status(path).used_nbytes == 2 * GRANULE
        with pytest.raises(GmsError, match=r"1 bytes does not fit: 0 of the quota"):
            staging.add(1, [])
        staging.release(staging.segments[0])
        assert client.status(path).used_nbytes == GRANULE


def test_a_model_of_another_device_is_refused_by_name(memory, tmp_path):
    with serving(tmp_path / "gms.sock", memory) as path:
        staging = client.open_session(client.Where(path, "k"), "RW", memory, wait_s=5)
        options = {"kind": "layout", "label": "", "checksums": False, "threads": 1}
        with pytest.raises(NotAvailable, match=r"tensor '.*' lies on cpu, and the service keeps memory of cuda:1"):
            publish_model(staging, adapter_of(), TinyModel(), **options)


def test_kernels_end_before_their_memory_is_unmapped(memory, driver, fd):
    mapping = memory.map(fd, 100)
    mapping.release()
    names = [call[0] for call in driver.calls]
    assert names[names.index("unmap") - 1] == "synchronize"
    mapping.close()


@pytest.mark.parametrize("call", ["import_fd", "map", "set_access"])
def test_a_restore_that_fails_can_be_tried_again(memory, driver, fd, call):
    mapping = memory.map(fd, 100)
    mapping.release()
    driver.fails = call
    with pytest.raises(GmsError, match=f"{call} failed"):
        mapping.restore(fd)
    driver.fails = None

    mapping.restore(fd)
    assert driver.mapped == {mapping.address: "read"}
    mapping.close()


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (Properties(True, 1, True), True),
        (Properties(False, 1, True), False),
        (Properties(True, 0, True), False),
        (Properties(True, None, True), False),
        (Properties(True, 1, False), False),
    ],
)
def test_only_shareable_memory_of_this_device_is_accepted(memory, driver, fd, found, good):
    driver.found = found
    assert memory.is_sealed(fd, 100) is good


def test_a_descriptor_of_something_else_is_not_accepted(memory, driver, fd):
    driver.fails = "import_fd"
    assert memory.is_sealed(fd, 100) is False


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 101), (100, 1), (0, -1)])
def test_no_tensor_outside_of_the_segment(memory, fd, offset, nbytes):
    mapping = memory.map(fd, 100)
    with pytest.raises(GmsError, match="outside of a segment of 100"):
        mapping.tensor(mapping.lease(), offset, nbytes)
    mapping.close()


def test_a_thread_of_ours_is_bound_for_good(memory, driver):
    memory.bind_thread()
    assert driver.contexts == ["ours"]
    driver.contexts = ["the engine's"]


# The border to cuda-bindings


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


@pytest.mark.parametrize(
    ("answer", "value"), [((Status(0),), None), ((Status(0), 7), 7), ((Status(0), 1, 2), (1, 2)), ((Status(0), 0), 0)]
)
def test_an_answer_is_its_value(answer, value):
    assert result_of("cuMemX", answer) == value


def test_an_error_has_the_call_and_its_name():
    with pytest.raises(CudaError, match="cuMemMap failed: CUDA_ERROR_INVALID_VALUE") as caught:
        result_of("cuMemMap", (Status(1), None))
    assert caught.value.error == "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(CudaError, match="cuMemMap failed: 999"):
        result_of("cuMemMap", (999,))


def has_gpu():
    return os.path.exists("/dev/nvidiactl")


@pytest.mark.skipif(has_gpu(), reason="this machine has what the test wants missing")
def test_without_a_gpu_it_says_what_is_missing():
    with pytest.raises(GmsError, match=r"pip install 'modelexpress\[cuda\]'|cuInit"):
        CudaMemory(0)


def test_cuda_bindings_has_every_call(monkeypatch):
    """The names of the calls and types, in whichever version is installed. Nothing is called."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings: pip install '.[cuda]'")
    from modelexpress.gms import cuda

    names = {
        word for function in vars(cuda._Driver).values() if hasattr(function, "__code__")
        for word in function.__code__.co_consts if isinstance(word, str) and word.startswith("cu")
    }  # fmt: skip
    calls = {name for name in names if name.isalpha()}
    assert "cuMemCreate" in calls
    assert [name for name in calls if not hasattr(driver, name)] == []
