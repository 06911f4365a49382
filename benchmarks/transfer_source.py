"""A source for transfer_throughput.py: one model's memory, offered in every way that is compared, until stdin ends.

Usage: transfer_source.py NBYTES TENSORS REGISTRY_URL [--raw]. Prints one JSON line when it is ready. With `--raw` it is
offered over TCP alone, too, under the revision "tcp", and in the ways that modelexpress is measured against: a NIXL
agent, sockets, and a file in memory with a copy of it.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
import threading
from contextlib import ExitStack

import contents
import torch
from torch import nn

import modelexpress
from modelexpress.adapter import CheckpointModule
from modelexpress.memory import memory_at
from modelexpress.nixl_transport import make_agent

REVISION = "any"
TCP_REVISION = "tcp"


def allocate(nbytes: int, tensors: int) -> CheckpointModule:
    """A model of equal tensors, each with memory of its own that was touched."""
    module = CheckpointModule()
    each = nbytes // tensors // 64 * 64
    for number in range(tensors):
        memory = torch.zeros(each, dtype=torch.uint8)
        module._parameters[f"layer.{number:05}.weight"] = nn.Parameter(memory, requires_grad=False)
    return module


def digest_of(module: CheckpointModule) -> str:
    return contents.digest_of(dict(module.named_parameters()))


def places_of(module: CheckpointModule) -> list[tuple[int, int]]:
    """Address and bytes of each tensor."""
    return [(tensor.data_ptr(), tensor.numel()) for tensor in module.parameters()]


def copy_in_memory(places: list[tuple[int, int]]) -> int:
    """A descriptor of a file in memory with the tensors one after the other."""
    shared = os.memfd_create("transfer-benchmark")
    os.ftruncate(shared, sum(nbytes for _, nbytes in places))
    at = 0
    for address, nbytes in places:
        os.pwrite(shared, memory_at(address, nbytes), at)
        at += nbytes
    return shared


def answer(listener: socket.socket) -> None:
    """Each connection asks for an address and a number of bytes, 16 bytes each time, and gets them."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send, args=(connection,), daemon=True).start()


def _send(connection: socket.socket) -> None:
    with connection:
        while len(asked := connection.recv(16, socket.MSG_WAITALL)) == 16:
            connection.sendall(memory_at(*array.array("Q", asked)))


def nixl_agent_over(places: list[tuple[int, int]]) -> tuple[object, bytes]:
    """An agent of plain NIXL and its blob. It sleeps when it is idle, or it would take a core from everybody."""
    agent = make_agent(progress_thread=True)
    agent.create_backend("UCX")
    agent.register_memory([(address, nbytes, 0, "") for address, nbytes in places], "DRAM")
    return agent, agent.get_agent_metadata()


def main(nbytes: int, tensors: int, registry: str, *, raw: bool) -> None:
    model = allocate(nbytes, tensors)
    contents.fill(model.parameters())
    places = places_of(model)
    said: dict[str, object] = {"pid": os.getpid(), "places": places, "digest": digest_of(model)}
    with ExitStack() as stack:
        stack.enter_context(modelexpress.publish(model, "/nowhere", registry=registry, revision=REVISION))
        if raw:
            agent, blob = nixl_agent_over(places)
            os.environ["UCX_TLS"] = "tcp"
            tcp = {"registry": registry, "revision": TCP_REVISION, "transports": "nixl,tcp"}
            stack.enter_context(modelexpress.publish(model, "/nowhere", **tcp))
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=answer, args=(listener,), daemon=True).start()
            said |= {"shared": copy_in_memory(places), "port": listener.getsockname()[1], "blob": blob.hex()}
        print(json.dumps(said), flush=True)
        sys.stdin.read()
        if raw:
            del agent


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], raw="--raw" in sys.argv[4:])
