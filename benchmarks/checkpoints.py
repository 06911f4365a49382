"""Checkpoints for demos and benchmarks: trained weights from a package, and generated ones of any size."""

from __future__ import annotations

import json
from importlib.metadata import files
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def silero_vad() -> Path:
    """The trained weights that the PyPI package silero-vad ships as safetensors (1.2 MB)."""
    for each in files("silero-vad") or ():
        if each.name == "silero_vad_16k.safetensors":
            return Path(str(each.locate()))
    raise SystemExit("the installed silero-vad holds no silero_vad_16k.safetensors; run `make setup` again")


def llama_shapes(layers: int, hidden: int, intermediate: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes as a Llama checkpoint has them."""
    key_value = hidden // 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
            f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.k_proj.weight": (key_value, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key_value, hidden),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def write_llama(folder: Path, *, nbytes: int, shards: int = 4, seed: int = 0) -> Path:
    """Write a bf16 Llama-shaped checkpoint of about `nbytes` with its index; keeps one that is there already."""
    hidden, intermediate, vocabulary = 2048, 5632, 8192
    of_layer = sum(
        rows * (columns[0] if columns else 1)
        for name, (rows, *columns) in llama_shapes(1, hidden, intermediate, vocabulary).items()
        if ".layers." in name
    )
    layers = max(1, round((nbytes / 2 - 2 * hidden * vocabulary) / of_layer))
    return _write(folder, llama_shapes(layers, hidden, intermediate, vocabulary), layers, shards=shards, seed=seed)


def write_300_tensors(folder: Path) -> Path:
    """The checkpoint that files are measured with: 1.97 GB of bf16 in 300 tensors, 4 shards; kept as `write_llama`."""
    return _write(folder, llama_shapes(33, 1536, 4992, 8192), 33, shards=4, seed=0)


def _write(folder: Path, shapes: dict[str, tuple[int, ...]], layers: int, *, shards: int, seed: int) -> Path:
    if (folder / INDEX).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * 2
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    batch: dict[str, torch.Tensor] = {}
    number, held = 1, 0
    for position, (name, shape) in enumerate(shapes.items(), start=1):
        batch[name] = torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)
        held += batch[name].nbytes
        if (held >= total / shards and number < shards) or position == len(shapes):
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
            save_file(batch, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(batch, file)
            batch, held, number = {}, 0, number + 1
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers})
    )
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder
