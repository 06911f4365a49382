"""A process that wants a takeover lock, until it is killed.

python -m tests.support.takeover_process take PATH         takes it, and says "held" or "not held"
python -m tests.support.takeover_process wait PATH         says "waiting", and "held" when it got it
python -m tests.support.takeover_process fork PATH         takes it and forks a child; says the child's pid
python -m tests.support.takeover_process raw_fork PATH     the same by fork(2), behind Python's back
python -m tests.support.takeover_process run PATH          takes it and runs a program; says the program's pid
python -m tests.support.takeover_process race PATH         takes it and gives it back until killed, with a witness
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from contextlib import contextmanager

from modelexpress.takeover_lock import TakeoverLock, this_process


@contextmanager
def wanting(what, path):
    """The process, which has printed its first line. Killed at the end, if the test did not."""
    argv = [sys.executable, "-m", "tests.support.takeover_process", what, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.line = process.stdout.readline().strip()
            yield process
        finally:
            process.kill()
            process.stdout.close()


def _take(path):
    lock = _taken(path)
    _stay("held" if lock.held else "not held")


def _wait(path):
    lock = TakeoverLock(path)
    lock.try_take()
    _say("waiting")
    while not lock.try_take():
        time.sleep(0.001)
    lock.write(this_process(serves="m", url="http://here"))
    _stay("held")


def _fork(path):
    lock = _taken(path)
    child = os.fork()
    if child == 0:
        assert not lock.held
        _sleep()
    _stay(str(child))


def _raw_fork(path):
    _taken(path)
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        _sleep()
    _stay(str(child))


def _run(path):
    _taken(path)
    # close_fds would hide a descriptor that may be inherited
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
    _stay(str(child.pid))


def _race(path):
    """Whoever holds the lock is the only one who can make the witness."""
    lock, witness = TakeoverLock(path), f"{path}.witness"
    _say("racing")
    while True:
        if not lock.try_take():
            continue
        lock.write(this_process(serves="m", url="http://here"))
        os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
        _say("held")
        os.unlink(witness)
        lock.release()


def _taken(path):
    lock = TakeoverLock(path)
    if lock.try_take():
        lock.write(this_process(serves="m", url="http://here"))
    return lock


def _say(line):
    print(line, flush=True)


def _stay(line):
    _say(line)
    time.sleep(60)


def _sleep():
    os.close(1)
    time.sleep(60)
    os._exit(0)


if __name__ == "__main__":
    _, name, where = sys.argv
    {"take": _take, "wait": _wait, "fork": _fork, "raw_fork": _raw_fork, "run": _run, "race": _race}[name](where)
