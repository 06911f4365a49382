"""A source in a process of its own, to be read, killed and stopped. Holds bytes that the reader can compute."""

import mmap
import multiprocessing
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from modelexpress.host_transport import HostTransport
from modelexpress.manifest import Manifest, StorageSpec, TensorSpec
from modelexpress.offer import Offer, decode_offer
from modelexpress.tcp_transport import TcpTransport
from modelexpress.transport import Transport

ROOT = Path(__file__).parent.parent.parent

# Importing torch and NIXL takes 2 s. A server does it once, and forks a peer in 20 ms before UCX is loaded.
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["modelexpress.nixl_transport", __name__])

_START_S = 60
_ANSWER_S = 20
_FILLED_NBYTES_A_S = 20e6  # on a machine that is busy with other things


def pattern(seed: int, index: int, nbytes: int) -> np.ndarray:
    """Bytes that differ by seed, tensor and place, and are never 0."""
    words = np.arange(nbytes // 8 + 1, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64((seed << 40) + (index << 8))
    found = words.view(np.uint8)[:nbytes]
    found |= 1
    return found


def manifest_over(arrays: list[np.ndarray]) -> Manifest:
    """One storage and one uint8 tensor per array."""
    storages = tuple(StorageSpec(each.nbytes, each.ctypes.data, "cpu") for each in arrays)
    tensors = tuple(
        TensorSpec(f"t{at:06}", at, 0, (each.nbytes,), (1,), "uint8", "parameter") for at, each in enumerate(arrays)
    )
    return Manifest(storages, tensors)


class Peer:
    """One registered storage per size, filled with `pattern(seed, ...)`.

    Args:
        env: the peer's `UCX_*` variables; it has no others.
        transport: "nixl", "host" or "tcp".
    """

    def __init__(
        self, sizes: list[int], *, seed: int = 1, env: Mapping[str, str] | None = None, transport: str = "nixl"
    ) -> None:
        self._pipe, theirs = _FORKING.Pipe()
        arguments = (theirs, sizes, seed, dict(env or {}), transport)
        self.process = _FORKING.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        try:
            offer = decode_offer(self._answer(_START_S + sum(sizes) / _FILLED_NBYTES_A_S))
        except BaseException:
            self.close()
            raise
        self.endpoint, self.manifest = offer.endpoint, offer.manifest

    def tell(self, command: str) -> object:
        """`close` ends the registration, `free` unmaps the memory, `fork` makes a child that sleeps and says which;
        anything else is said back.
        """
        self._pipe.send(command)
        return self._answer(_ANSWER_S)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """When this returns, the process and its memory are gone."""
        self.process.kill()
        self.process.join(_ANSWER_S)

    def close(self) -> None:
        self.kill()
        self.process.close()
        self._pipe.close()

    def _answer(self, timeout_s: float) -> object:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the peer said nothing for {timeout_s} s")
        return self._pipe.recv()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(transport: str) -> Transport:
    if transport == "host":
        return HostTransport(lanes=1)
    if transport == "tcp":
        return TcpTransport(lanes=1, connect_timeout_s=5, listen="127.0.0.1")
    from modelexpress.nixl_transport import NixlTransport

    return NixlTransport(lanes=1, connect_timeout_s=5)


def _serve(pipe: Connection, sizes: list[int], seed: int, env: dict[str, str], transport: str) -> None:
    for name in [each for each in os.environ if each.startswith("UCX_")]:
        del os.environ[name]
    os.environ.update(env)
    maps = [mmap.mmap(-1, nbytes) for nbytes in sizes]
    arrays = [np.frombuffer(each, dtype=np.uint8) for each in maps]
    for at, each in enumerate(arrays):
        each[:] = pattern(seed, at, each.nbytes)
    manifest = manifest_over(arrays)
    registration = _open(transport).register(manifest)
    pipe.send(Offer(manifest, registration.endpoint, b"").encode())
    with suppress(EOFError):  # the test has ended
        while command := pipe.recv():
            if command == "close":
                registration.close()
            elif command == "free":
                del each
                arrays.clear()
                while maps:
                    maps.pop().close()
            elif command == "fork":
                command = _sleeping_child()
            pipe.send(command)


def _sleeping_child() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(_START_S)
        os._exit(0)
    return child
