"""The transfer manager of NVIDIA's package `modelexpress`, over host memory.

Usage: nvidia_transfer.py source NBYTES TENSORS, and nvidia_transfer.py target NBYTES TENSORS SOURCE_JSON: a file with
what the source said. The environment says which ways UCX may take.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from contents import fill
from driver import serve
from modelexpress.accelerators.base import AcceleratorBackend
from modelexpress.nixl_transfer import NixlTransferManager
from modelexpress.types import TensorDescriptor
from transfer_memory import allocate


class HostMemory(AcceleratorBackend):
    """What the manager asks of an accelerator, for a machine without one: nothing to select or to wait for."""

    name = "cpu"
    torch_device_type = "cpu"
    nixl_mem_type = "DRAM"

    def set_device(self, device_id: int) -> None:
        """There is one."""

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_id: int | None = None) -> None:
        """Copies are done when they return."""

    def empty_cache(self) -> None:
        """There is none."""

    def torch_device(self, device_id: int) -> torch.device:
        return torch.device("cpu")

    def is_accel_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def supports_rdma_p2p(self) -> bool:
        return True

    def supports_pool_reg(self) -> bool:
        return False

    def supports_vmm(self) -> bool:
        return False

    def supports_gds(self) -> bool:
        return False


def main(role: str, nbytes: int, tensors: int, source: str | None) -> None:
    parameters = allocate(nbytes, tensors)
    manager = NixlTransferManager(f"{role}-{os.getpid()}", 0, accelerator_backend=HostMemory())
    manager.initialize()
    release = f"modelexpress of NVIDIA {version('modelexpress')}, nixl {version('nixl')}"
    if source is None:
        fill(parameters.values())
        blob = manager.register_tensors(parameters)
        peer = {"blob": blob.hex(), "tensors": [asdict(each) for each in manager.tensor_descriptors]}
        serve({}, parameters, release=release, peer=peer)
    else:
        manager.register_tensors(parameters)
        said = json.loads(Path(source).read_text())
        there = [TensorDescriptor(**each) for each in said["tensors"]]
        name = manager.add_remote_agent(bytes.fromhex(said["blob"]))

        def receive() -> str:
            manager.receive_from_source(b"", there, timeout_seconds=120, remote_agent_name=name)
            return f"UCX_TLS={os.environ.get('NIXL_UCX_TLS', 'default')}"

        serve({"receive_from_source": receive}, parameters, release=release)
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
