"""A process that imports a generation of the memory service, and is made to sleep and to wake by signals.

    python -m tests.support.import_process SOCKET KEY STATE

SIGUSR1 lets go of memory and session, SIGUSR2 takes them back. It writes to the file STATE what it is and what its
memory holds: `awake DIGEST`, `asleep`, or `failed REASON`. It has no pipe and no terminal, so that it can be captured.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

from modelexpress.errors import ModelExpressError
from modelexpress.gms.client import Imported, Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.memory import memory_at

NAMESPACE = "tests"


def say(state: Path, text: str) -> None:
    """The whole text at once, and on disk in the order in which it was said."""
    new = state.with_suffix(".new")
    new.write_text(text)
    os.rename(new, state)


def wait_for(state: Path, text: str, timeout_s: float = 20.0) -> None:
    """Return when the process says so.

    Raises:
        TimeoutError: it says something else for so long.
    """
    give_up = time.monotonic() + timeout_s
    while (said := state.read_text() if state.exists() else "nothing") != text:
        if time.monotonic() > give_up:
            raise TimeoutError(f"the process said {said!r}, not {text!r}")
        time.sleep(0.05)


def main(socket: str, key: str, state: Path) -> None:
    imported = open_session(Where(socket, key, NAMESPACE), "RO", HostMemory(), wait_s=10.0)
    if not isinstance(imported, Imported):
        raise TypeError(f"{key} is not committed")
    segments = imported.take_segments()
    signals = {signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    while True:
        digest = hashlib.sha256()
        for each in segments:
            digest.update(memory_at(each.mapping.address, each.mapping.nbytes))
        say(state, f"awake {digest.hexdigest()}")
        while signal.sigwait(signals) != signal.SIGUSR1:
            pass
        imported.pause()
        say(state, "asleep")
        while signal.sigwait(signals) != signal.SIGUSR2:
            pass
        try:
            imported.resume()
        except ModelExpressError as exc:
            say(state, f"failed {exc}")
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
