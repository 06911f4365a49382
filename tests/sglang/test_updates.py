"""A33: a live update changes everything or nothing, whatever is wrong with what it is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelexpress.checkpoint.checksums import write_checksums
from modelexpress.checkpoint.index import open_index
from tests.sglang.sources import config_only, keeping, new_registry
from tests.sglang.test_broken_checkpoints import broken_file, changed, variant, without
from tests.support.sglang_cpu.isolated import IsolatedCall, run_isolated, run_together
from tests.support.sglang_cpu.model_cache import ModelCache

pytestmark = [pytest.mark.sglang, pytest.mark.nixl]

GATE = "model.layers.1.mlp.gate_proj.weight"
NAMED = {"publish": True, "publish_when": "ready", "strategies": ["gms", "disk"]}


def with_config(model: Path, folder: Path, **fields: object) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def damaged(model: Path, folder: Path) -> Path:
    """Files whose recorded checksums are right until, late in the last shard, they are not."""
    shutil.copytree(model, folder)
    write_checksums(open_index(folder), threads=1)
    shard = max(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1000] ^= 1
    shard.write_bytes(content)
    return folder


# What is wrong, and what the answer has to name.
REFUSED = {
    "wrong shape": GATE,
    "missing layer": "model.layers.3.",
    "cut": "bytes",
    "gone": "missing",
    "not there": "no such folder",
    "another rope": "rope_theta",
    "more layers": "num_hidden_layers",
    "infinite": "values that",
    "damaged": "checksum",
}


def refused_folders(models: ModelCache, tmp_path: Path) -> dict[str, str]:
    model = models("llama", seed=1)
    folders = {
        "wrong shape": variant(model, tmp_path / "shape", changed(GATE, lambda each: each[:-12])),
        "missing layer": variant(model, tmp_path / "layer", without("layers.3.")),
        "cut": broken_file(model, tmp_path / "cut", "cut"),
        "gone": broken_file(model, tmp_path / "gone", "gone"),
        "not there": tmp_path / "not there",
        "another rope": with_config(model, tmp_path / "rope", rope_theta=12345.0),
        "more layers": with_config(model, tmp_path / "layers", num_hidden_layers=8),
        "infinite": variant(model, tmp_path / "infinite", changed(GATE, lambda each: each.double() * 1e300)),
        "damaged": damaged(model, tmp_path / "damaged"),
    }
    return {name: str(folder) for name, folder in folders.items()}


def updates_from_folders(folder: str, registry: str, refused: dict[str, str], good: str) -> dict[str, object]:
    from tests.sglang.engine import Engine

    engine = Engine(folder, NAMED | {"registry": registry})
    engine.resident.offer()
    before = engine.digests(), engine.generate(), engine.offered()
    found: dict[str, object] = {"offered at first": len(before[2])}
    for name, other in refused.items():
        success, message = engine.update(other)
        now = engine.digests(), engine.generate(), [each.rpartition(" ")[0] for each in engine.offered()]
        wanted = *before[:2], [each.rpartition(" ")[0] for each in before[2]]
        found[name] = {"success": success, "message": message, "as before": now == wanted}
    found["path"] = engine.runner.model_config.model_path == folder
    found["good"] = engine.update(good)[0]
    found["tokens changed"] = engine.generate() != before[1]
    found["equal"] = engine.digests() == tensor_digests_of(engine, good)
    found["offered at last"] = [each for each in engine.offered() if Path(good).name in each]
    found["old offered"] = [each for each in engine.offered() if each in before[2]]
    found["back"] = engine.update(folder)[0] and (engine.digests(), engine.generate()) == before[:2]
    engine.resident.withdraw()
    return found


def tensor_digests_of(engine, folder: str) -> dict[str, str]:
    """What SGLang's own loader makes of a folder in the same process."""
    from tests.support.sglang_cpu.oracle import tensor_digests

    before, engine.harness.model_config.model_path = engine.harness.model_config.model_path, folder
    try:
        return tensor_digests(engine.harness.load("auto", model_loader_extra_config={}))
    finally:
        engine.harness.model_config.model_path = before


@pytest.fixture(scope="module")
def from_folders(models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    refused = refused_folders(models, tmp_path_factory.mktemp("refused"))
    registry, good = new_registry(tmp_path_factory), models("llama", seed=1)
    return run_isolated(updates_from_folders, models("llama"), registry, refused, good, timeout_s=280)


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_update_changes_nothing(case: str, from_folders: dict[str, dict[str, object]]) -> None:
    found = from_folders[case]

    assert not found["success"]
    assert REFUSED[case] in found["message"]
    assert found["as before"], found


def test_a_good_update_is_what_the_engine_loads_and_has_a_new_name(from_folders: dict[str, object]) -> None:
    assert from_folders["offered at first"] == 1
    assert from_folders["path"]
    assert from_folders["good"]
    assert from_folders["tokens changed"]
    assert from_folders["equal"]
    assert len(from_folders["offered at last"]) == 1
    assert from_folders["old offered"] == []
    assert from_folders["back"]


# --- kinds of models whose loaded tensors are not those of the files


def updated_and_back(folder: str, good: str, server_args: dict[str, object]) -> dict[str, object]:
    from tests.sglang.engine import Engine

    engine = Engine(folder, {"strategies": ["disk"]}, **server_args)
    before = engine.digests()
    answer = engine.update(good)
    return {
        "answer": answer,
        "equal": engine.digests() == tensor_digests_of(engine, good),
        "same": engine.digests() == before,
    }


KINDS = {
    "llama_tied": ("llama_tied", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_fp8": ("qwen3_fp8", {}),
}


def test_models_whose_tensors_are_made_from_several_are_updated_whole(models: ModelCache) -> None:
    calls = [
        IsolatedCall(updated_and_back, models(kind), models(kind, seed=1), server_args)
        for kind, server_args in KINDS.values()
    ]

    for kind, found in zip(KINDS, run_together(calls), strict=True):
        assert found["answer"][0], (kind, found)
        assert found["equal"], kind


def test_weights_that_were_quantised_while_they_loaded_are_not_updated(models: ModelCache) -> None:
    """SGLang's parameters of such a model take no tensor of a checkpoint any more."""
    found = run_isolated(updated_and_back, models("llama"), models("llama", seed=1), {"quantization": "fp8"})

    assert not found["answer"][0]
    assert "weight" in found["answer"][1]
    assert found["same"]


# --- tensors that SGLang is given


def updates_from_tensors(folder: str, registry: str, other: str) -> dict[str, object]:
    from tests.sglang.engine import Engine

    engine = Engine(folder, NAMED | {"registry": registry, "model_name": "m", "revision": "r1"})
    engine.resident.offer()
    before = engine.digests(), engine.generate()
    given = [item for shard in sorted(Path(other).glob("*.safetensors")) for item in load_file(shard).items()]
    short = [(name, tensor[:-4] if name == GATE else tensor) for name, tensor in given]
    found: dict[str, object] = {}

    def same() -> bool:
        return (engine.digests(), engine.generate()) == before

    found["outside of a session"] = engine.give(given)[0], same(), len(engine.offered())
    engine.begin()
    found["offered in a session"] = engine.offered()
    found["refused"] = (*engine.give(short), same())
    found["unknown"] = (*engine.give([*given, ("model.layers.1.mlp.gate_proj.bias", torch.zeros(2))]), same())
    found["nothing given"] = engine.end()[0], same(), len(engine.offered())
    engine.begin()
    found["given"] = engine.give(given[:20])[0], engine.give(given[20:], weight_version="r2")[0], engine.end()[0]
    found["equal"] = engine.digests() == tensor_digests_of(engine, other)
    found["named"] = engine.offered()
    engine.begin()
    half = [(name, tensor / 2) for name, tensor in given if name == GATE]
    found["part"] = engine.give(half)[0], engine.end()[0], engine.offered()
    found["to files"] = engine.update(folder)[0], same(), len(engine.offered())
    engine.begin()
    found["failing"] = engine.give([(GATE, torch.zeros(3))], load_format="direct")
    found["after failing"] = (*engine.end(), same(), len(engine.offered()))
    engine.resident.withdraw()
    return found


@pytest.fixture(scope="module")
def from_tensors(models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    registry = new_registry(tmp_path_factory)
    return run_isolated(updates_from_tensors, models("llama"), registry, models("llama", seed=1), timeout_s=280)


def test_tensors_that_do_not_fit_change_nothing(from_tensors: dict[str, object]) -> None:
    assert from_tensors["outside of a session"] == [False, True, 1]
    assert from_tensors["offered in a session"] == []
    for case, named in {"refused": GATE, "unknown": "mlp.gate_proj.bias"}.items():
        success, message, same = from_tensors[case]
        assert not success
        assert named in message
        assert same
    assert from_tensors["nothing given"] == [True, True, 1]


def test_tensors_that_fit_are_loaded_and_offered_under_the_name_they_are_given(from_tensors: dict[str, object]) -> None:
    assert from_tensors["given"] == [True, True, True]
    assert from_tensors["equal"]
    [named] = from_tensors["named"]
    assert "r2" in named
    assert from_tensors["part"] == [True, True, []]  # nobody said what these weights are
    assert from_tensors["to files"] == [True, True, 1]


def test_what_fails_half_way_is_brought_back_at_the_end(from_tensors: dict[str, object]) -> None:
    assert not from_tensors["failing"][0]
    success, message, same, offered = from_tensors["after failing"]
    assert (success, same, offered) == (True, True, 1), message


# --- weights that lie in a memory service


def updates_of_shared_weights(folder: str, bare: str, other: str, broken: str, gms: str) -> dict[str, object]:
    from modelexpress.gms.client import status
    from tests.sglang.engine import Engine

    options = {"gms": gms, "publish": True, "revision": "r1", "model_name": "m", "strategies": ["gms", "disk"]}
    writer = Engine(folder, options)
    before = writer.digests(), writer.generate()
    address = writer.runner.model.lm_head.weight.data_ptr()

    def kept() -> list[int]:
        return [each.generation for each in status(gms).keys if each.generation is not None]

    found: dict[str, object] = {"kept": kept(), "shared": writer.resident.imported.holds(address)}
    found["refused"] = writer.update(broken)[0], writer.digests() == before[0], kept()
    reader = writer.harness.load("modelexpress", model_loader_extra_config=options)
    found["reader"] = reader.modelexpress.report.strategy
    shared = tensor_digests(reader)
    found["updated"] = writer.update(other)[0], writer.resident.imported is None, kept()
    found["reader after"] = tensor_digests(reader) == shared == before[0]
    found["tokens changed"] = writer.generate() != before[1]
    return found


def tensor_digests(model) -> dict[str, str]:
    from tests.support.sglang_cpu.oracle import tensor_digests as digests

    return digests(model)


def test_an_update_leaves_shared_memory_as_it_is(models: ModelCache, tmp_path: Path) -> None:
    broken = variant(models("llama"), tmp_path / "broken", without("layers.3."))
    bare = config_only(models("llama"), tmp_path / "bare")
    path = str(tmp_path / "gms.sock")

    with keeping(path):
        found = run_isolated(
            updates_of_shared_weights, models("llama"), bare, models("llama", seed=1), broken, path, timeout_s=280
        )

    assert found["kept"] == [1]
    assert found["shared"]
    assert found["refused"] == [False, True, [1]]
    assert found["reader"] == "gms"
    assert found["updated"] == [True, True, []]
    assert found["reader after"]
    assert found["tokens changed"]


def failing_update_without_files(bare: str, damaged: str, gms: str) -> dict[str, object]:
    from tests.sglang.engine import Engine

    engine = Engine(bare, {"gms": gms, "revision": "r1", "model_name": "m", "strategies": ["gms"]})
    before = engine.digests(), engine.generate()
    answer = engine.update(damaged)
    return {"answer": answer, "same": (engine.digests(), engine.generate()) == before}


def keep_in_service(folder: str, gms: str) -> str:
    from tests.sglang.engine import Engine

    options = {"gms": gms, "publish": True, "revision": "r1", "model_name": "m", "strategies": ["gms", "disk"]}
    return Engine(folder, options).resident.report.strategy


def test_without_files_the_old_weights_come_back_from_the_service(models: ModelCache, tmp_path: Path) -> None:
    bare = config_only(models("llama"), tmp_path / "bare")
    path = str(tmp_path / "gms.sock")
    with keeping(path):
        assert run_isolated(keep_in_service, models("llama"), path) == "disk"
        bad = damaged(models("llama", seed=1), tmp_path / "damaged")
        found = run_isolated(failing_update_without_files, bare, bad, path, timeout_s=280)

    assert not found["answer"][0]
    assert "the old weights are back" in found["answer"][1]
    assert found["same"]
