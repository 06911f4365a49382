"""A real server and a real Engine are warmed up, made fit for capture, and serve again."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from modelexpress.engines.sglang import snapshot
from modelexpress.errors import SnapshotError
from modelexpress.gms import client
from tests.sglang.sources import config_only, keeping, new_registry
from tests.sglang.test_servers import NAMED, ours, sources_in, strategies
from tests.support.sglang_cpu.isolated import run_isolated
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.nixl, pytest.mark.timeout(600)]

TAGS = ["kv_cache", "weights"]


def held_by(pid: int) -> dict[str, Counter]:
    """What a process has, by /proc alone: how many threads of each name, what it maps, what it has open."""
    proc = Path(f"/proc/{pid}")
    threads = Counter((task / "comm").read_text().strip() for task in (proc / "task").iterdir())
    maps = re.findall(r"(?m)^\S+ \S+ \S+ \S+ \S+ +(\S.*)$", (proc / "maps").read_text())
    files = Counter(_kind(os.readlink(fd)) for fd in (proc / "fd").iterdir() if fd.is_symlink())
    return {"threads": threads, "maps": Counter(_kind(each) for each in set(maps)), "files": files}


def _kind(path: str) -> str:
    """A path without what differs from one server to the next."""
    return re.sub(r"\[\d+\]|[0-9a-f]{8,}|sglang-server-\w+", "", path)


def as_if_never_loaded(server: SglangServer, plain: SglangServer) -> dict[str, Counter]:
    """What the scheduler has beyond one that knows nothing of modelexpress, code apart."""
    (ours_,), (theirs,) = server.scheduler_pids(), plain.scheduler_pids()
    here, there = held_by(ours_), held_by(theirs)
    more = {kind: here[kind] - there[kind] for kind in here}
    more["maps"] = Counter({name: n for name, n in more["maps"].items() if ".so" not in name})
    return more


def nothing() -> dict[str, Counter]:
    return {"threads": Counter(), "maps": Counter(), "files": Counter()}


def readers_of(socket: str) -> int:
    return sum(each.readers for each in client.status(socket).keys)


def generate_in_thread(server: SglangServer, tokens: int) -> tuple[threading.Thread, list[list[int]]]:
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(server.generate(max_new_tokens=tokens)))
    thread.start()
    return thread, found


def test_a_server_is_quiesced_and_resumed(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Quiesced, its scheduler has nothing that a server without modelexpress has not, and nobody finds it."""
    registry, socket = new_registry(tmp_path_factory), str(tmp_path / "gms")
    ready = tmp_path / "ready.json"
    with (
        keeping(socket),
        SglangServer(models("llama"), "--load-format", "auto", warmup=True) as plain,
        SglangServer(models("llama"), *ours(registry, gms=socket, publish=True), env=NAMED, warmup=True) as server,
    ):
        plain.wait_ready()
        server.wait_ready()
        tokens = plain.generate()
        assert server.generate() == tokens
        assert (sources_in(registry), readers_of(socket)) == (1, 1)
        assert "async" in as_if_never_loaded(server, plain)["threads"]

        written = snapshot.quiesce(server.url, ready)

        assert written.warm_up.startswith("warmed up: 8 tokens on 1 data-parallel ranks")
        assert (written.pid, written.devices) == (server.pid, ())
        assert set(server.scheduler_pids()) < set(written.processes)
        plain.post("/release_memory_occupation", {"tags": TAGS})
        assert as_if_never_loaded(server, plain) == nothing()
        assert (sources_in(registry), readers_of(socket)) == (0, 0)

        waiting, found = generate_in_thread(server, 16)
        time.sleep(1.0)
        assert not found
        snapshot.resume(server.url, ready)
        waiting.join()

        assert found == [tokens]
        assert not ready.exists()
        assert (sources_in(registry), readers_of(socket)) == (1, 1)
        _refused_while_a_request_runs(server, tmp_path)
        bare = config_only(models("llama"), tmp_path / "bare")
        with SglangServer(bare, *ours(registry), env=NAMED) as peer:
            assert peer.wait_ready().generate() == tokens
            assert strategies(peer) == {"rdma"}


def _refused_while_a_request_runs(server: SglangServer, tmp_path: Path) -> None:
    """And the request is answered whole: SGLang would end itself if it were told to release now."""
    running, found = generate_in_thread(server, 60)
    give_up = time.monotonic() + 30
    while not server.get("/v1/loads")["loads"][0]["num_running_reqs"] and time.monotonic() < give_up:
        time.sleep(0.01)
    control = snapshot.control_of(server.url)
    with pytest.raises(SnapshotError, match="1 requests still run or wait after 0 s"):
        snapshot.wait_until_idle(control, timeout_s=0.0)
    running.join()
    assert len(found[0]) == 60
    assert not (tmp_path / "ready.json").exists()


def test_a_server_whose_generation_is_gone_does_not_resume(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The memory service died during the capture: resume says so, the file stays, and no token is made up."""
    socket, ready = str(tmp_path / "gms"), tmp_path / "ready.json"
    with SglangServer(models("llama"), "--load-format", "modelexpress", env=_gms_only(socket)) as server:
        with keeping(socket) as service:
            server.wait_ready()
            snapshot.quiesce(server.url, ready)
            os.kill(service, signal.SIGKILL)

        with pytest.raises(SnapshotError, match=r"did not generate: .*weights are lost"):
            snapshot.resume(server.url, ready)

        assert ready.exists()
        assert snapshot.read_ready(ready).state == "resumed"


def _gms_only(socket: str) -> dict[str, str]:
    return NAMED | {"MX_GMS": socket, "MX_PUBLISH": "true"}


def warm_quiesce_resume(folder: str, registry: str, ready: str) -> dict[str, object]:
    import sglang

    engine = sglang.Engine(
        model_path=folder,
        load_format="modelexpress",
        model_loader_extra_config=json.dumps({"registry": registry, "publish": True}),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        mem_fraction_static=0.5,
        max_total_tokens=4096,
        disable_overlap_schedule=True,
        sleep_on_idle=True,
    )
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    try:
        before = engine.generate(input_ids=[5, 6, 7, 8], sampling_params=sampling)["output_ids"]
        warmed = snapshot.warm_up(engine)
        held = len(snapshot.left_behind(engine))
        published = sources_in(registry)
        written = snapshot.quiesce(engine, ready)
        left, found = len(snapshot.left_behind(engine)), sources_in(registry)
        resumed = snapshot.resume(engine, ready)
        after = engine.generate(input_ids=[5, 6, 7, 8], sampling_params=sampling)["output_ids"]
        return {
            "tokens": [warmed.tokens, resumed.tokens],
            "own": written.pid == os.getpid(),
            "held": held,
            "left": left,
            "sources": [published, found, sources_in(registry)],
            "same": before == after,
        }
    finally:
        engine.shutdown()


def test_an_engine_in_this_process(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same by an object: no HTTP, and the engine's parent is the caller."""
    registry = new_registry(tmp_path_factory)

    done = run_isolated(warm_quiesce_resume, models("llama"), registry, tmp_path / "ready", env=NAMED)

    assert done.pop("held") > 0
    assert done == {"tokens": [8, 8], "own": True, "left": 0, "sources": [1, 0, 1], "same": True}
