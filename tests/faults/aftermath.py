"""The end of a run: everybody ends the way they end in a fleet, and what is left is looked for."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing, suppress

from modelexpress.errors import ModelExpressError
from modelexpress.gms.client import Imported, Staging, Where, drop, open_session, status
from modelexpress.gms.memory import HostMemory
from tests.faults import cell
from tests.faults.outcome import LEASE_S
from tests.faults.stage import Stage

END_S = 25.0  # for a source that drains and cannot reach its registry


def tear_down(stage: Stage) -> None:
    """End everybody, the way they end in a fleet, and look at what is left."""
    outcome = stage.outcome
    for each in stage.sources:
        with suppress(BrokenPipeError):
            each.pipe.send(say="end")
    for each in stage.sources:
        outcome.codes[each.name] = each.wait(END_S)
        if each.running:
            outcome.left.append(f"{each.name} did not end within {END_S:g} s of being told to")
    if stage.group is not None:
        stage.group.lift()
    if outcome.impossible is None and stage.scenario.service != "none":
        outcome.service = _service_problem(stage)
    if stage.service is not None and stage.service.running:
        stage.service.signal(signal.SIGTERM)
        outcome.codes["service"] = stage.service.wait(10)
        if os.path.exists(stage.socket):
            outcome.left.append("the service left its socket")
    if outcome.impossible is None and stage.scenario.registry != "none":
        outcome.left += _left_in_registry(stage)
    if stage.redis is not None:
        stage.redis.stop()
    for each in (*stage.networks, stage.relay):
        if each is not None:
            each.kill()
    if stage.group is not None:
        stage.group.remove()
    outcome.left += _left_in_cell(stage)
    for each in stage.actors:
        each.kill()


def _service_problem(stage: Stage) -> str | None:
    """A service that was hit still serves, or can be started again on its socket; and holds no dead session."""
    if stage.service is None or not stage.service.running:
        stage.start_service()
    key = "0" * 64
    try:
        give_up = time.monotonic() + 5
        while (found := status(stage.socket)).sessions > 1 and time.monotonic() < give_up:
            time.sleep(0.02)
        if found.sessions > 1:
            return f"{found.sessions - 1} sessions are left"
        granted = open_session(Where(stage.socket, key), "RW", HostMemory(), wait_s=2)
        assert isinstance(granted, Staging)
        with closing(granted):
            segment = granted.add_writable(1 << 16)
            segment.tensor(0, 1 << 16).fill_(7)
            del segment
            granted.commit("probe", b"").close()
        read = open_session(Where(stage.socket, key), "RO", HostMemory(), wait_s=2)
        assert isinstance(read, Imported)
        with closing(read):
            [segment] = read.take_segments()
            if not bool((segment.tensor(0, 1 << 16) == 7).all()):
                return "what was committed comes back with other bytes"
            del segment
        drop(Where(stage.socket, key))
    except ModelExpressError as exc:
        return f"it does not serve: {type(exc).__name__}: {exc}"
    return None


def _left_in_registry(stage: Stage) -> list[str]:
    give_up = time.monotonic() + LEASE_S + 1
    try:
        with closing(stage.registry()) as registry:
            while (found := registry.find(None)) and time.monotonic() < give_up:
                time.sleep(0.05)
    except ModelExpressError as exc:
        killed = (stage.scenario.fault.kind, stage.scenario.fault.victim) == ("kill", "redis")
        return [] if killed else [f"the registry cannot be asked: {exc}"]
    left = [f"{each.record.name} is still in the registry" for each in found]
    if stage.redis is not None:
        with closing(stage.redis.client) as client:
            left += [f"{key.decode()} never ends in Redis" for key in client.keys("mx1:*") if client.pttl(key) < 0]
    else:
        left += [f"{each} is left in the registry's directory" for each in _registry_files(stage)]
    return left


def _registry_files(stage: Stage) -> list[str]:
    # A killed process may leave the file that it was writing; whoever looks around a minute later removes it.
    killed = stage.scenario.fault.kind in ("kill", "memory", "restart")
    names = os.listdir(stage.folder / "registry") if (stage.folder / "registry").exists() else []
    return [each for each in names if not (killed and each.endswith(".tmp")) and each != "filler"]


def _left_in_cell(stage: Stage) -> list[str]:
    mine = {each.pid for each in stage.actors if each.running}
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    left = [f"process {each} is left" for each in cell.processes() if each not in mine]
    left += [f"/dev/shm/{each} is left" for each in os.listdir("/dev/shm")]
    found = set(os.listdir(stage.model)) - {"filler"} if stage.model.exists() else set()
    left += [f"{each} is left beside the checkpoint" for each in sorted(found - stage.expected)]
    left += [f"{each.name} is left" for each in stage.folder.glob(".*")]
    return left
