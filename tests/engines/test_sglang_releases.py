"""The pool-sizing code of real SGLang releases, hooked: a pool is as large after an import as after a load from disk.

Run as they are written: the scheduler's and worker's calls, the runner's, and the formula of the budget. Not run: what
turns the budget into tensors.
"""

import gc
import logging
import math
from types import SimpleNamespace

import pytest

from modelexpress.engines.sglang import memory
from tests.engines.sglang_memory import GIB, Device, install_tree, loaded
from tests.support.sglang_releases import NoRelease, excerpt, release

RELEASES = {"0.5.13.post1": "argument", "0.5.15.post1": "runner", "0.5.18": "runner", "0.5.23": "loader"}
FRACTION = 0.875
WEIGHTS, DRAFT, OTHER = 3 * GIB, GIB, GIB // 4
# What an import costs beside its weights: copies of what is written to, and gaps in the segments.
PRIVATE, GAPS = GIB // 64, GIB // 128

_SCHEDULE = SimpleNamespace(mem_fraction_static=FRACTION, prefill_max_requests=None, max_mamba_cache_size=None)
_PREFILL = SimpleNamespace(full_prefill_max_req=None, backend=None)
_EXEC = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=_PREFILL)))
_ALONE = SimpleNamespace(world_size=1, cpu_group=None)


def names_for(device):
    """What the methods find as globals: settings, one rank, and a device whose memory is known."""
    return {
        "Backend": SimpleNamespace(FULL="full"),
        "gc": gc,
        "get_available_gpu_memory": device.free_gib,
        "get_disagg": lambda: SimpleNamespace(disaggregation_mode="null"),
        "get_exec": lambda: _EXEC,
        "get_mm": lambda: SimpleNamespace(mm_feature_transport=None),
        "get_parallel": lambda: SimpleNamespace(launch_world_size=1, world_group=_ALONE),
        "get_schedule": lambda: _SCHEDULE,
        "get_world_group": lambda: _ALONE,
        "install_canary": lambda **_: None,
        "kv_cache_builder": SimpleNamespace(resolve_decode_retraction_backup=lambda **_: None),
        "logger": logging.getLogger(__name__),
        "math": math,
        "mm_runtime_reservation_gb": lambda **_: 0.0,
    }


class Pools:
    """What a runner has when its pool is made, in any release; `budget` is what its pool gets, in bytes."""

    spec_algorithm = SimpleNamespace(is_none=lambda: True)
    server_args = SimpleNamespace(mm_feature_transport=None)
    model_config = SimpleNamespace(is_multimodal=False)
    mem_fraction_static = FRACTION
    device, gpu_id = "cuda", 0
    mambaish_config = memory_pool_config = req_to_token_pool = token_to_kv_pool_allocator = None
    post_capture_kv_active = enable_hisparse = is_hybrid_swa = False
    max_running_requests = 1
    max_token_pool_size = effective_max_total_num_tokens = effective_logical_max_total_num_tokens = 4096
    _token_oracle_manager = None

    def __init__(self, model, loader, baseline, *, draft):
        self.model, self.loader = model, loader
        self.pre_model_load_memory = baseline
        self.is_draft_worker = draft

    def _resolve_memory_pool_config(self, pre_model_load_memory):
        self.budget = self._profile_available_bytes(pre_model_load_memory)

    def _apply_memory_pool_config(self, config):
        pass

    def maybe_init_ngram_embedding(self):
        pass

    init_routed_experts_capturer = init_indexer_capturer = _init_post_memory_pool_components = (
        maybe_init_ngram_embedding
    )

    def init_kv_cache_configurator(self, *_):
        def configure(*, pre_model_load_memory):
            self._resolve_memory_pool_config(pre_model_load_memory)
            nothing = dict.fromkeys(("max_total_num_tokens", "req_to_token_pool", "token_to_kv_pool"))
            nothing |= dict.fromkeys(("token_to_kv_pool_allocator", "memory_pool_config", "unified_memory_pool"))
            return SimpleNamespace(max_running_requests=1, **nothing)

        self.kv_cache_configurator = SimpleNamespace(configure=configure)


class Limits:
    """What a worker compares its runner's pool with."""

    model_config = SimpleNamespace(context_len=4096)
    ps = SimpleNamespace(attn_dcp_size=1)


def classes_of(version, device):
    """Runner, Loader, Scheduler and Worker with the methods of the release that size the pool."""
    try:
        sglang = release(version) / "sglang/srt"
    except NoRelease as exc:
        pytest.skip(str(exc))
    names = names_for(device)
    mixin = sglang / "model_executor/model_runner_kv_cache_mixin.py"
    if mixin.exists():
        sizing = excerpt(mixin, "ModelRunnerKVCacheMixin", ["_profile_available_bytes", "init_memory_pool"], names)
    else:
        configurator = sglang / "mem_cache/kv_cache_configurator.py"
        sizing = excerpt(configurator, "KVCacheConfigurator", ["_profile_available_bytes"], names)
    methods = ["alloc_memory_pool", "account_preloaded_weights", "preloaded_weights_bytes"]
    runner = excerpt(sglang / "model_executor/model_runner.py", "ModelRunner", methods, names, [Pools, sizing])
    loader = excerpt(sglang / "model_loader/loader.py", "BaseModelLoader", ["preloaded_weights_bytes"], names)
    pools = ["init_target_memory_pool", "init_memory_pools"]
    scheduler = excerpt(sglang / "managers/scheduler.py", "Scheduler", pools, names)
    workers = sglang / "managers/tp_worker.py"
    base = excerpt(workers, "BaseTpWorker", ["preloaded_weights_bytes"], names, [Limits])
    worker = excerpt(workers, "TpModelWorker", ["alloc_memory_pool"], names, [base])
    return SimpleNamespace(Runner=runner, Loader=loader, Scheduler=scheduler, Worker=worker)


def budget(version, monkeypatch, *, imported, draft=None, native=False, attempts=1, hooked=True):
    """Bytes for the pool of a server that started: every step of the release's that decides about them.

    `draft` is the generation under a draft model of its own size; the target lies on generation 1.
    """
    device = Device()
    classes = classes_of(version, device)
    install_tree(monkeypatch, version, Runner=classes.Runner, Loader=classes.Loader, Scheduler=classes.Scheduler)
    generations = {1: WEIGHTS + GAPS} | ({draft: WEIGHTS + GAPS if draft == 1 else DRAFT + GAPS} if draft else {})
    if imported:
        device.used |= {f"generation {each}": nbytes for each, nbytes in generations.items()}
    kind = memory.install()
    assert kind == RELEASES[version]
    if not hooked:
        memory.uninstall()

    def start(generation, weights_nbytes, *, is_draft):
        baseline = device.free_gib()
        nbytes = generations[generation] if imported else 0
        device.used["draft" if is_draft else "target"] = PRIVATE if imported else weights_nbytes
        loader = classes.Loader()
        if not native:
            memory.tell(loader, loaded(nbytes, generation).modelexpress.report)
        return classes.Runner(loaded(nbytes, generation), loader, baseline, draft=is_draft)

    def worker_of(runner):
        worker = classes.Worker()
        worker.model_runner, worker.model_runner_list = runner, []
        return worker

    target = start(1, WEIGHTS, is_draft=False)
    if kind == "argument":
        device.used["other"] = OTHER
        for _ in range(attempts):
            target.init_memory_pool(target.pre_model_load_memory)
        return target.budget
    scheduler = classes.Scheduler()
    scheduler.tp_worker, scheduler.draft_worker = worker_of(target), None
    if draft:
        scheduler.draft_worker = worker_of(start(draft, DRAFT, is_draft=True))
        scheduler.draft_worker.draft_parallel_layout = None
    device.used["other"] = OTHER
    for _ in range(attempts):
        scheduler.init_target_memory_pool()
    return target.budget


@pytest.mark.parametrize("version", RELEASES)
def test_a_pool_is_as_large_as_from_disk(version, monkeypatch):
    from_disk = budget(version, monkeypatch, imported=False)

    assert from_disk == 16 * GIB * FRACTION - WEIGHTS - OTHER
    assert budget(version, monkeypatch, imported=True) == from_disk - PRIVATE - GAPS
    assert budget(version, monkeypatch, imported=True, attempts=3) == from_disk - PRIVATE - GAPS
    assert budget(version, monkeypatch, imported=True, native=True, attempts=2) == from_disk - PRIVATE - GAPS
    too_large = (1 - FRACTION) * (WEIGHTS + GAPS)
    assert budget(version, monkeypatch, imported=True, native=True, hooked=False) == (
        from_disk - PRIVATE - GAPS + too_large
    )


@pytest.mark.parametrize("version", [version for version, kind in RELEASES.items() if kind != "argument"])
@pytest.mark.parametrize("native", [False, True])
def test_drafts_are_counted_with_their_target(native, version, monkeypatch):
    from_disk = budget(version, monkeypatch, imported=False, draft=2)
    assert from_disk == 16 * GIB * FRACTION - WEIGHTS - DRAFT - OTHER

    own = budget(version, monkeypatch, imported=True, draft=2, native=native, attempts=2)
    shared = budget(version, monkeypatch, imported=True, draft=1, native=native, attempts=2)

    assert own == from_disk - 2 * (PRIVATE + GAPS)
    assert shared == from_disk + DRAFT - 2 * PRIVATE - GAPS
