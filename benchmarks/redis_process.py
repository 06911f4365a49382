"""A redis-server on loopback while a benchmark runs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Its URL. Without persistence; nothing is left of it."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("redis-server is not installed; `make redis-server` installs it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


def _wait_for(port: int, within_s: float = 10.0) -> None:
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise SystemExit(f"redis-server did not answer on port {port} within {within_s:g} s")
