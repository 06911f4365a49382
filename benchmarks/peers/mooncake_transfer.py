"""Mooncake's transfer engine over TCP. Usage as of nvidia_transfer.py."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from contents import fill
from driver import serve
from mooncake.engine import TransferEngine
from transfer_memory import allocate


def main(role: str, nbytes: int, tensors: int, source: str | None) -> None:
    parameters = allocate(nbytes, tensors)
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("the engine did not start")
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in parameters.values()]
    for address, length in places:
        if engine.register_memory(address, length):
            raise SystemExit("the engine did not register the memory")
    release = f"mooncake-transfer-engine-non-cuda {version('mooncake-transfer-engine-non-cuda')}"
    if role == "source":
        fill(parameters.values())
        peer = {"host": f"127.0.0.1:{engine.get_rpc_port()}", "places": places}
        serve({}, parameters, release=release, peer=peer)
        return
    said = json.loads(Path(str(source)).read_text())
    here = [address for address, _ in places]
    there, lengths = (list(each) for each in zip(*said["places"], strict=True))

    def read() -> str:
        if engine.batch_transfer_sync_read(said["host"], here, there, lengths):
            raise SystemExit("the read failed")
        return "tcp"

    serve({"batch_transfer_sync_read": read}, parameters, release=release)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
