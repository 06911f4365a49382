"""CudaMemory: device memory that outlives the process that filled it, by CUDA's virtual memory management.

Nothing here has run on a GPU yet. tests/gms/test_cuda.py proves the bookkeeping against a recording stand-in for
the driver; tests/gpu/test_gms_cuda.py is what a machine with a GPU has to prove.

CUDA has no seal. What readers get is mapped for reading only, and a kernel that writes there ends its process's
context with a fault. A writer that keeps its descriptor could map it for writing again, so a service of device
memory trusts its writers, as a service of host memory need not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from modelexpress.errors import GmsError
from modelexpress.gms.memory import Mapping, MemoryBackend
from modelexpress.memory import device_memory_at

if TYPE_CHECKING:
    import torch

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class CudaError(GmsError):
    """A call of the CUDA driver failed. `error` is CUDA's name for why."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call} failed: {error}")
        self.error = error


class Properties(NamedTuple):
    """What CUDA says about an allocation: pinned on a device, and shareable as a descriptor; or not."""

    pinned: bool
    ordinal: int | None
    shareable: bool


class CudaMemory(MemoryBackend):
    """Physical memory of one GPU, behind POSIX descriptors.

    Segments are rounded up to the device's `granularity` (2 MiB on most). A service holds the descriptor and nothing
    else: the memory lives while a descriptor or a mapping does.

    Args:
        ordinal: of the device, as this process counts them.

    Raises:
        GmsError: cuda-bindings or the NVIDIA driver is not installed, or there is no such device.
    """

    def __init__(self, ordinal: int, driver: _Driver | None = None) -> None:
        self.device = f"cuda:{ordinal}"
        self._driver = _Driver(ordinal) if driver is None else driver
        self.granularity = self._driver.granularity()

    def bind_thread(self) -> None:
        self._driver.set_context()

    def device_id(self) -> str:
        return f"{self.device} GPU-{self._driver.uuid()}"

    def allocate(self, nbytes: int) -> int:
        with self._bound():
            try:
                handle = self._driver.create(self._rounded(nbytes))
            except CudaError as exc:
                if exc.error != _OUT_OF_MEMORY:
                    raise
                free = self._driver.free_nbytes()
                raise GmsError(
                    f"a segment of {nbytes:,} bytes does not fit in {free:,} bytes of free memory of {self.device}"
                ) from exc
            try:
                fd = self._driver.export_fd(handle)
            finally:
                self._driver.release(handle)
        os.set_inheritable(fd, False)
        return fd

    def seal(self, fd: int, nbytes: int) -> None:
        """There is nothing to seal with; see the module."""

    def fill(self, fd: int, parts: Sequence[tuple[int, int, int]]) -> None:
        """Copy from host or device memory. Waits for the device before, so that the sources are final, and after.

        Raises:
            GmsError: a part ends outside of the segment as it is mapped, or the driver refused.
        """
        end = max((offset + nbytes for _, offset, nbytes in parts), default=0)
        if not end:
            return
        with self._bound(), self._mapped_for_writing(fd, self._rounded(end)) as start:
            self._driver.synchronize()
            for address, offset, nbytes in parts:
                if nbytes:
                    self._driver.copy(start + offset, address, nbytes)
            self._driver.synchronize()

    def map(self, fd: int, nbytes: int, *, writable: bool = False) -> Mapping:
        size = self._rounded(nbytes)
        with self._bound():
            address = self._driver.reserve(size)
            try:
                self.place(fd, address, size, writable=writable)
            except BaseException:
                self._driver.free_address(address, size)
                raise
        return _CudaMapping(self, address, nbytes, size)

    def is_sealed(self, fd: int, nbytes: int) -> bool:
        """Whether it is shareable memory of this device. CUDA tells no size: `map` fails where it is smaller."""
        with self._bound():
            try:
                handle = self._driver.import_fd(fd)
            except CudaError:
                return False
            try:
                return self._driver.properties(handle) == Properties(True, self._driver.ordinal, True)
            finally:
                self._driver.release(handle)

    def place(self, fd: int, address: int, size: int, *, writable: bool) -> None:
        """Map a descriptor's memory at a reserved address. Nothing stays mapped when this raises."""
        handle = self._driver.import_fd(fd)
        try:
            self._driver.map(address, size, handle)
        finally:
            self._driver.release(handle)  # the mapping keeps the memory
        try:
            self._driver.set_access(address, size, writable=writable)
        except BaseException:
            self._driver.unmap(address, size)
            raise

    def displace(self, address: int, size: int) -> None:
        """Unmap; the address stays reserved. Waits for kernels that may still read there: the driver does not."""
        with self._bound():
            self._driver.synchronize()
            self._driver.unmap(address, size)

    def restore_at(self, fd: int, address: int, size: int) -> None:
        """Map for reading at an address that was reserved before."""
        with self._bound():
            self.place(fd, address, size, writable=False)

    def protect(self, address: int, size: int) -> None:
        """Allow no more than reading from here on. Waits for kernels that still write there."""
        with self._bound():
            self._driver.synchronize()
            self._driver.set_access(address, size, writable=False)

    def free_address(self, address: int, size: int) -> None:
        """Give a reserved address range back."""
        with self._bound():
            self._driver.free_address(address, size)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """This device for the calling thread, and afterwards whichever it had: an engine may use several."""
        self._driver.push_context()
        try:
            yield
        finally:
            self._driver.pop_context()

    @contextmanager
    def _mapped_for_writing(self, fd: int, size: int) -> Iterator[int]:
        with ExitStack() as undo:
            address = self._driver.reserve(size)
            undo.callback(self._driver.free_address, address, size)
            self.place(fd, address, size, writable=True)
            undo.callback(self._driver.unmap, address, size)
            yield address


class _Lease:
    """What tensors keep, so that the mapping under them stays."""


class _CudaMapping(Mapping):
    """Read-only, once frozen at the latest: a kernel that writes here faults."""

    def __init__(self, backend: CudaMemory, address: int, nbytes: int, size: int) -> None:
        super().__init__(address, nbytes)
        self._backend = backend
        self._size = size
        self._mapped = True

    def release(self) -> None:
        if self._mapped:
            self._backend.displace(self._open_address(), self._size)
            self._mapped = False

    def restore(self, fd: int) -> None:
        address = self._open_address()
        self.release()
        self._backend.restore_at(fd, address, self._size)
        self._mapped = True

    def freeze(self, fd: int) -> None:
        self._backend.protect(self._open_address(), self._size)

    def is_as_sealed(self) -> bool:
        return True  # mapped read-only since it was sealed

    def lease(self) -> Any:  # noqa: ANN401 - the driver has no types - each kind of memory has its own
        return _Lease()

    def tensor(self, lease: Any, offset: int, nbytes: int) -> torch.Tensor:  # noqa: ANN401 - the driver has no types
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise GmsError(f"{nbytes:,} bytes at offset {offset:,} lie outside of a segment of {self.nbytes:,}")
        return device_memory_at(self._open_address() + offset, nbytes, self._backend.device, keep=lease)

    def close(self) -> None:
        if self.address:
            self.release()
            self._backend.free_address(self.address, self._size)
            self.address = 0

    def _open_address(self) -> int:
        if not self.address:
            raise GmsError("this mapping of a segment is closed")
        return self.address


class _Driver:
    """The calls of the CUDA driver for one device, one method each, and no logic: each returns or raises GmsError."""

    def __init__(self, ordinal: int) -> None:
        # Here, so that what has logic can be tested where cuda-bindings is not installed.
        try:
            from cuda.bindings import driver
        except ImportError as exc:
            raise GmsError("cuda-bindings is not installed; pip install 'modelexpress[cuda]'") from exc
        self.ordinal = ordinal
        self._cuda: Any = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        # Retained for the process's life, as torch does with the same context.
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._shareable = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._pinned = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._on_device = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE

    def uuid(self) -> str:
        return bytes(self._call("cuDeviceGetUuid", self._device).bytes).hex()

    def set_context(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def push_context(self) -> None:
        self._call("cuCtxPushCurrent", self._context)

    def pop_context(self) -> None:
        self._call("cuCtxPopCurrent")

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def free_nbytes(self) -> int:
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def granularity(self) -> int:
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(), minimum))

    def create(self, size: int) -> Any:  # noqa: ANN401 - the driver has no types - CUDA's handle
        return self._call("cuMemCreate", size, self._properties(), 0)

    def export_fd(self, handle: Any) -> int:  # noqa: ANN401 - the driver has no types
        return int(self._call("cuMemExportToShareableHandle", handle, self._shareable, 0))

    def import_fd(self, fd: int) -> Any:  # noqa: ANN401 - the driver has no types
        return self._call("cuMemImportFromShareableHandle", fd, self._shareable)

    def properties(self, handle: Any) -> Properties:  # noqa: ANN401 - the driver has no types
        found = self._call("cuMemGetAllocationPropertiesFromHandle", handle)
        ordinal = int(found.location.id) if found.location.type == self._on_device else None
        return Properties(found.type == self._pinned, ordinal, found.requestedHandleTypes == self._shareable)

    def release(self, handle: Any) -> None:  # noqa: ANN401 - the driver has no types
        self._call("cuMemRelease", handle)

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free_address(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, handle: Any) -> None:  # noqa: ANN401 - the driver has no types
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def set_access(self, address: int, size: int, *, writable: bool) -> None:
        flags = self._cuda.CUmemAccess_flags
        access = self._cuda.CUmemAccessDesc()
        access.location = self._location()
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, size, [access], 1)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpy", to, source, nbytes)

    def _location(self) -> Any:  # noqa: ANN401 - the driver has no types
        location = self._cuda.CUmemLocation()
        location.type = self._on_device
        location.id = self.ordinal
        return location

    def _properties(self) -> Any:  # noqa: ANN401 - the driver has no types
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._pinned
        properties.location = self._location()
        properties.requestedHandleTypes = self._shareable
        return properties

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - the driver has no types
        try:
            answer = getattr(self._cuda, name)(*arguments)
        except RuntimeError as exc:  # the driver library, or a call in it, is not there: cuda-bindings 12 and 13
            raise GmsError(f"{name} cannot be called: {exc}") from exc
        return result_of(name, answer)


def result_of(call: str, answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - the driver has no types - whatever the call gives
    """What a call of cuda-bindings returned: its value, several as a tuple, or None.

    Raises:
        CudaError: its status is not success.
    """
    status, *values = answer
    if int(status) != 0:
        raise CudaError(call, getattr(status, "name", str(status)))
    return values[0] if len(values) == 1 else tuple(values) or None
