"""A source in a process of its own. Prints one line, `PEER` and JSON, and then does what standard input says.

    python -m tests.support.nixl_peer SEED NBYTES,NBYTES,...

The memory is one storage per tensor, filled with `pattern(SEED, ...)`. Commands, one a line: `close` ends the
registration, `free` unmaps the memory. Each is answered by a line. The end of input ends the process.
"""

import base64
import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from modelexpress.manifest import Manifest, StorageSpec, TensorSpec, decode_manifest

ROOT = Path(__file__).parent.parent.parent


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
    """Starts the process, and talks to it."""

    def __init__(self, sizes: list[int], *, seed: int = 1, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nixl_peer", str(seed), ",".join(map(str, sizes))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        # A peer that hangs must not hang the test.
        self._killer = threading.Timer(100, self.process.kill)
        self._killer.start()
        try:
            told = json.loads(self._line())
        except BaseException:
            self.close()
            raise
        self.endpoint = base64.b64decode(told["endpoint"])
        self.manifest = decode_manifest(base64.b64decode(told["manifest"]))

    def tell(self, command: str) -> str:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        for line in self.process.stdout:
            if line.startswith("PEER "):
                return line.removeprefix("PEER ").strip()
        raise RuntimeError(f"the peer ended with {self.process.wait()}")

    def close(self) -> None:
        self._killer.cancel()
        self._killer.join()
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(seed: int, sizes: list[int]) -> None:
    from modelexpress.nixl_transport import NixlTransport

    maps = [mmap.mmap(-1, nbytes) for nbytes in sizes]
    arrays = [np.frombuffer(each, dtype=np.uint8) for each in maps]
    for at, each in enumerate(arrays):
        each[:] = pattern(seed, at, each.nbytes)
    transport = NixlTransport(lanes=1, connect_timeout_s=5)
    manifest = manifest_over(arrays)
    registration = transport.register(manifest)
    told = {"endpoint": registration.endpoint, "manifest": manifest.encode()}
    say(json.dumps({key: base64.b64encode(value).decode() for key, value in told.items()}))
    for line in sys.stdin:
        if line.strip() == "close":
            registration.close()
        elif line.strip() == "free":
            arrays.clear()
            for each in maps:
                each.close()
        say(line.strip())
    transport.close()


def say(text: str) -> None:
    print("PEER", text, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")])
