"""A process that loads, publishes and forks, and says what became of its children.

python -m tests.support.forking_process children CHECKPOINT REGISTRY TRANSPORT    ends when its input does
python -m tests.support.forking_process interrupted CHECKPOINT REGISTRY TRANSPORT SEED COUNT
python -m tests.support.forking_process stalled CHECKPOINT REGISTRY TRANSPORT    in the middle of a load
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import modelexpress
from modelexpress.errors import ModelExpressError

CHILD_S = 30.0


def digest_of(model: nn.Module) -> str:
    """Of names and bytes of all parameters."""
    found = hashlib.sha256()
    for name, each in sorted(model.named_parameters()):
        found.update(name.encode() + each.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def held() -> dict[str, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}


def in_child(run: Callable[[], object]) -> str:
    """How a forked child ended that ran this: its exit code, or `hangs`. What `run` raises is exit code 1."""
    pid = os.fork()
    if pid == 0:
        run()
        sys.exit(0)
    give_up = time.monotonic() + CHILD_S
    while time.monotonic() < give_up:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return "ended"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def _children(checkpoint: str, registry: str, transport: str) -> None:
    options = {"registry": registry, "transports": transport, "revision": "r", "connect_timeout_s": 5.0}
    held_here = {"loaded": modelexpress.load_checkpoint(checkpoint, publish=True, **options)}
    publication = held_here["loaded"].publication
    connection = publication._live._opened  # what it holds open; no use of the library closes it in a child

    def forget() -> None:
        nonlocal publication, connection
        publication = connection = None
        held_here.clear()
        gc.collect()

    ways = {
        "os._exit": lambda: os._exit(0),
        "sys.exit": lambda: None,
        "an exception": lambda: sys.exit("expected: a child ends with an error"),
        "withdraw": publication.withdraw,
        "everything closed": connection.close,
        "everything forgotten": forget,
    }
    print(json.dumps({"served": os.getpid()}), flush=True)
    print(json.dumps({name: in_child(run) for name, run in ways.items()}), flush=True)
    sys.stdin.read()
    publication.withdraw()


def _interrupted(checkpoint: str, registry: str, transport: str, seed: str, count: str) -> None:
    """Loads that are broken off by KeyboardInterrupt, anywhere; then one that is not, into the same module."""
    options = {"registry": registry, "transports": transport, "connect_timeout_s": 5.0}
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    first = modelexpress.load_checkpoint(checkpoint, **options)
    warm = modelexpress.load(_like(first.model), checkpoint, **options)  # libraries have started their threads
    expected, took_s, before = digest_of(first.model), warm.seconds, held()
    chance = random.Random(int(seed))
    said: dict[str, int] = {}
    for _ in range(int(count)):
        module = _like(first.model)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 1.2 * took_s))
                modelexpress.load(module, checkpoint, initialize=lambda: _like(first.model), **options)
                outcome = "loaded"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            outcome = "interrupted"
        said[outcome] = said.get(outcome, 0) + 1
        try:
            again = modelexpress.load(module, checkpoint, initialize=lambda: _like(first.model), **options)
            outcome = "right" if digest_of(again.model) == expected else "WRONG"
        except ModelExpressError as exc:
            outcome = type(exc).__name__
        said[outcome] = said.get(outcome, 0) + 1
    give_up = time.monotonic() + 10
    while any(held()[what] > before[what] for what in before) and time.monotonic() < give_up:
        time.sleep(0.1)
    if held()["task"] > before["task"]:
        faulthandler.dump_traceback()  # whose thread it is
    print(json.dumps({"said": said, "before": before, "after": held()}), flush=True)


def _stalled(checkpoint: str, registry: str, transport: str) -> None:
    def wait(_: int) -> None:
        print("reading", flush=True)
        time.sleep(CHILD_S)

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    modelexpress.load_checkpoint(checkpoint, registry=registry, transports=transport, progress=wait)


class _Like(nn.Module):
    def __init__(self, shapes: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, each in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(each), requires_grad=False))


def _like(model: nn.Module) -> nn.Module:
    return _Like({name: each.detach() for name, each in model.named_parameters()})


if __name__ == "__main__":
    {"children": _children, "interrupted": _interrupted, "stalled": _stalled}[sys.argv[1]](*sys.argv[2:])
