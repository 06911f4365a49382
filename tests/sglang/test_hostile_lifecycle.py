"""What is done to a running engine at the wrong moment, or half: its weights are the old, the new, or none."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.sglang.sources import keeping, new_registry
from tests.sglang.test_servers import ours
from tests.sglang.test_sleep import tensors_of
from tests.sglang.test_updates import NAMED, tensor_digests_of
from tests.support.redis_server import free_port
from tests.support.sglang_cpu.isolated import IsolatedCall, run_isolated, run_together
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.server import HttpFailure, SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.nixl]

NORM = "model.norm.weight"


# --- sessions


def sessions(folder: str, registry: str, other: str) -> dict[str, object]:
    from tests.sglang.engine import Engine

    engine = Engine(folder, NAMED | {"registry": registry, "model_name": "m", "revision": "r1"})
    engine.resident.offer()
    before = engine.digests(), engine.generate()
    given = tensors_of(other)
    found: dict[str, object] = {}

    engine.begin()
    engine.give(given[:10])
    found["update in a session"] = engine.update(other)
    found["the rest"] = engine.give(given[10:], weight_version="r2")[0], engine.end()[0]
    found["whole"] = engine.digests() == tensor_digests_of(engine, other)
    found["named"] = engine.offered()
    found["back"] = engine.update(folder, weight_version="r1")[0], (engine.digests(), engine.generate()) == before

    engine.begin()
    fits, short = (
        (NORM, torch.full_like(engine.runner.model.model.norm.weight.data, 3.0)),
        ("lm_head.weight", torch.zeros(3)),
    )
    found["first of two"] = engine.give([fits, short], load_format="direct")[0], engine.digests() == before[0]
    found["after it"] = (*engine.end(), (engine.digests(), engine.generate()) == before, len(engine.offered()))
    engine.resident.withdraw()
    return found


@pytest.fixture(scope="module")
def in_sessions(models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    registry = new_registry(tmp_path_factory)
    return run_isolated(sessions, models("llama"), registry, models("llama", seed=1), timeout_s=280)


def test_an_update_from_a_folder_does_not_end_a_session(in_sessions: dict[str, object]) -> None:
    """It did: the rest of the session's tensors then stood beside old ones, under the new name."""
    success, message = in_sessions["update in a session"]
    assert not success
    assert "/end_weight_update" in message
    assert in_sessions["the rest"] == [True, True]
    assert in_sessions["whole"]
    [named] = in_sessions["named"]
    assert "r2" in named
    assert in_sessions["back"] == [True, True]


def test_tensors_that_are_written_in_part_do_not_stand(in_sessions: dict[str, object]) -> None:
    """Those that SGLang writes directly, past what is checked."""
    assert in_sessions["first of two"] == [False, False]  # the limit of SGLang: the first is written by then
    success, message, same, offered = in_sessions["after it"]
    assert not success
    assert "the old weights are back" in message
    assert (same, offered) == (True, 1)


# --- names


def exchange(folder: Path, model: str) -> None:
    """Other files in the same folder, as a trainer leaves them."""
    for each in folder.glob("*.safetensors*"):
        each.unlink()
    for each in Path(model).glob("*.safetensors*"):
        shutil.copy(each, folder)


def names(folder: str, model: str, other: str, registry: str, passing: str) -> dict[str, object]:
    from modelexpress.engines.sglang.adapter import SglangAdapter
    from tests.sglang.engine import Engine

    engine = Engine(folder, NAMED | {"registry": registry, "model_name": "m", "revision": "r1"})
    engine.resident.offer()
    found: dict[str, object] = {"at first": engine.offered()}
    exchange(Path(folder), other)
    found["others in the folder"] = engine.update(folder, weight_version="r1")[0], engine.offered()
    engine.release("weights")
    engine.resume("weights")
    found["after sleep"] = engine.offered()
    exchange(Path(folder), model)
    found["the old in the folder"] = engine.update(folder, weight_version="r1")[0], engine.offered()
    found["empty"] = engine.update(other, weight_version="")[0], engine.offered()

    shutil.copytree(other, passing)
    load_checkpoint = SglangAdapter.load_checkpoint

    def load_and_exchange(self: SglangAdapter, *args: object) -> int:
        nbytes = load_checkpoint(self, *args)
        exchange(Path(passing), model)
        return nbytes

    SglangAdapter.load_checkpoint = load_and_exchange
    found["exchanged when read"] = engine.update(passing)[0], len(engine.offered())
    SglangAdapter.load_checkpoint = load_checkpoint
    options = {"registry": registry, "strategies": ["rdma"]}
    engine.harness.model_config.model_path = model
    try:
        engine.harness.load("modelexpress", model_loader_extra_config=options)
    except Exception as exc:
        found["asked for what came later"] = type(exc).__name__
    engine.harness.model_config.model_path = other
    peer = engine.harness.load("modelexpress", model_loader_extra_config=options)
    found["asked for what was read"] = peer.modelexpress.report.strategy
    engine.resident.withdraw()
    return found


def test_a_name_never_stands_for_other_weights(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = shutil.copytree(models("llama"), tmp_path / "latest")
    other, registry = models("llama", seed=1), new_registry(tmp_path_factory)

    found = run_isolated(names, folder, models("llama"), other, registry, tmp_path / "passing", timeout_s=280)

    assert found["at first"] == ["m@r1 1"]
    assert found["others in the folder"] == [True, []]
    assert found["after sleep"] == []
    assert found["the old in the folder"] == [True, ["m@r1 1"]]
    assert found["empty"] == [True, ["m 1"]]
    assert found["exchanged when read"] == [True, 1]
    assert found["asked for what came later"] == "LoadFailed"
    assert found["asked for what was read"] == "rdma"


# --- memory that is not there


def asked_while_asleep(folder: str, registry: str, gms: str) -> dict[str, object]:
    from sglang.srt.managers import io_struct

    from modelexpress.gms.client import Where, drop, status
    from tests.sglang.engine import Engine

    options = {"registry": registry, "gms": gms, "publish": True, "revision": "r1", "model_name": "m"}
    engine = Engine(folder, options | {"strategies": ["gms", "disk"]})
    before = engine.digests(), engine.generate()
    looking = engine.runner.model.lm_head.weight.data[3:5]  # nobody knows of it, and it keeps the memory where it is

    def checked(action: str = "checksum") -> tuple[bool, str]:
        answer = engine.manager.check_weights(io_struct.CheckWeightsReqInput(action=action))
        return answer.success, answer.message

    engine.release("weights")
    found: dict[str, object] = {"asleep": [checked(), checked("reset_tensors")]}
    given = engine.manager.get_weights_by_name(io_struct.GetWeightsByNameReqInput(name="lm_head.weight"))
    found["by name"] = given.parameter
    engine.resume()  # all of it, and the kv cache was not released
    found["awake"] = checked()[0], (engine.digests(), engine.generate()) == before

    with torch.no_grad():
        engine.runner.model.model.norm.weight.mul_(2)  # a private page, so that bytes have to be compared
    engine.release("weights")
    [kept] = status(gms).keys
    drop(Where(gms, kept.key, kept.namespace))
    engine.resume("weights")
    found["lost"] = engine.resident.why_not_serving(), checked()[0]
    found["kept where it is"] = engine.update(folder)
    del looking
    found["let go"] = engine.update(folder, weight_version="r1")[0], (engine.digests(), engine.generate()) == before
    found["reset"] = checked("reset_tensors")[0], len(engine.offered())
    engine.resident.withdraw()
    return found


def test_nobody_looks_at_memory_that_is_not_there(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A look would be a segmentation fault: the process is still there when all of this returned."""
    path = str(tmp_path / "gms.sock")
    with keeping(path):
        found = run_isolated(asked_while_asleep, models("llama"), new_registry(tmp_path_factory), path, timeout_s=280)

    for success, message in found["asleep"]:
        assert not success
        assert "asleep" in message
    assert found["by name"] is None
    assert found["awake"] == [True, True]
    assert "generation 1" in found["lost"][0]
    assert found["lost"][1] is False
    success, message = found["kept where it is"]
    assert not success
    assert "outside of the model" in message
    assert found["let go"] == [True, True]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ends", ["asleep", "lost"])
def test_requests_that_were_paused_do_not_run_without_weights(
    ends: str, models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from modelexpress.gms.client import Where, drop, status

    path, registry = str(tmp_path / "gms.sock"), new_registry(tmp_path_factory)
    refused: list[HttpFailure] = []

    def ask(server: SglangServer) -> None:
        with pytest.raises(HttpFailure) as failure:
            server.generate(max_new_tokens=480)
        refused.append(failure.value)

    with keeping(path), SglangServer(models("llama"), *ours(registry, publish=True, gms=path)) as server:
        wanted = server.wait_ready().generate()
        waiting = threading.Thread(target=ask, args=(server,))
        waiting.start()
        while not server.get("/v1/loads")["loads"][0]["num_running_reqs"]:
            time.sleep(0.01)
        server.post("/pause_generation", {"mode": "retract"})
        server.post("/release_memory_occupation", {"tags": ["weights"]})
        if ends == "lost":
            [kept] = status(path).keys
            drop(Where(path, kept.key, kept.namespace))
            server.post("/resume_memory_occupation", {"tags": ["weights"]})
        server.post("/continue_generation")
        waiting.join(60)
        if ends == "lost":
            server.post("/update_weights_from_disk", {"model_path": str(models("llama"))})
        else:
            server.post("/resume_memory_occupation", {"tags": ["weights"]})
        again = server.generate()

    [failure] = refused
    assert failure.status == 503
    assert f"the weights are {ends}" in str(failure)
    assert again == wanted


# --- ranks


def rank_that_may_fail(folder: str, other: str, tp_rank: int, dist_port: int) -> dict[str, object]:
    from tests.sglang.engine import Engine

    engine = Engine(folder, {"strategies": ["disk"]}, tp_rank=tp_rank, dist_port=dist_port, tp_size=2, dtype="float32")
    before = engine.digests()
    resident = engine.resident
    found: dict[str, object] = {}

    def failing(*args: object, **kwargs: object) -> object:
        raise MemoryError("no memory on this rank")

    for step in ("prepare", "begin", "load_prepared", "end"):
        if tp_rank == 1:
            step_of_all = getattr(resident, step)
            resident.__dict__[step] = (
                failing if step != "end" else lambda failure, end=step_of_all: (end(failure), failing())
            )
        answer = engine.update(other)
        found[step] = answer, engine.digests() == before, str(resident.phase)
        resident.__dict__.pop(step, None)
        if resident.lost:
            found["mended"] = engine.update(folder)[0], engine.digests() == before
    found["good"] = engine.update(other)[0], engine.digests() != before
    return found


def test_ranks_change_together_or_not_at_all(models: ModelCache) -> None:
    port = free_port()
    arguments = (models("llama"), models("llama", seed=1))
    calls = [IsolatedCall(rank_that_may_fail, *arguments, tp_rank, port) for tp_rank in range(2)]

    for found in run_together(calls, timeout_s=280):
        for step in ("prepare", "begin", "load_prepared"):
            (success, message), same, phase = found[step]
            assert not success
            assert "no memory on this rank" in message
            assert (same, phase) == (True, "serving")
        (success, message), _, phase = found["end"]
        assert not success
        assert "no memory on this rank" in message
        assert phase == "lost"
        assert found["mended"] == [True, True]
        assert found["good"] == [True, True]
