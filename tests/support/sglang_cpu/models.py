"""Small random models that the real SGLang loads, written tensor by tensor without transformers.

    python -m tests.support.sglang_cpu.models KIND OUT [--seed N]

A tensor's values depend on its name, its shape and the seed alone, so the same command makes the same bytes. The
weights are wider than a trained model's: answers then depend on every layer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

VOCABULARY = 512
FP8_BLOCK = 128
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_GAIN = 1.5
"""Of a matrix: its outputs have this standard deviation for inputs of 1."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint before it has values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Kind:
    """A model: its config.json, its tensors in file order, and how they are spread over files."""

    config: Mapping[str, object]
    tensors: Callable[[Mapping[str, object]], Iterator[Tensor]]
    shard_nbytes: int | None = 2_000_000
    """A file is closed when the next tensor would exceed this; None is one file and no index."""
    fp8: bool = False


@dataclass(slots=True)
class _Shard:
    """What goes into one file; `nbytes` is of the values."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    nbytes: int = 0


def make_model(kind: str, out: Path, *, seed: int = 0) -> Path:
    """Write a model that must not be there yet; returns `out`. Peak memory is one shard.

    Raises:
        ValueError: there is no such kind.
        FileExistsError: `out` exists.
    """
    recipe = _recipe(kind)
    out.mkdir(parents=True)
    _write_json(out / "config.json", recipe.config)
    _write_tokenizer(out)
    _write_shards(out, recipe, seed)
    return out


def make_adapter(out: Path, *, seed: int = 0, lora_rank: int = 4) -> Path:
    """Write a LoRA adapter for the attention of `llama`, as PEFT would; `out` must not be there yet."""
    out.mkdir(parents=True)
    save_file(
        {each.name: _values(each, seed) for each in _adapter_tensors(lora_rank)}, out / "adapter_model.safetensors"
    )
    _write_json(out / "adapter_config.json", _adapter_config(lora_rank))
    return out


def _recipe(kind: str) -> Kind:
    if kind not in KINDS:
        raise ValueError(f"no model kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind]


# --- values


def _values(tensor: Tensor, seed: int) -> torch.Tensor:
    """Norms are around 1, biases around 0, and matrices scaled by their inputs."""
    drawn = torch.randn(tensor.shape, generator=_generator(tensor.name, seed))
    if len(tensor.shape) > 1:
        drawn *= _GAIN / math.sqrt(tensor.shape[-1])
    elif tensor.name.endswith("bias"):
        drawn *= 0.01
    else:
        drawn.mul_(0.1).add_(1.0)
    return drawn.to(tensor.dtype)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _checkpoint_values(tensor: Tensor, seed: int, *, fp8: bool) -> dict[str, torch.Tensor]:
    """A tensor as the checkpoint holds it: one entry, or a quantised weight and its block scales."""
    values = _values(tensor, seed)
    if not (fp8 and _is_linear(tensor.name)):
        return {tensor.name: values}
    weight, scale = _quantize(values)
    return {tensor.name: weight, f"{tensor.name}_scale_inv": scale}


def _is_linear(name: str) -> bool:
    return "proj" in name and name.endswith(".weight")


def _quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 and float32 scales for each block of 128 by 128, as DeepSeek-V3 ships; the last blocks may be cut."""
    rows, columns = values.shape
    down, across = (-(-size // FP8_BLOCK) for size in (rows, columns))
    padded = torch.zeros(down * FP8_BLOCK, across * FP8_BLOCK)
    padded[:rows, :columns] = values.float()
    blocks = padded.reshape(down, FP8_BLOCK, across, FP8_BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / _FP8_MAX
    quantized = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return quantized.to(torch.float8_e4m3fn).contiguous(), scale


# --- files


def _write_shards(out: Path, recipe: Kind, seed: int) -> None:
    """Files under passing names while their number is unknown, then their usual names and an index."""
    weight_map: dict[int, list[str]] = {}
    total_nbytes = 0
    for number, shard in enumerate(_shards(recipe, seed), start=1):
        save_file(shard.values, out / f"{number}.tmp", metadata={"format": "pt"})
        weight_map[number] = list(shard.values)
        total_nbytes += shard.nbytes
    if recipe.shard_nbytes is None:
        (out / "1.tmp").rename(out / "model.safetensors")
        return
    files = {number: f"model-{number:05d}-of-{len(weight_map):05d}.safetensors" for number in weight_map}
    for number, name in files.items():
        (out / f"{number}.tmp").rename(out / name)
    where = {tensor: files[number] for number, names in weight_map.items() for tensor in names}
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": where}
    _write_json(out / "model.safetensors.index.json", index)


def _shards(recipe: Kind, seed: int) -> Iterator[_Shard]:
    limit = math.inf if recipe.shard_nbytes is None else recipe.shard_nbytes
    shard = _Shard()
    for tensor in recipe.tensors(recipe.config):
        values = _checkpoint_values(tensor, seed, fp8=recipe.fp8)
        nbytes = sum(each.nbytes for each in values.values())
        if shard.values and shard.nbytes + nbytes > limit:
            yield shard
            shard = _Shard()
        shard.values |= values
        shard.nbytes += nbytes
    yield shard


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(dict(value), indent=2) + "\n")


def _write_tokenizer(out: Path) -> None:
    """One word a token: `t5 t6` is [5, 6]."""
    special = ("<unk>", "<s>", "</s>")
    vocabulary = {word: at for at, word in enumerate((*special, *(f"t{at}" for at in range(3, VOCABULARY))))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": at, "content": word, "special": True, **flags} for at, word in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    _write_json(out / "tokenizer.json", tokenizer)
    _write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})


# --- tensors by family


def _decoder(
    config: Mapping[str, object],
    attention: Callable[[str, Mapping[str, object]], Iterator[Tensor]],
    feed_forward: Callable[[str, int, Mapping[str, object]], Iterator[Tensor]],
) -> Iterator[Tensor]:
    """The frame that all these models share; `attention` and `feed_forward` fill a layer."""
    hidden = config["hidden_size"]
    yield Tensor("model.embed_tokens.weight", (VOCABULARY, hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield from attention(f"{layer}.self_attn", config)
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        yield from feed_forward(layer, number, config)
    yield Tensor("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (VOCABULARY, hidden))


def _grouped_attention(prefix: str, config: Mapping[str, object]) -> Iterator[Tensor]:
    hidden, head = config["hidden_size"], _head_dim(config)
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield Tensor(f"{prefix}.q_proj.weight", (queries, hidden))
    yield Tensor(f"{prefix}.k_proj.weight", (keys, hidden))
    yield Tensor(f"{prefix}.v_proj.weight", (keys, hidden))
    yield Tensor(f"{prefix}.o_proj.weight", (hidden, queries))


def _normed_attention(prefix: str, config: Mapping[str, object]) -> Iterator[Tensor]:
    yield from _grouped_attention(prefix, config)
    yield Tensor(f"{prefix}.q_norm.weight", (_head_dim(config),))
    yield Tensor(f"{prefix}.k_norm.weight", (_head_dim(config),))


def _latent_attention(prefix: str, config: Mapping[str, object]) -> Iterator[Tensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield Tensor(f"{prefix}.q_a_proj.weight", (queries, hidden))
    yield Tensor(f"{prefix}.q_a_layernorm.weight", (queries,))
    yield Tensor(f"{prefix}.q_b_proj.weight", (heads * (plain + rotary), queries))
    yield Tensor(f"{prefix}.kv_a_proj_with_mqa.weight", (keys + rotary, hidden))
    yield Tensor(f"{prefix}.kv_a_layernorm.weight", (keys,))
    yield Tensor(f"{prefix}.kv_b_proj.weight", (heads * (plain + value), keys))
    yield Tensor(f"{prefix}.o_proj.weight", (hidden, heads * value))


def _gated(prefix: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.gate_proj.weight", (inner, hidden))
    yield Tensor(f"{prefix}.up_proj.weight", (inner, hidden))
    yield Tensor(f"{prefix}.down_proj.weight", (hidden, inner))


def _dense(layer: str, number: int, config: Mapping[str, object]) -> Iterator[Tensor]:
    yield from _gated(f"{layer}.mlp", config["hidden_size"], config["intermediate_size"])


def _qwen_experts(layer: str, number: int, config: Mapping[str, object]) -> Iterator[Tensor]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield Tensor(f"{layer}.mlp.gate.weight", (config["num_experts"], hidden))
    for expert in range(config["num_experts"]):
        yield from _gated(f"{layer}.mlp.experts.{expert}", hidden, inner)


def _mixtral_experts(layer: str, number: int, config: Mapping[str, object]) -> Iterator[Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    moe = f"{layer}.block_sparse_moe"
    yield Tensor(f"{moe}.gate.weight", (config["num_local_experts"], hidden))
    for expert in range(config["num_local_experts"]):
        yield Tensor(f"{moe}.experts.{expert}.w1.weight", (inner, hidden))
        yield Tensor(f"{moe}.experts.{expert}.w2.weight", (hidden, inner))
        yield Tensor(f"{moe}.experts.{expert}.w3.weight", (inner, hidden))


def _deepseek_experts(layer: str, number: int, config: Mapping[str, object]) -> Iterator[Tensor]:
    if number < config["first_k_dense_replace"]:
        yield from _dense(layer, number, config)
        return
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield Tensor(f"{layer}.mlp.gate.weight", (experts, hidden))
    yield Tensor(f"{layer}.mlp.gate.e_score_correction_bias", (experts,), torch.float32)
    for expert in range(experts):
        yield from _gated(f"{layer}.mlp.experts.{expert}", hidden, inner)
    yield from _gated(f"{layer}.mlp.shared_experts", hidden, inner * config["n_shared_experts"])


def _llama(config: Mapping[str, object]) -> Iterator[Tensor]:
    return _decoder(config, _grouped_attention, _dense)


def _qwen3(config: Mapping[str, object]) -> Iterator[Tensor]:
    return _decoder(config, _normed_attention, _dense)


def _qwen3_moe(config: Mapping[str, object]) -> Iterator[Tensor]:
    return _decoder(config, _normed_attention, _qwen_experts)


def _mixtral(config: Mapping[str, object]) -> Iterator[Tensor]:
    return _decoder(config, _grouped_attention, _mixtral_experts)


def _deepseek(config: Mapping[str, object]) -> Iterator[Tensor]:
    return _decoder(config, _latent_attention, _deepseek_experts)


def _head_dim(config: Mapping[str, object]) -> int:
    return config["head_dim"]


# --- an adapter


def _adapter_tensors(lora_rank: int) -> Iterator[Tensor]:
    config = KINDS["llama"].config
    for number in range(config["num_hidden_layers"]):
        for base in _grouped_attention(f"base_model.model.model.layers.{number}.self_attn", config):
            outputs, inputs = base.shape
            prefix = base.name.removesuffix(".weight")
            yield Tensor(f"{prefix}.lora_A.weight", (lora_rank, inputs))
            yield Tensor(f"{prefix}.lora_B.weight", (outputs, lora_rank))


def _adapter_config(lora_rank: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora_rank,
        "lora_alpha": 2 * lora_rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


# --- configurations


def _config(architecture: str, model_type: str, **own: object) -> Mapping[str, object]:
    """config.json of a model of 4 layers, 256 wide, unless `own` says otherwise."""
    return MappingProxyType(
        {
            "architectures": [architecture],
            "model_type": model_type,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | own
    )


def _deepseek_config(**own: object) -> Mapping[str, object]:
    # SGLang's rotary embedding for CPUs insists on rope_scaling here, and its model class on the last group.
    yarn = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    yarn |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    # Inputs of every matrix are a multiple of FP8_BLOCK: SGLang's checksum infers the block size from them.
    shape = {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "head_dim": 64}
    shape |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 128}
    experts |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    experts |= {"routed_scaling_factor": 1.0}
    needed = {"moe_layer_freq": 1, "ep_size": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    needed |= {"rope_scaling": yarn, "num_nextn_predict_layers": 0}
    return _config("DeepseekV3ForCausalLM", "deepseek_v3", **(shape | experts | needed | own))


_FP8 = MappingProxyType(
    {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    }
)

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "llama": Kind(_config("LlamaForCausalLM", "llama"), _llama),
        "llama_tied": Kind(_config("LlamaForCausalLM", "llama", tie_word_embeddings=True), _llama, shard_nbytes=None),
        "qwen3_moe": Kind(
            _config(
                "Qwen3MoeForCausalLM",
                "qwen3_moe",
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=128,
                decoder_sparse_step=1,
                norm_topk_prob=True,
                mlp_only_layers=[],
            ),
            _qwen3_moe,
        ),
        "mixtral": Kind(
            _config(
                "MixtralForCausalLM",
                "mixtral",
                num_hidden_layers=2,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=None,
            ),
            _mixtral,
        ),
        "deepseek_v3": Kind(_deepseek_config(), _deepseek),
        "qwen3_fp8": Kind(_config("Qwen3ForCausalLM", "qwen3", **_FP8), _qwen3, fp8=True),
        "deepseek_v3_fp8": Kind(_deepseek_config(**_FP8), _deepseek, fp8=True),
        "llama_large": Kind(
            _config(
                "LlamaForCausalLM",
                "llama",
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=16,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
            ),
            _llama,
            shard_nbytes=400_000_000,
        ),
    }
)
"""Every kind by name. deepseek_v3_fp8 loads but cannot answer on a CPU; llama_large is 1.5 GB in four files."""

ADAPTER = "llama_lora"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a small random model that SGLang loads")
    parser.add_argument("kind", choices=(*KINDS, ADAPTER))
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.kind == ADAPTER:
        make_adapter(given.out, seed=given.seed)
    else:
        make_model(given.kind, given.out, seed=given.seed)


if __name__ == "__main__":
    main()
