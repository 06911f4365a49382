"""What a scheduler of SGLang's does up to a loaded model, in this process and without a server.

SGLang builds its parallel groups once in a process: one harness, so one model folder, a process. Tests use it in
`isolated.run_isolated`. Importing SGLang takes 10 to 20 s, a load after that 0.2 s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.redis_server import free_port
from tests.support.sglang_cpu.environment import device, platform_settings, threads_binding

if TYPE_CHECKING:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from torch import nn

_SERVER_ARGS = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 4096,
    "disable_overlap_schedule": True,
    "host": "127.0.0.1",
}


class Harness:
    """Plugins, arguments, publication, parallel groups and layer settings, in the order of `run_scheduler_process`.

    `server_args` are fields of SGLang's ServerArgs, such as load_format, quantization or tp_size. For tp_size above
    1, one process a rank makes a harness with its `tp_rank` and the same `dist_port`.

    `model_config`, `load_config` and `loader` are SGLang's; the last two are of the last load.
    """

    def __init__(
        self, model_dir: Path | str, *, tp_rank: int = 0, dist_port: int | None = None, **server_args: object
    ) -> None:
        _prepare_environment(int(server_args.get("tp_size", 1)))
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self.tp_rank = tp_rank
        self.dist_port = free_port() if dist_port is None else dist_port
        self.server_args = _publish(model_dir, tp_rank, server_args)
        self.model_config = _bring_up(self.server_args, self.dist_port)
        self.load_config: LoadConfig | None = None
        self.loader: object = None

    def load(self, load_format: object = None, **load_config_fields: object) -> nn.Module:
        """A freshly loaded model, by the load format of the server arguments or another.

        Runs what ModelRunner.load_model runs. `load_config_fields` replace fields of the LoadConfig that SGLang
        builds from the server arguments.
        """
        from sglang.srt.model_executor.model_runner_components.load_model_utils import load_model_with_memory_saver
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        self.load_config = self._load_config(load_format, load_config_fields)
        loaded = load_model_with_memory_saver(
            model_config=self.model_config,
            load_config=self.load_config,
            device=device(),
            gpu_id=self.tp_rank,
            memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
            is_draft_worker=False,
        )
        self.loader = loaded.loader
        return loaded.model

    def load_native(self, url: str | None = None, transport: str = "nixl", **load_config_fields: object) -> nn.Module:
        """A model by SGLang's own route to ModelExpress; `url` and `transport` as in --modelexpress-config."""
        return self.load(
            "remote_instance",
            remote_instance_weight_loader_backend="modelexpress",
            modelexpress_url=url,
            modelexpress_transport=transport,
            **load_config_fields,
        )

    def runner(self) -> ModelRunner:
        """The real ModelRunner with memory pools and attention back end; loads as the server arguments say."""
        from sglang.srt.model_executor.model_runner import ModelRunner

        runner = ModelRunner(
            model_config=self.model_config,
            mem_fraction_static=_SERVER_ARGS["mem_fraction_static"],
            gpu_id=self.tp_rank,
            nccl_port=self.dist_port,
            server_args=self.server_args,
        )
        runner.account_preloaded_weights(runner.preloaded_weights_bytes)
        runner.alloc_memory_pool()
        runner.init_attention_backends()
        runner.init_cuda_graphs()  # on a CPU: eager execution
        return runner

    def _load_config(self, load_format: object, fields: dict[str, object]) -> LoadConfig:
        from sglang.srt.model_executor.model_runner_components.load_model_utils import build_load_config

        built = build_load_config(
            server_args=self.server_args,
            tp_rank=self.tp_rank,
            load_format=load_format,
            remote_instance_weight_transporter_engine=None,
            remote_instance_weight_transporter_session_id="",
            draft_model_idx=None,
            weight_cache_mode="off",
            weight_cache_socket=None,
        )
        return replace(built, **fields) if fields else built


def generate(runner: ModelRunner, ids: Sequence[int] = (5, 6, 7, 8), max_new_tokens: int = 16) -> list[int]:
    """Greedy tokens of a `Harness.runner()`, as the server answers; empties the runner's cache afterwards."""
    from sglang.benchmark import one_batch

    requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, len(ids), [list(ids)])
    token, _, batch = one_batch.extend(requests, runner)
    tokens = [int(token)]
    while len(tokens) < max_new_tokens:
        token, _ = one_batch.decode(token, batch, runner)
        tokens.append(int(token))
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    return tokens


def _prepare_environment(tp_size: int) -> None:
    """What SGLang reads when it is imported, for a caller that was not started by `isolated`."""
    for name, value in platform_settings().items():
        os.environ.setdefault(name, value)
    if tp_size > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", threads_binding(tp_size))


def _publish(model_dir: Path | str, tp_rank: int, given: dict[str, object]) -> ServerArgs:
    """Resolved server arguments, published to the process as a scheduler's."""
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import ServerArgs

    defaults = _SERVER_ARGS | {"device": device()} | ({} if device() == "cpu" else {"disable_cuda_graph": True})
    server_args = ServerArgs(model_path=str(model_dir), **(defaults | given))
    server_args.resolve_once()
    world_rank = spawn_world_rank(server_args, tp_rank=tp_rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, dp_rank=0, gpu_id=tp_rank))
    return server_args


def _bring_up(server_args: ServerArgs, dist_port: int) -> ModelConfig:
    """Parallel groups and the settings of layers, as Scheduler.__init__ does before it loads."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config

    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device=device(), dist_port=dist_port)
    bootstrap.init_layer_runtime(model_config=model_config)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_fp4_gemm_config()
    initialize_bf16_gemm_config()
    return model_config
