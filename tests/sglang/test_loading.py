"""Every kind of model by every way in: the tensors are those that SGLang's own loader makes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.sglang.sources import config_only, keeping, new_registry, serving
from tests.support.redis_server import free_port
from tests.support.sglang_cpu.harness import Harness
from tests.support.sglang_cpu.isolated import IsolatedCall, run_isolated, run_together
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.oracle import tensor_digests

pytestmark = [pytest.mark.sglang, pytest.mark.nixl]

# Name -> model kind and server arguments. "online" is quantised while it is loaded: names, types and strides change.
CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama_tied", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_fp8": ("qwen3_fp8", {}),
    "deepseek_v3_fp8": ("deepseek_v3_fp8", {}),
    "online": ("llama", {"quantization": "fp8"}),
}


def loaded_every_way(folder: str, registry: str, server_args: dict[str, object]) -> dict[str, object]:
    """What each way made of one model: digests, and the strategy that the report names."""
    harness = Harness(folder, **server_args)
    auto = tensor_digests(harness.load("auto"))
    ours = {"registry": registry}
    source = harness.load("modelexpress", model_loader_extra_config=ours | {"strategies": ["disk"], "publish": True})
    peer = harness.load("modelexpress", model_loader_extra_config=ours)
    native = harness.load_native(registry)
    found = {"disk": source, "rdma": peer, "native": native}
    result: dict[str, object] = {"auto": auto, "published": source.modelexpress.report.publication.published}
    for name, model in found.items():
        result[name] = tensor_digests(model)
        result[f"{name} report"] = model.modelexpress.report.strategy
        result[f"{name} training"] = model.training
        head, embedding = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
        result[f"{name} tied"] = head is not None and head.weight.data_ptr() == embedding.weight.data_ptr()
    source.modelexpress.report.publication.withdraw()
    return result


@pytest.fixture(scope="module")
def every_way(models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    calls = [
        IsolatedCall(loaded_every_way, models(kind), new_registry(tmp_path_factory), server_args)
        for kind, server_args in CASES.values()
    ]
    return dict(zip(CASES, run_together(calls), strict=True))


@pytest.mark.parametrize("way", ["disk", "rdma", "native"])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_as_the_engine_loads_it(case: str, way: str, every_way: dict[str, dict[str, object]]) -> None:
    found = every_way[case]

    assert found[way] == found["auto"]
    assert found["published"]
    assert found[f"{way} report"] == ("disk" if way == "disk" else "rdma")
    assert found[f"{way} tied"] == (case == "llama_tied")
    assert not found[f"{way} training"]


# --- a source whose bytes turn out to be wrong, then disk, on the engine's own root


def loaded_after_a_bad_source(folder: str, registry: str, native: bool) -> dict[str, object]:
    harness = Harness(folder)
    auto = tensor_digests(harness.load("auto"))
    ours = {"registry": registry}
    source = harness.load("modelexpress", model_loader_extra_config=ours | {"strategies": ["disk"], "publish": True})
    with torch.no_grad():
        source.model.embed_tokens.weight[3, 5] += 1  # after the checksums were made
    first: list[weakref.ref[object]] = []
    root: list[object] = []
    from sglang.srt.model_loader import loader as engine

    initialize = engine._initialize_model

    def initialize_and_watch(*args: object, **kwargs: object) -> object:
        alive.append(sum(ref() is not None for ref in first))
        model = initialize(*args, **kwargs)
        first.extend(weakref.ref(each) for each in model.parameters())
        root.append(model)
        return model

    alive: list[int] = []
    engine._initialize_model = initialize_and_watch
    gc.collect()
    model = harness.load_native(registry) if native else harness.load("modelexpress", model_loader_extra_config=ours)
    report = model.modelexpress.report
    equal = tensor_digests(model) == auto
    lazy = getattr(model, "routed_experts_weights_of_layer", None)
    layers = sorted(lazy.value) if lazy is not None else []
    source.modelexpress.report.publication.withdraw()
    return {
        "equal": equal,
        "same root": model is root[0],
        "alive when built": alive,
        "attempts": [(each.strategy, each.outcome, each.error) for each in report.attempts if each.outcome != "off"],
        "lazy layers": layers,
    }


@pytest.mark.parametrize("native", [False, True], ids=["format", "native"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_after_wrong_bytes_the_same_root_is_rebuilt_and_filled(
    kind: str, native: bool, models: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry = new_registry(tmp_path_factory)

    found = run_isolated(loaded_after_a_bad_source, models(kind), registry, native)

    (rdma, failed, why), (disk, loaded, _) = found["attempts"]
    assert (rdma, failed, disk, loaded) == ("rdma", "failed", "disk", "loaded")
    assert "model.embed_tokens.weight" in why
    assert found["equal"]
    assert found["same root"]
    assert found["alive when built"] == [0, 0]  # never a second parameter set
    if kind == "qwen3_moe":
        assert found["lazy layers"] == [0, 1, 2, 3]  # its closure sees the loaded model, not an emptied shell


# --- a model that is offered later, when the engine has gone on with it


def offered_when_ready(folder: str, registry: str) -> dict[str, object]:
    harness = Harness(folder)
    auto = tensor_digests(harness.load("auto"))
    options = {"registry": registry, "publish": True, "publish_when": "ready"}
    source = harness.load("modelexpress", model_loader_extra_config=options)
    publication = source.modelexpress.report.publication
    from sglang.srt.platforms import current_platform

    before = publication.published
    current_platform.post_load_model(source)  # kernels for this platform
    source.model.layers[0].register_forward_hook(lambda *_, scale=0.5: None)
    source.runtime = {"steps": 3, "cache": torch.zeros(7)}
    publication.publish()
    peer = harness.load("modelexpress", model_loader_extra_config={"registry": registry})
    publication.withdraw()
    return {"before": before, "strategy": peer.modelexpress.report.strategy, "equal": tensor_digests(peer) == auto}


@pytest.mark.parametrize("kind", ["qwen3_fp8", "deepseek_v3"])
def test_what_the_engine_adds_before_it_serves_is_not_offered(
    kind: str, models: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = run_isolated(offered_when_ready, models(kind), new_registry(tmp_path_factory))

    assert found == {"before": False, "strategy": "rdma", "equal": True}


# --- what SGLang does with the load config afterwards


def records_after_loading(folder: str, registry: str, native: bool) -> dict[str, object]:
    harness = Harness(folder)
    keys = {"enable_multithread_load": True}
    if native:
        harness.load_native(registry, model_loader_extra_config=keys)
    else:
        harness.load("modelexpress", model_loader_extra_config=keys | {"registry": registry, "verify": "sampled"})
    from sglang.srt.model_loader.loader import DefaultModelLoader

    again = DefaultModelLoader(harness.load_config)  # as the code of LoRA adapters does
    return {"format": str(harness.load_config.load_format), "extra": again.load_config.model_loader_extra_config}


@pytest.mark.parametrize("native", [False, True], ids=["format", "native"])
def test_the_engine_can_use_the_load_config_again(
    native: bool, models: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry = new_registry(tmp_path_factory)

    found = run_isolated(records_after_loading, models("llama"), registry, native)

    assert found == {"format": "LoadFormat.AUTO", "extra": {"enable_multithread_load": True}}


# --- options


def refused_options(folder: str) -> dict[str, str]:
    harness = Harness(folder)
    cases = {
        "unknown": {"registri": "file:///x"},
        "negative": {"transfer_timeout_s": -1},
        "strategy": {"strategies": ["nixl"]},
        "verify": {"verify": "yes"},
        "publish without": {"publish": True},
    }
    said = {}
    for name, options in cases.items():
        try:
            harness.load("modelexpress", model_loader_extra_config=options)
        except Exception as exc:
            said[name] = f"{type(exc).__name__}: {exc}"
    try:
        harness.load_native("file:///tmp/x", transport="transfer_engine")
    except Exception as exc:
        said["transport"] = f"{type(exc).__name__}: {exc}"
    return said


def test_wrong_options_are_refused_by_name(models: ModelCache) -> None:
    said = run_isolated(refused_options, models("llama"))

    assert "unknown extra-config key 'registri'; did you mean 'registry'?" in said["unknown"]
    assert "extra-config key transfer_timeout_s is -1" in said["negative"]
    assert "unknown strategy 'nixl'" in said["strategy"]
    assert "on, off or sampled" in said["verify"]
    assert "publish is set" in said["publish without"]
    assert "transport in --modelexpress-config is 'transfer_engine'" in said["transport"]
    assert all(each.startswith("ConfigError") for each in said.values())


# --- weights that SGLang would move under a reader are not shared


def attempts_of(folder: str, registry: str, server_args: dict[str, object]) -> list[tuple[str, str, str]]:
    options = {"registry": registry, "publish": True}
    model = Harness(folder, **server_args).load("modelexpress", model_loader_extra_config=options)
    assert model.modelexpress.report.publication is None
    return [(each.strategy, each.outcome, each.error or "") for each in model.modelexpress.report.attempts]


def test_experts_that_move_at_run_time_come_from_disk_alone(
    models: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry = new_registry(tmp_path_factory)

    attempts = run_isolated(attempts_of, models("llama"), registry, {"cpu_offload_gb": 1})

    assert [tuple(each[:2]) for each in attempts] == [("gms", "off"), ("rdma", "unavailable"), ("disk", "loaded")]
    assert "cpu_offload_gb is 1" in attempts[1][2]


# --- a raw checkpoint in another process's memory


def loaded_from_raw_source(folder: str, bare: str, registry: str) -> dict[str, object]:
    harness = Harness(folder)
    auto = tensor_digests(harness.load("auto"))
    harness.model_config.model_path = bare
    options = {"registry": registry, "revision": "r1", "model_name": "m"}
    model = harness.load("modelexpress", model_loader_extra_config=options)
    return {"equal": tensor_digests(model) == auto, "strategy": model.modelexpress.report.strategy}


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3_fp8"])
def test_a_raw_source_fills_a_model_that_has_no_files(
    kind: str, models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry = new_registry(tmp_path_factory)
    bare = config_only(models(kind), tmp_path / "bare")

    with serving(models(kind), registry, revision="r1", model_name="m"):
        found = run_isolated(loaded_from_raw_source, models(kind), bare, registry)

    assert found == {"equal": True, "strategy": "rdma"}


# --- two ranks: each from its peer rank


def rank_every_way(folder: str, registry: str, tp_rank: int, dist_port: int) -> dict[str, object]:
    harness = Harness(folder, tp_size=2, tp_rank=tp_rank, dist_port=dist_port, dtype="float32")
    auto = tensor_digests(harness.load("auto"))
    options = {"registry": registry}
    source = harness.load("modelexpress", model_loader_extra_config=options | {"strategies": ["disk"], "publish": True})
    peer = harness.load("modelexpress", model_loader_extra_config=options)
    raw = harness.load("modelexpress", model_loader_extra_config=options | {"revision": "r1", "model_name": "m"})
    record = source.modelexpress.report.publication.record
    result = {
        "auto": auto,
        "disk": tensor_digests(source),
        "peer": tensor_digests(peer),
        "raw": tensor_digests(raw),
        "from its rank": peer.modelexpress.report.source == record.name,
        "strategies": [each.modelexpress.report.strategy for each in (source, peer, raw)],
        "reads": [each.modelexpress._config.direct_reads for each in (source, peer, raw)],
    }
    source.modelexpress.report.publication.withdraw()
    return result


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_each_of_two_ranks_has_its_own_half(
    kind: str, models: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry, port = new_registry(tmp_path_factory), free_port()
    with serving(models(kind), registry, revision="r1", model_name="m"):
        calls = [IsolatedCall(rank_every_way, models(kind), registry, tp_rank, port) for tp_rank in range(2)]
        ranks = run_together(calls)

    for found in ranks:
        assert found["disk"] == found["peer"] == found["raw"] == found["auto"]
        assert found["from its rank"]
        assert found["strategies"] == ["disk", "rdma", "rdma"]
        assert found["reads"] == ["off"] * 3  # both read the same files, so the page cache has them for the second
    assert ranks[0]["auto"] != ranks[1]["auto"]


# --- several models in one process


def several_models(folders: list[str], registry: str) -> dict[str, object]:
    """Two targets and a draft, all published from this process and pulled again."""
    harness = Harness(folders[0])
    found: dict[str, object] = {}
    sources = []
    for name, folder, is_draft in (("a", folders[0], False), ("b", folders[1], False), ("draft", folders[0], True)):
        harness.model_config.model_path = folder
        harness.model_config.is_draft_model = is_draft
        found[f"{name} auto"] = tensor_digests(harness.load("auto"))
        options = {"registry": registry, "publish": True}
        model = harness.load("modelexpress", model_loader_extra_config=options)
        sources.append(model.modelexpress.report.publication)
        pulled = harness.load("modelexpress", model_loader_extra_config={"registry": registry})
        found[f"{name} first"] = model.modelexpress.report.strategy
        found[f"{name} reads"] = model.modelexpress._config.direct_reads
        found[f"{name} pulled"] = tensor_digests(pulled)
        found[f"{name} source"] = pulled.modelexpress.report.source == sources[-1].record.name
    for each in sources:
        each.withdraw()
    return found


def test_models_in_one_process_do_not_mix(models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = run_isolated(several_models, [models("llama"), models("llama", seed=1)], new_registry(tmp_path_factory))

    for name in ("a", "b", "draft"):
        assert found[f"{name} first"] == "disk"  # nobody's weights are taken for another's
        assert found[f"{name} pulled"] == found[f"{name} auto"]
        assert found[f"{name} source"]
        assert found[f"{name} reads"] == "auto"
    assert found["a auto"] != found["b auto"]


# --- the memory service


def kept_and_imported(folder: str, gms: str) -> dict[str, object]:
    harness = Harness(folder, load_format="modelexpress")
    auto = tensor_digests(harness.load("auto"))
    options = {"gms": gms, "strategies": ["gms", "disk"], "publish": True}
    kept = harness.load("modelexpress", model_loader_extra_config=options)
    imported = harness.load("modelexpress", model_loader_extra_config=options)
    return {
        "strategies": [each.modelexpress.report.strategy for each in (kept, imported)],
        "equal": [tensor_digests(each) == auto for each in (kept, imported)],
    }


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "deepseek_v3_fp8"])
def test_weights_stay_in_the_memory_service(kind: str, models: ModelCache, tmp_path: Path) -> None:
    path = str(tmp_path / "gms.sock")
    with keeping(path):
        found = run_isolated(kept_and_imported, models(kind), path)

    assert found == {"strategies": ["disk", "gms"], "equal": [True, True]}
