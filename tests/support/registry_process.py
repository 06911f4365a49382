"""A process that publishes a source, or reads from one, until it is killed. Prints one line when it holds it.

    python -m tests.support.registry_process publish|read|fork URL SOURCE_ID LEASE_S

`fork` publishes, and forks a child that outlives it: the line is the pid of the child.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from modelexpress.registry.base import SourceRecord
from modelexpress.registry.open import open_registry

TIMEOUT_S = 2.0
KEY = "a" * 64


def record_of(source_id: str, *, generation: int = 1, keys: tuple[str, ...] = (KEY,)) -> SourceRecord:
    return SourceRecord(
        source_id=source_id,
        generation=generation,
        keys=keys,
        kind="layout",
        label="test model",
        host="host",
        pid=1,
        transport="local",
        nbytes=10,
        tensors=1,
        offer_digest="",
        published_at=0.0,
    )


@contextmanager
def running(
    what: str, url: str, source_id: str, *, lease_s: float = 60.0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the line it printed. Killed at the end, if the test did not."""
    argv = [sys.executable, "-m", "tests.support.registry_process", what, url, source_id, str(lease_s)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
            process.stdout.close()


def _main(what: str, url: str, source_id: str, lease_s: str) -> None:
    registry = open_registry(url, signing_key=None, timeout_s=TIMEOUT_S, lease_ttl_s=float(lease_s))
    with closing(registry):
        if what == "read":
            [found] = registry.find(None)
            with registry.reading(found.record, lease_s=float(lease_s)):
                _stay("reading")
        record = registry.publish(record_of(source_id), b"offer")
        if what == "fork":
            child = os.fork()
            if child == 0:
                sys.stdout.close()
                os.close(1)
                time.sleep(60)
                os._exit(0)
            _stay(str(child))
        threading.Thread(target=_renew, args=(registry, record, float(lease_s) / 3), daemon=True).start()
        _stay("published")


def _renew(registry, record, every_s):
    while True:
        time.sleep(every_s)
        registry.renew(record, b"offer")


def _stay(line: str) -> None:
    print(line, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    _main(*sys.argv[1:])
