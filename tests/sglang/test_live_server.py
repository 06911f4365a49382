"""A33 to A36 on whole servers: failed and good updates by every route, memory given back, what others get meanwhile."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.sglang.sources import config_only, keeping, new_registry
from tests.sglang.test_broken_checkpoints import broken_file, changed, variant, without
from tests.sglang.test_servers import ours, reports, sources_in
from tests.support.redis_server import free_port
from tests.support.sglang_cpu.harness import Harness
from tests.support.sglang_cpu.isolated import run_isolated
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.server import HttpFailure, SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.nixl, pytest.mark.timeout(600)]

GATE = "model.layers.1.mlp.gate_proj.weight"
R1 = {"MX_REVISION": "r1", "MX_MODEL_NAME": "m"}
UPDATE = "/update_weights_from_disk"


def tokens_of(server: SglangServer) -> list[int]:
    return server.generate()


def refused(server: SglangServer, folder: Path) -> str:
    with pytest.raises(HttpFailure) as failure:
        server.post(UPDATE, {"model_path": str(folder)})
    assert failure.value.status == 400
    return failure.value.body["message"]


def pushed(server: SglangServer, folder: Path, how: str, **options: object) -> list[dict]:
    from tests.sglang.trainer import push

    wanted = {"port": free_port(), "cut": None, "weight_version": None} | options
    return run_isolated(push, server.url, folder, how, **wanted)


def found_by(bare: Path, registry: str, revision: str) -> str | None:
    """How a server that wants this revision would get its weights now."""
    return run_isolated(strategy_of, bare, registry, env={"MX_REVISION": revision, "MX_MODEL_NAME": "m"})


def strategy_of(folder: str, registry: str) -> str | None:
    harness = Harness(folder, load_format="modelexpress", model_loader_extra_config={"registry": registry})
    try:
        return harness.load().modelexpress.report.strategy
    except Exception as exc:
        return type(exc).__name__


def test_updates_are_all_or_nothing(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A33. SGLang's own loader starts two of the refused folders as if they were right, and ends with a third."""
    registry, other = new_registry(tmp_path_factory), models("llama", seed=1)
    broken = {
        GATE: variant(other, tmp_path / "shape", changed(GATE, lambda each: each[:-12])),
        "model.layers.3.": variant(other, tmp_path / "layer", without("layers.3.")),
        "bytes": broken_file(other, tmp_path / "cut", "cut"),
        "no such folder": tmp_path / "not there",
    }
    with SglangServer(models("llama"), *ours(registry, publish=True, publish_when="ready"), env=R1) as server:
        server.wait_ready()
        first, checksums = tokens_of(server), server.checksums()
        for named, folder in broken.items():
            assert named in refused(server, folder)
            assert (tokens_of(server), server.checksums(), sources_in(registry)) == (first, checksums, 1)
        for how in ("tensor", "distributed"):
            begun, given, ended = pushed(server, other, how, cut=GATE)
            assert begun["success"], begun
            assert not given["success"], given
            assert GATE in given["message"]
            assert ended["success"], ended
            assert (tokens_of(server), server.checksums(), sources_in(registry)) == (first, checksums, 1)

        assert server.post(UPDATE, {"model_path": str(other), "weight_version": "r2"})["success"]
        second = tokens_of(server)
        assert second != first
        assert sources_in(registry) == 1
        assert [each["success"] for each in pushed(server, models("llama"), "tensor")] == [True] * 3
        assert (tokens_of(server), server.checksums()) == (first, checksums)
        assert sources_in(registry) == 0  # nobody said what these are
        assert [each["success"] for each in pushed(server, other, "distributed", weight_version="r3")] == [True] * 3
        assert tokens_of(server) == second
        assert sources_in(registry) == 1

        bare = config_only(models("llama"), tmp_path / "bare")
        with SglangServer(bare, *ours(registry), env=R1 | {"MX_REVISION": "r3"}) as reader:
            assert tokens_of(reader.wait_ready()) == second
            [report] = reports(reader)
            assert report["strategy"] == "rdma"
        with SglangServer(bare, *ours(registry), env=R1) as late:
            ended = late.run_to_exit(timeout_s=180)
            assert "r1" in ended.last_lines  # the old weights are nowhere any more
    assert sources_in(registry) == 0


def test_memory_that_was_given_back_is_right_or_answers_nothing(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A34, with weights in a memory service."""
    registry, gms = new_registry(tmp_path_factory), str(tmp_path / "gms.sock")
    tags = {"tags": ["weights"]}
    options = {"publish": True, "publish_when": "ready", "gms": gms, "strategies": ["gms", "disk"]}
    with keeping(gms) as service, SglangServer(models("llama"), *ours(registry, **options), env=R1) as server:
        server.wait_ready()
        first = tokens_of(server), server.checksums()
        for wanted in (tags, {}):
            server.post("/release_memory_occupation", wanted)
            assert sources_in(registry) == 0
            with pytest.raises(HttpFailure, match="asleep") as failure:
                server.generate()
            assert failure.value.status == 503
            assert "asleep" in refused(server, models("llama"))
            server.post("/resume_memory_occupation", wanted)
            assert (tokens_of(server), server.checksums()) == first
            assert sources_in(registry) == 1
        server.post("/release_memory_occupation", tags)
        end_and_wait(service)
        server.post("/resume_memory_occupation", tags)
        with pytest.raises(HttpFailure, match="the weights are lost") as failure:
            server.generate()
        assert failure.value.status == 503
        assert server.post(UPDATE, {"model_path": str(models("llama"))})["success"]
        assert (tokens_of(server), server.checksums()) == first


def end_and_wait(pid: int) -> None:
    import psutil

    process = psutil.Process(pid)
    process.kill()
    process.wait(10)


def test_files_are_not_read_where_a_peer_delivers_and_every_reason_is_told(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A35 and A36: the shards cannot be opened; what did not work on the way is in the report, in order."""
    registry = new_registry(tmp_path_factory)
    opened: list[str] = []
    with SglangServer(models("llama"), *ours(registry, publish=True, publish_when="ready"), env=R1) as server:
        server.wait_ready()
        folder = config_only(models("llama"), tmp_path / "pipes")
        watched = watch_shards(models("llama"), folder, opened)
        gms = {"gms": str(tmp_path / "nobody.sock"), "strategies": ["gms", "rdma", "disk"]}
        with SglangServer(folder, *ours(registry, **gms), env=R1) as reader:
            assert tokens_of(reader.wait_ready()) == tokens_of(server)
            [report] = reports(reader)
        assert len(watched) > 0
        assert opened == []

    tried = [(each["strategy"], each["outcome"]) for each in report["attempts"]]
    assert tried == [("gms", "unavailable"), ("rdma", "loaded")]
    assert "no memory service" in report["attempts"][0]["error"]
    assert report["attempts"][1]["nbytes"] == report["nbytes"] > 5_000_000


def watch_shards(model: Path, folder: Path, opened: list[str]) -> list[threading.Thread]:
    """Pipes in the place of shards: whoever opens one to read is noticed, and gets nothing."""
    import os

    def wait(path: Path) -> None:
        with path.open("wb"):
            opened.append(path.name)

    threads = []
    for shard in model.glob("*.safetensors"):
        pipe = folder / shard.name
        os.mkfifo(pipe)
        threads.append(threading.Thread(target=wait, args=(pipe,), daemon=True))
        threads[-1].start()
    for name in model.glob("*.index.json"):
        (folder / name.name).write_text(json.dumps(json.loads(name.read_text())))
    return threads


@pytest.mark.fleet
def test_two_ranks_change_together_or_not_at_all(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry, other = new_registry(tmp_path_factory), models("llama", seed=1)
    broken = variant(other, tmp_path / "layer", without("layers.3."))
    source = ours(registry, publish=True, publish_when="ready")
    with SglangServer(models("llama"), *source, tp_size=2, env=R1) as server:
        server.wait_ready()
        first, checksums = tokens_of(server), server.checksums()
        assert "model.layers.3." in refused(server, broken)
        assert (tokens_of(server), server.checksums(), sources_in(registry)) == (first, checksums, 2)
        server.post("/release_memory_occupation", {"tags": ["weights"]})
        assert sources_in(registry) == 0
        server.post("/resume_memory_occupation", {"tags": ["weights"]})
        assert (tokens_of(server), server.checksums(), sources_in(registry)) == (first, checksums, 2)
        assert server.post(UPDATE, {"model_path": str(other), "weight_version": "r2"})["success"]
        assert tokens_of(server) != first
        assert sources_in(registry) == 2
