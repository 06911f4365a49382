"""A process that answers like an SGLang server and holds real things of ours, for tests without SGLang.

    python -m tests.support.engine_process '{"dp_size": 2, "keeps": ["thread"]}'

It prints its port. At the start it has what is in "holds": a thread, a mapping, a connection to the memory service
at "gms", a file in "folder", a connection to "address". `/release_memory_occupation` lets go of all but "keeps".
`/calls` lists what was asked. "answers" is what `/generate` does, one word a request: ok, abort, empty, 500, late.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from modelexpress.thread_name import name_this_thread

SERVER_INFO = {
    "version": "0.5.23",
    "skip_server_warmup": False,
    "skip_tokenizer_init": False,
    "dp_size": 1,
    "nnodes": 1,
    "disaggregation_mode": "null",
}
LATE_S = 30.0


class Engine:
    """What the process was told, what it was asked, and what it holds."""

    def __init__(self, told: dict) -> None:
        self.told = told
        self.calls: list[list] = []
        self.answers = list(told.get("answers", []))
        self.busy = list(told.get("busy", []))
        self.held: dict[str, object] = {}
        for kind in told.get("holds", []):
            self.held[kind] = getattr(self, f"_{kind}")()

    def release(self) -> None:
        for kind in [each for each in self.held if each not in self.told.get("keeps", [])]:
            held = self.held.pop(kind)
            held.set() if isinstance(held, threading.Event) else held.close()

    def _thread(self) -> threading.Event:
        ended, named = threading.Event(), threading.Event()

        def run() -> None:
            name_this_thread("mx-renew")
            named.set()
            ended.wait()

        threading.Thread(target=run, daemon=True).start()
        named.wait()
        return ended

    def _mapping(self) -> mmap.mmap:
        fd = os.memfd_create("modelexpress")
        os.ftruncate(fd, 3 * mmap.PAGESIZE)
        try:
            return mmap.mmap(fd, 3 * mmap.PAGESIZE)
        finally:
            os.close(fd)

    def _session(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.told["gms"])
        return sock

    def _file(self):
        return open(Path(self.told["folder"], "one.record"), "wb")

    def _connection(self) -> socket.socket:
        return socket.create_connection(tuple(self.told["address"]))


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/calls":
            return self._send(200, engine.calls)
        engine.calls.append([self.path])
        if self.path == "/server_info":
            extra = {"registry": engine.told.get("registry"), "gms": engine.told.get("gms")}
            info = SERVER_INFO | {"model_loader_extra_config": json.dumps(extra)}
            return self._send(200, info | {key: engine.told[key] for key in SERVER_INFO if key in engine.told})
        if self.path == "/model_info":
            return self._send(200, {"is_generation": engine.told.get("is_generation", True)})
        if self.path == "/v1/loads":
            running = (engine.busy.pop(0) if len(engine.busy) > 1 else engine.busy[0]) if engine.busy else 0
            return self._send(200, {"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]})
        return self._send(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self.engine.calls.append([self.path, body, self.headers.get("Authorization")])
        if self.path == "/generate":
            return self._generate()
        if self.path == "/release_memory_occupation":
            self.engine.release()
        return self._send(200, None)

    def _generate(self) -> None:
        word = self.engine.answers.pop(0) if self.engine.answers else "ok"
        if word == "late":
            time.sleep(LATE_S)
        if word == "500":
            return self._send(500, {"error": "broken"})
        about: dict = {"completion_tokens": 0 if word == "empty" else 8, "finish_reason": {"type": "length"}}
        if word == "abort":
            about["finish_reason"] = {"type": "abort", "message": "was told to stop"}
        return self._send(200, {"output_ids": [1], "meta_info": about})

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def far_ends(folder: Path):
    """What the things that an engine process holds lead to, and the settings by which they are known: by their kind."""
    registry = folder / "registry"
    registry.mkdir()
    accepted: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as service, socket.create_server(("127.0.0.1", 0)) as redis:
        service.bind(str(folder / "gms"))
        service.listen()

        def accept() -> None:
            with suppress(OSError):  # the test is over
                accepted.append(service.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        host, port = redis.getsockname()
        try:
            yield {
                "session": {"gms": str(folder / "gms")},
                "file": {"folder": str(registry), "registry": f"file://{registry}"},
                "connection": {"address": [host, port], "registry": f"redis://{host}:{port}/0"},
            }
        finally:
            service.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in accepted:
                each.close()


@contextmanager
def engine(**told: object):
    """The process, with `url` of the server; killed at the end."""
    argv = [sys.executable, "-m", "tests.support.engine_process", json.dumps(told)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MX_", "CUDA_", "SGLANG_"))}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            process.url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            yield process
        finally:
            process.kill()
            process.stdout.close()


if __name__ == "__main__":
    Handler.engine = Engine(json.loads(sys.argv[1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
