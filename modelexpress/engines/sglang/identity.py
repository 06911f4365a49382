"""Which weights one SGLang rank wants: the checkpoint, and every setting that changes what is made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sglang
import torch

from modelexpress.config import Config
from modelexpress.errors import NotAvailable
from modelexpress.identity import content_of
from modelexpress.manifest import WeightsIdentity

# Changes when this adapter lays a model out in another way, so that old and new do not mix.
_ADAPTER_VERSION = "1"

# Server arguments that choose kernels and placements, and with them the layout or the values of processed weights.
_ARGUMENTS = (
    "attention_backend",
    "bf16_gemm_backend",
    "decode_attention_backend",
    "disable_shared_experts_fusion",
    "enable_dense_mlp_attn_tp",
    "enable_dp_lm_head",
    "enable_fp32_lm_head",
    "enable_shared_experts_attn_tp",
    "enforce_shared_experts_fusion",
    "ep_num_redundant_experts",
    "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "model_impl",
    "modelopt_quant",
    "moe_a2a_backend",
    "moe_dense_tp_size",
    "moe_runner_backend",
    "prefill_attention_backend",
    "quantization_param_path",
    "shared_experts_tp_size",
    "speculative_moe_a2a_backend",
    "speculative_moe_runner_backend",
    "torchao_config",
)
# Ranks and sizes beside those that the identity has fields for.
_PLACES = ("attn_cp", "attn_dcp", "attn_tp", "moe_dp", "moe_tp")
# Where a checkpoint lies and what wrote it: no part of what the model is.
_NOT_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version")


def sglang_identity(
    checkpoint: Path, config: Config, model_config: Any, *, device: torch.device, draft_index: int | None
) -> WeightsIdentity:
    """The identity of the weights of this rank, as it is configured now.

    Raises:
        NotAvailable: it cannot be named: SGLang does not say its ranks, experts or tensors move at run time, or
            the checkpoint cannot be named.
    """
    arguments = server_arguments()
    _refuse_moving_weights(arguments)
    model, revision = content_of(checkpoint, config)
    extra = {name: _text(arguments[name]) for name in _ARGUMENTS if name in arguments}
    for place in _PLACES:
        extra[place] = "{} of {}".format(*_place(place))
    extra["adapter"] = _ADAPTER_VERSION
    extra["architecture"] = ",".join(model_config.hf_config.architectures or ())
    extra["config"] = _config_digest(model_config.hf_config)
    extra["context_length"] = _text(getattr(model_config, "context_len", None))
    extra["device"] = _device_kind(device)
    extra["draft_index"] = _text(draft_index)
    tp_rank, tp_size = _place("tp")
    pp_rank, pp_size = _place("pp")
    ep_rank, ep_size = _place("moe_ep")
    dp_rank, dp_size = _place("attn_dp")
    return WeightsIdentity(
        model=model,
        revision=revision,
        engine="sglang",
        engine_version=sglang.__version__,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization or "none",
        role="draft" if getattr(model_config, "is_draft_model", False) else "target",
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        ep_rank=ep_rank,
        ep_size=ep_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        extra=tuple(extra.items()),
    )


def server_arguments() -> Mapping[str, Any]:
    """SGLang's arguments as they are in force in this process.

    Raises:
        NotAvailable: this SGLang does not say them.
    """
    try:
        from sglang.srt.runtime_context import get_context
    except ImportError as exc:
        raise NotAvailable(
            f"SGLang {sglang.__version__} does not say its settings ({exc}); 0.5.14 and later do"
        ) from exc
    context = get_context()
    resolved: Mapping[str, Any] = (
        context.resolved_server_args_dict()
        if hasattr(context, "resolved_server_args_dict")
        else vars(context.server_args)
    )
    return resolved


def _refuse_moving_weights(arguments: Mapping[str, Any]) -> None:
    """Weights that SGLang moves or replaces while it serves are neither taken from others nor given to them."""
    moving = {
        "enable_eplb": "experts are rebalanced while the server runs",
        "cpu_offload_gb": "weights are moved between host and device while the server runs",
        "offload_group_size": "weights are moved between host and device while the server runs",
        "elastic_ep_backend": "experts move when ranks join",
    }
    for name, reason in moving.items():
        value = arguments.get(name)
        if value and value != -1:
            raise NotAvailable(f"{name} is {value!r}: {reason}, so that no other process can share this layout")
    if arguments.get("init_expert_location", "trivial") != "trivial":
        raise NotAvailable("init_expert_location places experts by a file, which other ranks may not have")


def _place(axis: str) -> tuple[int, int]:
    """(rank, size) on one axis of parallelism."""
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        size = getattr(parallel, f"{axis}_size")
        return (getattr(parallel, f"{axis}_rank") if size > 1 else 0), size
    except (ImportError, AttributeError, RuntimeError, ValueError) as exc:
        raise NotAvailable(f"SGLang {sglang.__version__} does not say its {axis} rank and size: {exc}") from exc


def _config_digest(hf_config: Any) -> str:
    """Of the model's configuration: rotary caches and the like are made from it, and from nothing else."""
    fields = {name: value for name, value in hf_config.to_dict().items() if name not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _device_kind(device: torch.device) -> str:
    """What kernels are chosen by: weights are repacked for it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}"
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def _text(value: object) -> str:
    return "none" if value is None else str(value)
