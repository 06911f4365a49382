"""Folders that do not fit the model, on the real loading code of SGLang: refused by name, before a byte is written.

SGLang's own loader starts with several of them, and answers with other tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.sglang_cpu.harness import Harness
from tests.support.sglang_cpu.isolated import IsolatedCall, run_together
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.oracle import tensor_digests

pytestmark = pytest.mark.sglang

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.2.mlp.down_proj.weight"
NORM = "model.norm.weight"


def without(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def with_tensor(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=torch.bfloat16)})


# What is done to the tensors, and what the error says of it.
LLAMA = {
    "a layer": (
        without("layers.3."),
        ["lacks 9 tensors", "'model.layers.3.mlp.up_proj.weight'", "layers.3.self_attn.k"],
    ),
    "one of a fused three": (
        without("layers.1.self_attn.k_proj"),
        ["lacks 1", "'model.layers.1.self_attn.k_proj.weight'"],
    ),
    "one of a fused two": (without("layers.0.mlp.up_proj"), ["lacks 1", "'model.layers.0.mlp.up_proj.weight'"]),
    "the norm": (without(NORM), ["lacks 1", f"'{NORM}'"]),
    "the head": (without("lm_head"), ["lacks 1", "'lm_head.weight'"]),
    "row-parallel and short": (changed(DOWN, lambda t: t[:, :500]), [f"'{DOWN}'", "[256, 500]", "[256, 512]"]),
    "one dimension": (changed(DOWN, lambda t: t[0]), [f"'{DOWN}'", "[512]", "[256, 512]"]),
    "one row": (changed(DOWN, lambda t: t[:1]), [f"'{DOWN}'", "[1, 512]", "[256, 512]"]),
    "fused and short": (changed("model.layers.2.self_attn.q_proj.weight", lambda t: t[:200]), ["[200, 256]", "q_proj"]),
    "one element": (changed(NORM, lambda t: t[:1]), [f"'{NORM}'", "[1]"]),
    "a scalar": (changed(NORM, lambda t: t[0]), [f"'{NORM}'", "[]"]),
    "a short vocabulary": (changed("model.embed_tokens.weight", lambda t: t[:500]), ["embed_tokens", "[500, 256]"]),
    "complex": (changed(DOWN, lambda t: t.to(torch.complex64)), [f"'{DOWN}'", "complex64", "bfloat16"]),
    "integers": (changed(DOWN, lambda t: t.to(torch.int32)), [f"'{DOWN}'", "int32", "bfloat16"]),
    "eight bits without a scale": (changed(DOWN, lambda t: t.to(torch.float8_e4m3fn)), [f"'{DOWN}'", "float8_e4m3fn"]),
    "a bias that nobody reads": (
        with_tensor("model.layers.1.self_attn.q_proj.bias", 256),
        ["does not use", "q_proj.bias"],
    ),
}
EXPERTS = {
    "an expert": (
        without("layers.1.block_sparse_moe.experts.2."),
        ["lacks 3", "layers.1.block_sparse_moe.experts.2.w3"],
    ),
    "a third of an expert": (without("layers.0.block_sparse_moe.experts.3.w1"), ["lacks 1", "experts.3.w1.weight"]),
}
LATENT = {
    "half of a fused projection": (without("layers.2.self_attn.kv_a_proj_with_mqa"), ["kv_a_proj_with_mqa"]),
    "what is derived from": (without("layers.1.self_attn.kv_b_proj"), ["lacks 1", "layers.1.self_attn.kv_b_proj"]),
    "a router's bias": (without("layers.3.mlp.gate.e_score"), ["lacks 1", "layers.3.mlp.gate.e_score_correction_bias"]),
}
SCALES = {"a scale": (without("layers.1.mlp.gate_proj.weight_scale_inv"), ["lacks 1", "gate_proj.weight_scale_inv"])}
BROKEN = {"llama": LLAMA, "mixtral": EXPERTS, "deepseek_v3": LATENT, "qwen3_fp8": SCALES}


def variant(model: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a model in one file, with its tensors changed."""
    tensors = {name: each for shard in sorted(model.glob("*.safetensors")) for name, each in load_file(shard).items()}
    change(tensors)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusals(good: str, folders: dict[str, str]) -> dict[str, object]:
    """What each folder is refused with, and whether the model could be loaded afterwards as if nothing had been."""
    harness = Harness(good)
    auto = tensor_digests(harness.load("auto"))
    said: dict[str, object] = {}
    for name, folder in folders.items():
        harness.model_config.model_path = folder
        try:
            harness.load("modelexpress", model_loader_extra_config={"strategies": ["disk"]})
        except Exception as exc:
            said[name] = f"{type(exc).__name__}: {exc}"
    harness.model_config.model_path = good
    said["good"] = tensor_digests(harness.load("modelexpress")) == auto
    return said


@pytest.fixture(scope="module")
def said(models: ModelCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    root = tmp_path_factory.mktemp("broken")
    calls = []
    for kind, cases in BROKEN.items():
        folders = {name: variant(models(kind), root / kind / name, change) for name, (change, _) in cases.items()}
        calls.append(IsolatedCall(refusals, models(kind), folders))
    return dict(zip(BROKEN, run_together(calls), strict=True))


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in BROKEN.items() for case in cases])
def test_a_checkpoint_that_does_not_fit_is_refused(kind: str, case: str, said: dict[str, dict[str, object]]) -> None:
    _, expected = BROKEN[kind][case]

    message = said[kind].get(case, "it was loaded")

    assert "CheckpointError" in message
    assert all(each in message for each in expected), message
    assert said[kind]["good"]


# --- what fits, though it looks odd


def accepted(good: str, folders: dict[str, str]) -> dict[str, object]:
    harness = Harness(good)
    auto = tensor_digests(harness.load("auto"))
    equal: dict[str, object] = {}
    for name, folder in folders.items():
        harness.model_config.model_path = folder
        equal[name] = tensor_digests(harness.load("modelexpress")) == auto
    return equal


FITTING = {
    "the same in one file": lambda tensors: None,
    "tables that are computed anew": with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 32),
    "layers of a draft model": with_tensor("model.layers.4.mlp.down_proj.weight", 256, 512),
    "a part that this model has not": with_tensor("vision_tower.patch.weight", 4),
    "a wider type": changed(DOWN, lambda t: t.float()),
}


def test_a_checkpoint_that_fits_is_loaded(models: ModelCache, tmp_path: Path) -> None:
    folders = {name: variant(models("llama"), tmp_path / name, change) for name, change in FITTING.items()}

    [equal] = run_together([IsolatedCall(accepted, models("llama"), folders)])

    assert equal == dict.fromkeys(FITTING, True)


# --- files and folders


def broken_file(model: Path, folder: Path, how: str) -> Path:
    shutil.copytree(model, folder)
    shards = sorted(folder.glob("*.safetensors"))
    if how == "cut":
        shards[-1].write_bytes(shards[-1].read_bytes()[:-4096])
    elif how == "gone":
        shards[1].unlink()
    elif how == "empty":
        shards[1].write_bytes(b"")
    elif how == "pointer":
        shards[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1\n")
    elif how == "escape":
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"][NORM] = "../other.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


FILES = {"cut": "bytes", "gone": "missing", "empty": "0 bytes", "pointer": "LFS", "escape": "../other.safetensors"}


def test_broken_files_are_refused_by_name(models: ModelCache, tmp_path: Path) -> None:
    folders = {how: broken_file(models("llama"), tmp_path / how, how) for how in FILES}

    [said] = run_together([IsolatedCall(refusals, models("llama"), folders)])

    assert said.pop("good")
    for how, message in said.items():
        assert "CheckpointError" in message
        assert FILES[how] in message, message
    assert set(said) == set(FILES)
