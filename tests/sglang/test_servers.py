"""Whole servers: SGLang's own format, ours from disk, ours from a peer, and SGLang's route to us, side by side.

The marker `fleet` is for those that start many servers; `make test-sglang-fleet` runs them, for every kind of model.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from modelexpress.api import registry_of
from modelexpress.config import Config
from tests.sglang.sources import config_only, new_registry, serving
from tests.sglang.test_broken_checkpoints import variant, without
from tests.support.sglang_cpu.harness import Harness, generate
from tests.support.sglang_cpu.isolated import run_isolated
from tests.support.sglang_cpu.memory import anonymous_bytes
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.server import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.nixl, pytest.mark.timeout(900)]

NAMED = {"MX_REVISION": "r1", "MX_MODEL_NAME": "m"}
CANNOT_ANSWER = ("deepseek_v3_fp8",)
ARRIVED_NBYTES = 200_000_000
CASES = {
    "llama": ("llama", (), 1),
    "llama_tied": ("llama_tied", (), 1),
    "qwen3_moe": ("qwen3_moe", (), 1),
    "mixtral": ("mixtral", (), 1),
    "deepseek_v3": ("deepseek_v3", (), 1),
    "qwen3_fp8": ("qwen3_fp8", (), 1),
    "deepseek_v3_fp8": ("deepseek_v3_fp8", (), 1),
    "online": ("llama", ("--quantization", "fp8"), 1),
    "llama tp2": ("llama", (), 2),
    "deepseek_v3 tp2": ("deepseek_v3", (), 2),
}


def ours(registry: str, **options: object) -> list[str]:
    extra = json.dumps({"registry": registry, **options})
    return ["--load-format", "modelexpress", "--model-loader-extra-config", extra]


def native(registry: str) -> list[str]:
    backend = ["--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "modelexpress"]
    return [*backend, "--modelexpress-config", json.dumps({"url": registry})]


def reports(server: SglangServer) -> list[dict]:
    """The report of each rank, from the log."""
    lines = [line for line in server.log.splitlines() if "modelexpress loaded " in line]
    return [json.loads(line[line.index('{"strategy"') :]) for line in lines]


def strategies(server: SglangServer) -> set[str]:
    return {each["strategy"] for each in reports(server)}


def sources_in(registry: str) -> int:
    return len(labels_in(registry))


def labels_in(registry: str) -> list[str]:
    opened = registry_of(Config(registry=registry))
    try:
        return [each.record.label for each in opened.find(None)]
    finally:
        opened.close()


def answers_of(folder: str) -> list[int]:
    return generate(Harness(folder).runner())


@pytest.mark.parametrize(
    "case", [each if each == "llama" else pytest.param(each, marks=pytest.mark.fleet) for each in CASES]
)
def test_servers_of_every_way_agree(
    case: str, models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Same greedy tokens and same checksums on each rank; the peers' folders have no shards at all."""
    kind, arguments, tp_size = CASES[case]
    registry = new_registry(tmp_path_factory)
    bare = config_only(models(kind), tmp_path / "bare")
    with ExitStack() as running:

        def start(folder: Path, *more: str) -> SglangServer:
            server = SglangServer(folder, *arguments, *more, tp_size=tp_size, env=NAMED)
            return running.enter_context(server)

        auto = start(models(kind), "--load-format", "auto")
        disk = start(models(kind), *ours(registry, publish=True, publish_when="ready"))
        auto.wait_ready()
        disk.wait_ready()
        peer = start(bare, *ours(registry))
        route = start(bare, *native(registry))
        servers = (auto, disk, peer.wait_ready(), route.wait_ready())

        checksums = [each.checksums() for each in servers]
        tokens = [each.generate() for each in servers] if kind not in CANNOT_ANSWER else []

        assert checksums[1:] == [checksums[0]] * 3
        assert sorted(checksums[0]) == list(range(tp_size))
        assert tokens[1:] == tokens[:1] * 3 if tokens else kind in CANNOT_ANSWER
        assert strategies(disk) == {"disk"}
        assert strategies(peer) == strategies(route) == {"rdma"}
        assert len(reports(peer)) == tp_size
        assert not [line for line in auto.log.splitlines() if "modelexpress" in line and " INFO" in line]
        if case == "llama":
            _updated(disk, registry, models)
    assert sources_in(registry) == 0


def _updated(server: SglangServer, registry: str, models: ModelCache) -> None:
    """After a live update the server answers with the new weights, and offers them under the digest of their files."""
    [before] = labels_in(registry)
    wanted = run_isolated(answers_of, models("llama", seed=1))

    server.post("/update_weights_from_disk", {"model_path": str(models("llama", seed=1))})

    assert server.generate() == wanted
    [after] = labels_in(registry)
    assert "r1" in before
    assert "r1" not in after


@pytest.mark.fleet
def test_two_ranks_are_filled_from_one_raw_checkpoint(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the tokens of one rank."""
    registry = new_registry(tmp_path_factory)
    bare = config_only(models("llama"), tmp_path / "bare")
    with serving(models("llama"), registry, revision="r1", model_name="m"):
        one = SglangServer(models("llama"), "--load-format", "auto", "--dtype", "float32")
        two = SglangServer(bare, *ours(registry), tp_size=2, env=NAMED)
        with one, two:
            wanted = one.wait_ready().generate()
            assert two.wait_ready().generate() == wanted
            assert strategies(two) == {"rdma"}


def test_a_launch_from_a_broken_folder_ends(models: ModelCache, tmp_path: Path) -> None:
    broken = variant(models("llama"), tmp_path / "broken", without("layers.3."))

    with SglangServer(broken, "--load-format", "modelexpress") as server:
        ended = server.run_to_exit(timeout_s=120)

    assert ended.returncode != 0
    assert ended.left == ()
    assert "lacks 9 tensors" in ended.last_lines
    assert "model.layers.3.mlp.down_proj.weight" in ended.last_lines


@pytest.mark.parametrize("way", ["format", pytest.param("native", marks=pytest.mark.fleet)])
def test_adapters_work(way: str, models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> None:
    registry = new_registry(tmp_path_factory)
    lora = ["--enable-lora", "--lora-paths", f"a={models.adapter()}", "--lora-backend", "torch_native"]
    arguments = ours(registry) if way == "format" else native(registry)

    with SglangServer(models("llama"), *arguments, *lora, "--max-loras-per-batch", "2") as server:
        server.wait_ready()
        plain, adapted = server.generate(), server.generate(lora_path="a")

    assert plain == run_isolated(answers_of, models("llama"))
    assert adapted != plain


# --- sources that die


def kill_while_read(sources: list[SglangServer], reader: SglangServer, registry: str) -> None:
    """Kill the scheduler of each source when so many bytes of it have arrived; returns when all are dead."""
    by_pid = {source.scheduler_pids()[0]: source for source in sources}
    reader_pid = reader.scheduler_pids()[0]
    opened = registry_of(Config(registry=registry))
    give_up = time.monotonic() + 60
    while by_pid and time.monotonic() < give_up:
        for record in [each.record for each in opened.find(None) if each.record.pid in by_pid]:
            if not opened.readers(record):
                continue
            before = anonymous_bytes(reader_pid)
            while opened.readers(record) and anonymous_bytes(reader_pid) < before + ARRIVED_NBYTES:
                time.sleep(0.002)
            os.kill(record.pid, signal.SIGKILL)
            del by_pid[record.pid]
        time.sleep(0.002)
    opened.close()


@pytest.mark.fleet
@pytest.mark.parametrize("way", ["format", "native"])
def test_two_dying_peers_then_disk_hold_one_parameter_set(
    way: str, models: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With 1.5 GB: the most anonymous memory of the scheduler is that of a clean load."""
    registry, folder = new_registry(tmp_path_factory), models("llama_large")
    with ExitStack() as running:
        sources = [SglangServer(folder, *ours(registry, publish=True), env=NAMED) for _ in range(2)]
        for source in sources:
            running.enter_context(source)
            source.wait_ready()
        wanted, clean_peak = sources[0].generate(), sources[0].peak_anonymous_bytes[0]
        arguments = ours(registry) if way == "format" else native(registry)
        server = running.enter_context(SglangServer(folder, *arguments, env=NAMED))
        server.wait_log("Load weight begin", timeout_s=240)
        kill_while_read(sources, server, registry)
        tokens = server.wait_ready().generate()
        peak = server.peak_anonymous_bytes[0]
        [report] = reports(server)

    tried = [(each["strategy"], each["outcome"]) for each in report["attempts"] if each["outcome"] != "off"]
    print(f"{way}: peak {peak / clean_peak:.3f} x a clean load ({clean_peak / 2**20:.0f} MiB): {report['attempts']}")
    assert tried == [("rdma", "failed"), ("rdma", "failed"), ("disk", "loaded")], report
    assert tokens == wanted
    assert peak <= 1.10 * clean_peak
