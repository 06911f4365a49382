"""A memory service, or a client of one that speaks the bare protocol, until it is killed or stopped.

    python -m tests.support.gms_process serve PATH QUOTA_NBYTES FRAME_TIMEOUT_S
    python -m tests.support.gms_process stage PATH KEY SEGMENTS NBYTES    allocates, and does not commit
    python -m tests.support.gms_process wait  PATH KEY REQUEST            waits for its grant, for a minute
    python -m tests.support.gms_process read  PATH KEY
    python -m tests.support.gms_process herd  PATH KEY COUNT              readers, each killed at a random point

Each prints one line when it has what it wants; `wait` also one when it has asked.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

from modelexpress.gms.memory import HostMemory
from modelexpress.gms.protocol import (
    Allocate,
    Allocated,
    Commit,
    Committed,
    Granted,
    Hello,
    Layout,
    ServerMessage,
    receive_fds,
    receive_message,
    send_message,
)
from modelexpress.gms.server import GmsServer

TIMEOUT_S = 20.0
NAMESPACE = "tests"


def soon(timeout_s=TIMEOUT_S):
    return time.monotonic() + timeout_s


@contextmanager
def running(*what):
    """The process, which has printed its first line. Killed at the end, if the test did not."""
    argv = [sys.executable, "-m", "tests.support.gms_process", *map(str, what)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.line = process.stdout.readline().strip()
            yield process
        finally:
            process.kill()
            process.stdout.close()


def connect(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(TIMEOUT_S)
    try:
        sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return sock


def ask(sock, message):
    """Send, and return the answer; None when the service hung up."""
    send_message(sock, message, deadline=soon())
    return answer(sock)


def answer(sock):
    return receive_message(sock, ServerMessage, deadline=soon())


@contextmanager
def asking(path, request, key="k", *, wait_s=0.0):
    """A session and the answer to its hello."""
    with connect(path) as sock:
        yield sock, ask(sock, Hello(request, NAMESPACE, key, wait_s))


def allocate(sock, nbytes):
    """The descriptor, or the refusal."""
    said = ask(sock, Allocate(nbytes))
    return receive_fds(sock, 1, deadline=soon())[0] if isinstance(said, Allocated) else said


def stage(sock, contents):
    for content in contents:
        fd = allocate(sock, len(content))
        os.pwrite(fd, content, 0)
        os.close(fd)


@contextmanager
def committed(path, contents, key="k", *, body=b"body", label="label"):
    """A session that staged and committed these segments, and reads them now; and the generation's number."""
    with asking(path, "RW", key, wait_s=TIMEOUT_S) as (sock, granted):
        stage(sock, contents)
        assert ask(sock, Commit(label, body)) == Committed(granted.generation)
        yield sock, granted.generation


def read(sock):
    """What a granted reader gets: the body, and the content of each segment."""
    layout = answer(sock)
    assert isinstance(layout, Layout)
    fds = receive_fds(sock, len(layout.segments), deadline=soon())
    contents = [os.pread(fd, nbytes, 0) for fd, nbytes in zip(fds, layout.segments, strict=True)]
    for fd in fds:
        os.close(fd)
    return layout.body, contents


def read_now(path, key="k"):
    """The generation, the body and the contents that a new reader gets; or the refusal."""
    with asking(path, "RO", key) as (sock, granted):
        return (granted.generation, *read(sock)) if isinstance(granted, Granted) else granted


def _serve(path, quota_nbytes, frame_timeout_s):
    server = GmsServer(
        path, HostMemory(), quota_nbytes=int(quota_nbytes) or None, frame_timeout_s=float(frame_timeout_s)
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print("serving", flush=True)
    server.serve_forever()


def _stage(path, key, segments, nbytes):
    with asking(path, "RW", key, wait_s=TIMEOUT_S) as (sock, _):
        stage(sock, [bytes(int(nbytes))] * int(segments))
        _stay("staged")


def _wait(path, key, request):
    with connect(path) as sock:
        send_message(sock, Hello(request, NAMESPACE, key, 60.0), deadline=soon())
        print("asked", flush=True)
        said = receive_message(sock, ServerMessage, deadline=soon(70))
        _stay(said.mode if isinstance(said, Granted) else said.kind)


def _read(path, key):
    with asking(path, "RO", key, wait_s=TIMEOUT_S) as (sock, _):
        read(sock)
        _stay("reading")


def _herd(path, key, count):
    chance = random.Random(1)
    print("running", flush=True)
    for _ in range(int(count)):
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                while True:
                    read_now(path, key)
            os._exit(1)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print("done", flush=True)


def _stay(line):
    print(line, flush=True)
    time.sleep(120)


if __name__ == "__main__":
    {"serve": _serve, "stage": _stage, "wait": _wait, "read": _read, "herd": _herd}[sys.argv[1]](*sys.argv[2:])
