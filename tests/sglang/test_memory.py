"""The KV pool of the real runner, after an import from a memory service and after a load from disk.

Free memory is that of a small machine of the tests': what the service says that it holds and what the model keeps in
memory of its own are in use. On this machine other processes would decide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from modelexpress.gms import client
from tests.sglang.sources import keeping, new_registry
from tests.support.redis_server import free_port
from tests.support.sglang_cpu.harness import Harness
from tests.support.sglang_cpu.isolated import IsolatedCall, run_isolated, run_together
from tests.support.sglang_cpu.model_cache import ModelCache

pytestmark = [pytest.mark.sglang, pytest.mark.nixl]

GIB = 1 << 30
MACHINE_NBYTES = 96 * 1024 * 1024


class Pools:
    """What pools were given, in bytes: `budgets`. Free memory is this machine's, or this device's."""

    def __init__(self, gms: str) -> None:
        from sglang.srt.mem_cache import kv_cache_configurator as pools

        self._gms = gms
        self.private_nbytes = 0
        self.budgets: list[int] = []
        profile = pools.KVCacheConfigurator._profile_available_bytes

        def profile_and_remember(configurator: object, pre_model_load_memory: float) -> int:
            self.budgets.append(profile(configurator, pre_model_load_memory))
            return self.budgets[-1]

        pools.KVCacheConfigurator._profile_available_bytes = profile_and_remember

    def service_nbytes(self) -> int:
        return client.status(self._gms).used_nbytes


class Machine(Pools):
    """One whose free memory is what SGLang measures: nobody else is on it."""

    def __init__(self, gms: str) -> None:
        super().__init__(gms)
        from sglang.srt.distributed import bootstrap
        from sglang.srt.mem_cache import kv_cache_configurator as pools

        bootstrap.get_available_gpu_memory = pools.get_available_gpu_memory = self._free_gib

    def _free_gib(self, *_: object, distributed: bool = False, cpu_group: object = None, **__: object) -> float:
        free = torch.tensor((MACHINE_NBYTES - self.service_nbytes() - self.private_nbytes) / GIB, dtype=torch.float64)
        if distributed:
            dist.all_reduce(free, op=dist.ReduceOp.MIN, group=cpu_group)
        return free.item()


def started(
    harness: Harness, machine: Pools, *, after: Callable[[object], None] = lambda runner: None, **options: str
) -> dict[str, object]:
    """What a runner's start comes to, with these MX_* options; SGLang's steps as its scheduler makes them."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    for name in [name for name in os.environ if name.startswith("MX_")]:
        del os.environ[name]
    os.environ.update({f"MX_{name.upper()}": value for name, value in options.items()})
    machine.private_nbytes = 0
    held_nbytes = machine.service_nbytes()
    runner = ModelRunner(
        model_config=harness.model_config,
        mem_fraction_static=0.5,
        gpu_id=harness.tp_rank,
        nccl_port=harness.dist_port,
        server_args=harness.server_args,
    )
    measured = runner.pre_model_load_memory
    report = runner.model.modelexpress.report
    machine.private_nbytes = _private_nbytes(runner.model, report.imported)
    after(runner)
    for _ in range(2):  # a start that is tried again
        runner.account_preloaded_weights(runner.preloaded_weights_bytes)
    runner.alloc_memory_pool()
    return {
        "strategy": report.strategy,
        "attempts": [(each.strategy, each.outcome) for each in report.attempts if each.outcome != "off"],
        "service held": held_nbytes,
        "service holds": machine.service_nbytes(),
        "private": machine.private_nbytes,
        "baseline grew": round((runner.pre_model_load_memory - measured) * GIB),
        "loader says": runner.loader.preloaded_weights_bytes,
        "loader": type(runner.loader).__name__,
        "budget": machine.budgets[-1],
        "tokens": runner.max_total_num_tokens,
    }


def _private_nbytes(model: torch.nn.Module, imported: client.Imported | None) -> int:
    """Distinct storages that do not lie in the service's memory."""
    tensors = (*model.parameters(), *model.buffers())
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(nbytes for at, nbytes in sizes.items() if imported is None or not imported.holds(at))


# --- one rank


def every_start(folder: str, gms: str, registry: str) -> dict[str, dict[str, object]]:
    harness = Harness(folder, load_format="modelexpress", max_total_tokens=None)
    machine = Machine(gms)
    keep = {"gms": gms, "strategies": "gms,disk", "publish": "true"}
    found = {
        "disk": started(harness, machine, strategies="disk"),
        "writer": started(harness, machine, **keep),
        "imported": started(harness, machine, **keep),
    }
    options = {"registry": registry, "strategies": ["disk"], "publish": True}
    source = harness.load("modelexpress", model_loader_extra_config=options)
    with torch.no_grad():
        source.model.embed_tokens.weight[3, 5] += 1  # after the checksums were made
    found["second try"] = started(harness, machine, gms=gms, registry=registry, strategies="rdma,gms,disk")
    source.modelexpress.withdraw()
    return found


@pytest.fixture(scope="module")
def starts(models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    path = str(tmp_path_factory.mktemp("gms") / "gms.sock")
    with keeping(path):
        return run_isolated(every_start, models("llama"), path, new_registry(tmp_path_factory))


@pytest.mark.parametrize("start", ["imported", "second try"])
def test_imported_weights_are_counted_once_and_the_pool_is_that_of_disk(
    start: str, starts: dict[str, dict[str, object]]
) -> None:
    found, disk = starts[start], starts["disk"]

    assert found["strategy"] == "gms"
    assert found["baseline grew"] == found["loader says"] == found["service held"] > 1024 * 1024
    more_nbytes = found["service held"] + found["private"] - disk["private"]  # what an import costs
    assert found["budget"] == pytest.approx(disk["budget"] - more_nbytes, abs=2)
    per_token = disk["budget"] / disk["tokens"]
    assert abs(disk["tokens"] - found["tokens"]) <= more_nbytes / per_token + 1
    assert found["service held"] / 2 > 20 * (more_nbytes + per_token)  # a pool without the count would be seen


def test_the_first_try_did_fail(starts: dict[str, dict[str, object]]) -> None:
    assert starts["second try"]["attempts"] == [["rdma", "failed"], ["gms", "loaded"]]


def test_a_writer_counts_nothing(starts: dict[str, dict[str, object]]) -> None:
    """It staged and moved weights that it allocated after free memory was measured."""
    writer = starts["writer"]

    assert (writer["strategy"], writer["service held"]) == ("disk", 0)
    assert writer["service holds"] > 1024 * 1024
    assert writer["baseline grew"] == writer["loader says"] == 0
    assert starts["disk"]["baseline grew"] == starts["disk"]["loader says"] == 0


# --- by SGLang's own route


def native_start(folder: str, gms: str, registry: str) -> list[dict[str, object]]:
    harness = Harness(
        folder,
        load_format="remote_instance",
        remote_instance_weight_loader_backend="modelexpress",
        modelexpress_config=f'{{"url": "{registry}"}}',
        max_total_tokens=None,
    )
    machine = Machine(gms)
    keep = {"gms": gms, "strategies": "gms,disk", "publish": "true"}
    return [started(harness, machine, **keep) for _ in range(2)]


def test_the_native_route_tells_sglangs_own_loader(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path / "gms.sock")
    with keeping(path):
        writer, imported = run_isolated(native_start, models("llama"), path, new_registry(tmp_path_factory))

    assert (writer["strategy"], imported["strategy"]) == ("disk", "gms")
    assert imported["loader"] == "RemoteInstanceModelLoader"
    assert writer["loader says"] == writer["baseline grew"] == 0
    assert imported["loader says"] == imported["baseline grew"] == imported["service held"] > 1024 * 1024


# --- two ranks, one of which imported


def rank_start(folder: str, gms: str, tp_rank: int, dist_port: int) -> dict[str, object]:
    harness = Harness(
        folder, load_format="modelexpress", tp_size=2, tp_rank=tp_rank, dist_port=dist_port, max_total_tokens=None
    )
    machine = Machine(gms)
    # Only the first rank's weights are in the service, and only that rank knows of it.
    options = {"strategies": "disk"} if tp_rank else {"gms": gms, "strategies": "gms,disk", "publish": "true"}
    started(harness, machine, **options)
    return started(harness, machine, **options)


def test_two_ranks_agree_when_one_of_them_imported(models: ModelCache, tmp_path: Path) -> None:
    path, port = str(tmp_path / "gms.sock"), free_port()
    with keeping(path):
        calls = [IsolatedCall(rank_start, models("llama"), path, tp_rank, port) for tp_rank in range(2)]
        first, second = run_together(calls)

    assert (first["strategy"], second["strategy"]) == ("gms", "disk")
    assert first["baseline grew"] == second["baseline grew"] == first["service held"] > 512 * 1024
    assert first["tokens"] == second["tokens"]
