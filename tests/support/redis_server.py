"""A real redis-server on a free loopback port, without persistence."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

_START_S = 10.0


class RedisServer:
    """Start, stop, freeze and kill one server; `restart` keeps the port and loses everything.

    Use it as a context manager.
    """

    def __init__(self, folder: Path, *, password: str | None = None, config: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self._extra = config
        self.port = free_port()
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.url_with(self._password)

    @property
    def client(self) -> Redis:
        """A new client of the test's own. Close it."""
        return Redis.from_url(self.url, socket_timeout=5, protocol=2)

    def url_with(self, password: str | None) -> str:
        user = "" if password is None else f":{password}@"
        return f"redis://{user}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=self.folder
        )
        assert self._process.stdin is not None
        with self._process.stdin as config:
            config.write(self._config().encode())
        self._wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Still accepts connections (the kernel does), answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _config(self) -> str:
        lines = [f"port {self.port}", "bind 127.0.0.1", 'save ""', "appendonly no", "daemonize no", "loglevel warning"]
        lines += self._extra
        if self._password is not None:
            lines.append(f"requirepass {self._password}")
        return "\n".join(lines)

    def _wait(self) -> None:
        give_up = time.monotonic() + _START_S
        while True:
            try:
                with self.client as client:
                    client.ping()
                return
            except RedisError as exc:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > give_up:
                    self.stop()
                    raise RuntimeError(f"redis-server on port {self.port} did not start: {exc}") from exc
                time.sleep(0.02)


def _binary() -> str:
    binary = shutil.which("redis-server")
    if binary is None:
        raise RuntimeError(
            "no redis-server on PATH; install it (apt-get install redis-server), or pytest -m 'not redis'"
        )
    return binary


def free_port() -> int:
    """A loopback port that nobody listened on a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
