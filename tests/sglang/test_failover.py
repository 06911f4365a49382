"""Whole servers that stand in for each other: the primary is killed while it answers, a standby goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from modelexpress.takeover_lock import Owner, look
from tests.sglang.sources import keeping
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.server import HttpFailure, ServerFailed, SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SOON_S = 120.0
LONG = 400  # tokens: a request that is still running when its server is killed
AS_USUAL = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "true"}  # other tests turn it off: some models cannot answer
T = TypeVar("T")


def soon(happened: Callable[[], T]) -> T:
    give_up = time.monotonic() + SOON_S
    while not (found := happened()):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return found


class Fleet:
    """A memory service, and servers that name the same lock."""

    def __init__(self, folder: Path, running: ExitStack, model: Path, *, tp_size: int = 1) -> None:
        self.lock = folder / "llama.lock"
        self._model = model
        self._tp_size = tp_size
        self._running = running
        self._socket = str(folder / "gms.sock")
        running.enter_context(keeping(self._socket))

    def start(self, *arguments: str, **options: object) -> SglangServer:
        given = {"gms": self._socket, "takeover_lock": str(self.lock), "publish": True, **options}
        ours = ["--load-format", "modelexpress", "--model-loader-extra-config", json.dumps(given)]
        server = SglangServer(self._model, *ours, *arguments, tp_size=self._tp_size, env=AS_USUAL)
        return self._running.enter_context(server)

    def primary(self, *arguments: str) -> SglangServer:
        server = self.start(*arguments).wait_ready()
        assert look(self.lock).owner.pid in server.scheduler_pids()
        return server

    def standby(self, *arguments: str) -> SglangServer:
        return self.start(*arguments).wait_log("stands by, asleep", timeout_s=300)

    def owner_after(self, pid: int) -> Owner:
        """Who took over from this process, when it has answered for the first time."""

        def found() -> Owner | None:
            owner = look(self.lock).owner
            return owner if owner is not None and owner.pid != pid and owner.answered_s else None

        return soon(found)


@contextmanager
def under_load(server: SglangServer) -> Iterator[list[str]]:
    """Long requests, one after the other in two threads; the list gets what became of each that failed."""
    failed: list[str] = []

    def ask() -> None:
        while not failed:
            try:
                server.generate(max_new_tokens=LONG)
            except (HttpFailure, ServerFailed) as exc:
                failed.append(str(exc).splitlines()[0])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for each in threads:
        each.start()
    try:
        time.sleep(1.0)
        assert not failed
        yield failed
    finally:
        for each in threads:
            each.join()


def refusal(server: SglangServer) -> str:
    with pytest.raises(HttpFailure) as caught:
        server.generate()
    assert caught.value.status == 503
    return str(caught.value)


def strategies(server: SglangServer) -> set[str]:
    lines = [line for line in server.log.splitlines() if "modelexpress loaded " in line]
    return {json.loads(line[line.index('{"strategy"') :])["strategy"] for line in lines}


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_one_of_two_standbys_takes_over_and_then_the_other(
    models: ModelCache, tmp_path: Path, running: ExitStack
) -> None:
    """First the scheduler is killed, then a launcher: the kernel ends the schedulers of a launcher."""
    fleet = Fleet(tmp_path, running, models("llama"))
    primary = fleet.primary()
    wanted = primary.generate()
    standbys = [fleet.standby(), fleet.standby()]
    assert strategies(primary) == {"disk"}
    assert strategies(standbys[0]) == strategies(standbys[1]) == {"gms"}
    assert all("the weights are asleep" in refusal(each) for each in standbys)

    first = look(fleet.lock).owner
    with under_load(primary) as failed:
        os.kill(first.pid, signal.SIGKILL)
        second = fleet.owner_after(first.pid)
    assert failed
    [winner] = [each for each in standbys if second.pid in each.scheduler_pids()]
    [other] = [each for each in standbys if each is not winner]
    assert second.took_over_from == first.owner
    assert second.url == winner.url
    assert winner.generate() == wanted
    assert "the weights are asleep" in refusal(other)

    with under_load(winner) as failed:
        os.kill(winner.pid, signal.SIGKILL)
        third = fleet.owner_after(second.pid)
    assert failed
    assert (third.took_over_from, third.url) == (second.owner, other.url)
    assert other.generate() == wanted
    time.sleep(2.0)  # a second watch would have taken over from the first by now
    assert look(fleet.lock).owner == third
    assert [each.log.count("stands by, asleep") for each in standbys] == [1, 1]
    assert other.log.count("took over from") == 1
    print(f"weights after {second.weights_s:.3f} s and {third.weights_s:.3f} s")


@pytest.mark.parametrize("takeovers", [0, pytest.param(1, marks=pytest.mark.fleet)])
def test_a_standby_of_weights_that_were_updated_does_not_answer_with_the_old_ones(
    takeovers: int, models: ModelCache, tmp_path: Path, running: ExitStack
) -> None:
    """Whoever serves takes the old weights out of the service, also one that took over."""
    fleet = Fleet(tmp_path, running, models("llama"))
    servers = [fleet.primary(), *(fleet.standby() for _ in range(takeovers + 1))]
    owner = look(fleet.lock).owner
    for _ in range(takeovers):
        os.kill(owner.pid, signal.SIGKILL)
        owner = fleet.owner_after(owner.pid)
    [serving] = [each for each in servers if owner.pid in each.scheduler_pids()]
    [*_, standby] = [each for each in servers[1:] if each is not serving]
    serving.post("/update_weights_from_disk", {"model_path": str(models("llama", seed=1))})

    os.kill(owner.pid, signal.SIGKILL)
    standby.wait_log("could not take over, and gave")

    assert "the weights are lost" in refusal(standby)
    assert soon(lambda: not look(fleet.lock).held)
    assert look(fleet.lock).owner is None


def test_a_server_with_a_key_sleeps_and_wakes(models: ModelCache, tmp_path: Path, running: ExitStack) -> None:
    """Both keys: the admin's alone opens the routes that a standby uses."""
    fleet = Fleet(tmp_path, running, models("llama"))
    keys = ("--api-key", "for-requests", "--admin-api-key", "for-admins")
    primary = fleet.primary()
    standby = fleet.standby(*keys)
    owner = look(fleet.lock).owner

    primary.kill()
    taken = fleet.owner_after(owner.pid)

    assert taken.pid in standby.scheduler_pids()
    assert "for-admins" not in fleet.lock.read_text()


@pytest.mark.fleet
def test_all_ranks_of_a_standby_take_over(models: ModelCache, tmp_path: Path, running: ExitStack) -> None:
    """The second rank of the primary is killed: SGLang ends the others, and the lock with the first."""
    fleet = Fleet(tmp_path, running, models("llama"), tp_size=2)
    primary = fleet.primary()
    wanted, checksums = primary.generate(), primary.checksums()
    standby = fleet.standby()
    owner = look(fleet.lock).owner

    with under_load(primary):
        primary.kill(tp_rank=1)
        fleet.owner_after(owner.pid)

    assert strategies(standby) == {"gms"}
    assert standby.generate() == wanted
    assert standby.checksums() == checksums


@pytest.mark.fleet
def test_a_gigabyte_is_taken_over(models: ModelCache, tmp_path: Path, running: ExitStack) -> None:
    """And the standby had no weights of its own meanwhile."""
    fleet = Fleet(tmp_path, running, models("llama_large"))
    primary = fleet.primary()
    wanted = primary.generate()
    standby = fleet.standby()
    nbytes = sum(each.stat().st_size for each in models("llama_large").glob("*.safetensors"))
    [own] = standby.peak_anonymous_bytes.values()
    [loaded] = primary.peak_anonymous_bytes.values()
    owner = look(fleet.lock).owner

    with under_load(primary):
        os.kill(owner.pid, signal.SIGKILL)
        taken = fleet.owner_after(owner.pid)

    print(
        f"{nbytes / 1e9:.3f} GB: weights after {taken.weights_s:.3f} s, first health check answered after "
        f"{taken.answered_s:.3f} s; most private memory {own / 1e9:.3f} GB, of the primary {loaded / 1e9:.3f} GB"
    )
    assert standby.generate() == wanted
    assert own < loaded - 0.8 * nbytes
    assert taken.weights_s < 1.0
