"""A34: memory that was given back holds the same bytes when it is taken again, or the server answers nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sglang.sources import config_only, keeping, new_registry
from tests.sglang.test_broken_checkpoints import variant, without
from tests.support.sglang_cpu.isolated import run_isolated
from tests.support.sglang_cpu.model_cache import ModelCache

pytestmark = [pytest.mark.sglang, pytest.mark.nixl]


def slept_and_woke(folder: str, registry: str, gms: str) -> dict[str, object]:
    from modelexpress.gms.client import status
    from tests.sglang.engine import Engine

    options = {
        "registry": registry,
        "gms": gms,
        "publish": True,
        "publish_when": "ready",
        "strategies": ["gms", "disk"],
    }
    engine = Engine(folder, options)
    engine.resident.offer()
    before = engine.digests(), engine.generate()

    def readers() -> int:
        return sum(each.readers for each in status(gms).keys)

    found: dict[str, object] = {"at first": [len(engine.offered()), readers()]}
    address = engine.runner.model.lm_head.weight.data_ptr()
    engine.release("kv_cache")
    found["kv cache alone"] = len(engine.offered()), readers(), engine.resident.phase
    engine.resume("kv_cache")
    for name, tags in {"weights": ["weights"], "all": []}.items():
        engine.release(*tags)
        found[f"{name} asleep"] = len(engine.offered()), readers(), engine.resident.why_not_serving() is not None
        engine.release("weights")  # again: SGLang would do it twice
        found[f"{name} update"] = engine.update(folder)
        engine.resume(*tags)
        found[f"{name} awake"] = (engine.digests(), engine.generate()) == before, len(engine.offered()), readers()
        engine.resume("weights")  # again: SGLang would end
    found["same address"] = engine.runner.model.lm_head.weight.data_ptr() == address
    engine.idle = False
    try:
        engine.release()
    except AssertionError as exc:
        found["busy"] = str(exc)
    found["after busy"] = engine.digests() == before[0], len(engine.offered()), engine.resident.phase
    engine.resident.withdraw()
    return found


def test_weights_come_back_from_the_memory_service(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path / "gms.sock")
    with keeping(path):
        found = run_isolated(slept_and_woke, models("llama"), new_registry(tmp_path_factory), path, timeout_s=200)

    assert found["at first"] == [1, 1]
    assert found["kv cache alone"] == [1, 1, "serving"]
    for name in ("weights", "all"):
        assert found[f"{name} asleep"] == [0, 0, True]
        assert found[f"{name} update"] == [
            False,
            "ModelExpressError: the weights cannot be updated while they are asleep",
        ]
        assert found[f"{name} awake"] == [True, 1, 1]
    assert found["same address"]
    assert "idle" in found["busy"]
    assert found["after busy"] == [True, 1, "serving"]


def lost_and_updated(folder: str, bare: str, broken: str, gms: str) -> dict[str, object]:
    from modelexpress.gms.client import Where, drop, status
    from tests.sglang.engine import Engine

    options = {"gms": gms, "publish": True, "revision": "r1", "model_name": "m", "strategies": ["gms", "disk"]}
    engine = Engine(folder, options)
    before = engine.digests(), engine.generate()
    engine.release("weights")
    [kept] = status(gms).keys
    drop(Where(gms, kept.key, kept.namespace))
    engine.resume("weights")
    found: dict[str, object] = {"lost": engine.resident.why_not_serving()}
    found["zeros"] = bool(torch.count_nonzero(engine.runner.model.lm_head.weight) == 0)
    engine.begin()
    given = [(name, each) for name, each in tensors_of(folder) if "layers.2" in name]
    found["a part"] = engine.give(given)[0], *engine.end(), engine.resident.phase
    found["broken"] = *engine.update(broken), engine.resident.phase
    found["slept again"] = engine.release("weights"), engine.resume("weights"), engine.resident.phase
    found["updated"] = *engine.update(folder), (engine.digests(), engine.generate()) == before, engine.resident.phase
    return found


def lost_and_given_all(folder: str, gms: str) -> dict[str, object]:
    from modelexpress.gms.client import Where, drop, status
    from tests.sglang.engine import Engine

    options = {"gms": gms, "publish": True, "revision": "r1", "model_name": "m", "strategies": ["gms", "disk"]}
    engine = Engine(folder, options)
    before = engine.digests(), engine.generate()
    engine.release("weights")
    [kept] = status(gms).keys
    drop(Where(gms, kept.key, kept.namespace))
    engine.resume("weights")
    engine.begin()
    given = tensors_of(folder)
    answers = [engine.give(given[:10]), engine.give(given[10:]), engine.end()]
    return {"answers": answers, "same": (engine.digests(), engine.generate()) == before, "phase": engine.resident.phase}


def tensors_of(folder: str) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [item for shard in sorted(Path(folder).glob("*.safetensors")) for item in load_file(shard).items()]


def test_weights_that_are_gone_are_answered_with_nothing_until_all_are_new(models: ModelCache, tmp_path: Path) -> None:
    broken = variant(models("llama"), tmp_path / "broken", without("layers.3."))
    bare = config_only(models("llama"), tmp_path / "bare")
    path = str(tmp_path / "gms.sock")
    with keeping(path):
        found = run_isolated(lost_and_updated, models("llama"), bare, broken, path, timeout_s=200)

    assert "update them" in found["lost"]
    assert "generation 1" in found["lost"]
    assert found["zeros"]
    given, success, message, phase = found["a part"]
    assert (given, success, phase) == (True, False, "lost")
    assert "lacks" in message
    assert found["broken"][0] is False
    assert found["broken"][2] == "lost"
    assert found["slept again"] == [None, None, "lost"]
    assert found["updated"] == [True, "Succeeded to update model weights.", True, "serving"]


def test_lost_weights_may_come_as_tensors(models: ModelCache, tmp_path: Path) -> None:
    path = str(tmp_path / "gms.sock")
    with keeping(path):
        found = run_isolated(lost_and_given_all, models("llama"), path, timeout_s=200)

    assert [success for success, _ in found["answers"]] == [True, True, True], found
    assert found["same"]
    assert found["phase"] == "serving"
