"""SglangAdapter: what modelexpress must know of SGLang's models to build, fill and describe them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.rotary_embedding import factory as rotary
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader import loader as engine
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights
from torch import nn
from transformers import PretrainedConfig

from modelexpress.adapter import EngineAdapter
from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.config import Config
from modelexpress.discovery import Discovery, FoundTensor, discover
from modelexpress.engines.coverage import Expectation, Rehearsed, Weights, load_rehearsed, rehearse
from modelexpress.engines.sglang.identity import sglang_identity
from modelexpress.engines.sglang.resident import ResidentWeights
from modelexpress.errors import CheckpointError, NotAvailable
from modelexpress.manifest import Manifest, WeightsIdentity

# Scales of the kv cache have a value of their own where a checkpoint has none; position ids are not read; orders of
# packed columns are made where a checkpoint keeps them in order.
_OPTIONAL = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".position_ids", "_g_idx", "g_idx_sort_indices")
# Parameters that a class of SGLang's makes, never reads, and that its checkpoints do not have.
_NEVER_READ = {"FalconH1ForCausalLM": (".q_norm.weight", ".k_norm.weight")}
# SGLang gives those of its target to a draft model whose checkpoint has none, after the load.
_OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")
# Of packed weights: what every part of a fused parameter has, and kernels read once or never.
_METADATA = (".g_idx", ".qzeros", ".weight_shape", ".position_ids")
# Methods that pad experts to the tiles of their kernels, and fill them with zeros when they make them.
_WIDENING = ("Mxfp4MoEMethod",)
# Tensors that checkpoints carry and SGLang's models do not want, wherever they stand: tables that are computed
# anew, scales of a kv cache that is not quantised, and what old exporters left behind.
_UNUSED = re.compile(
    r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias|\.attn\.bias|\.kv_scale|[kvq]_scale|\.g_idx)$"
)
_WRAPPER = ".base_layer."
# Numbers that SGLang keeps beside a one-element tensor, so that kernels need not ask the device.
_NUMBERS_OF_SCALES = {"k_scale_float": "k_scale", "v_scale_float": "v_scale"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_QUANTIZED_WITH_EMPTY_BIASES = ("gptq", "gptq_marlin", "awq", "awq_marlin")


# Objects that hang on SGLang's modules and are no part of their weights. The configuration is in the identity.
_FOREIGN = (PretrainedConfig, QuantizationConfig, GroupCoordinator, ResidentWeights)


class SglangAdapter(EngineAdapter):
    """One model of one rank.

    Args:
        checkpoint: the folder with the configuration, and with the files if there are any.
        model_config, load_config: SGLang's own records of this load.
        device: where the model is built.
    """

    def __init__(
        self, checkpoint: Path, config: Config, model_config: Any, load_config: Any, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._model_config = model_config
        self._load_config = load_config
        self.device = device
        self._identity: WeightsIdentity | None = None
        self._as_loaded: _Loaded | None = None
        self._left_out: frozenset[str] = frozenset()  # of a draft model: what its target gives it

    def identity(self) -> WeightsIdentity:
        if self._identity is None:
            self._identity = sglang_identity(
                self._checkpoint,
                self._config,
                self._model_config,
                device=self.device,
                draft_index=self._load_config.draft_model_idx,
            )
        return self._identity

    def initialize(self) -> nn.Module:
        self._as_loaded = None
        quantization = engine._get_quantization_config(self._model_config, self._load_config)
        with set_default_torch_dtype(self._model_config.dtype), self.device:
            module: nn.Module = engine._initialize_model(self._model_config, self._load_config, quantization)
            return module

    def prepare_layout(self, module: nn.Module, served: Manifest) -> bool:
        """Post-process the empty model as if it had been loaded: names, shapes and kernels' layouts appear."""
        self._left_out = self._of_the_target(module) - {each.name for each in served.tensors}
        with set_default_torch_dtype(self._model_config.dtype), torch.no_grad():
            if getattr(module, "quant_config", None) is not None or self._model_config.quantization is not None:
                initialize_dummy_weights(module)  # quantisation computes with what is there
            _post_load_weights(module)
            self._process(module)
        return True

    def load_checkpoint(self, module: nn.Module, tensors: CheckpointTensors) -> int:
        rehearsed = self.rehearse(module, tensors.manifest, tensors.label)
        self._left_out = self._of_the_target(module) & rehearsed.unfilled
        expected = self._expectation(module)
        with set_default_torch_dtype(self._model_config.dtype), torch.no_grad():
            return load_rehearsed(module, tensors.tensors(), tensors.label, self._load_weights, expected, rehearsed)

    def rehearse(self, module: nn.Module, checkpoint: Manifest, label: str, *, partly: bool = False) -> Rehearsed:
        """What loading these tensors would do to the model, which is not touched.

        Args:
            partly: they need not fill the model.

        Raises:
            CheckpointError: they do not fit; names tensors.
        """
        self._require_one_folder(module, label)
        expected = self._expectation(module)
        with set_default_torch_dtype(self._model_config.dtype), torch.no_grad(), _without_post_load(module):
            return rehearse(module, checkpoint, label, self._load_weights, expected, partly=partly)

    def for_update(self, checkpoint: Path, config: Config) -> SglangAdapter:
        """The adapter of other weights for the model that was loaded by this one."""
        adapter = SglangAdapter(checkpoint, config, self._model_config, self._load_config, self.device)
        adapter._as_loaded, adapter._left_out = self._as_loaded, self._left_out
        return adapter

    def finalize(self, module: nn.Module, *, from_checkpoint: bool) -> None:
        with set_default_torch_dtype(self._model_config.dtype), torch.no_grad():
            if from_checkpoint:
                self._process(module)
            else:
                _renew_numbers(module)  # every tensor has its final bytes already, derived ones included
        found, before = self._found_now(module), self._as_loaded
        if before is not None:  # an update: by now there is more on the model than its weights
            found = before.among(found)
        self._as_loaded = _Loaded(frozenset(each.name for each in found.tensors), found.scalars)

    def tensors(self, module: nn.Module) -> Discovery:
        """What makes up the weights. After a load: what did so when it ended.

        SGLang goes on to hang hooks, kernels and adapters on the model before it serves, and a target that is being
        loaded has none of them yet.
        """
        found = self._found_now(module)
        if self._as_loaded is None:
            return found
        return replace(self._as_loaded.among(found), scalars=self._as_loaded.scalars)

    def _found_now(self, module: nn.Module) -> Discovery:
        found = discover(module, foreign=_FOREIGN)
        # Rotary tables belong to the process: every model with equal settings shares one, made from the configuration.
        shared = {id(table) for each in rotary._ROPE_DICT.values() for table in each.buffers()}
        tensors = tuple(_unwrapped(each) for each in found.tensors if id(each.tensor) not in shared)
        tensors = tuple(each for each in tensors if each.name not in self._left_out)
        own = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, each in module.named_modules()
            for name in _numbers_of_its_own(each)
        }
        return Discovery(tensors, tuple((name, text) for name, text in found.scalars if name not in own))

    def _load_weights(self, module: nn.Module, weights: Weights) -> None:
        if self._load_config.draft_model_idx is not None:
            weights = engine.DefaultModelLoader._filter_mtp_weights(weights, "", self._load_config.draft_model_idx)
        if hasattr(engine.DefaultModelLoader, "load_weights_only"):
            engine.DefaultModelLoader.load_weights_only(module, weights, self.device)
        else:
            module.load_weights(weights)  # type: ignore[operator]  # every model of SGLang has it

    def _process(self, module: nn.Module) -> None:
        if hasattr(engine.DefaultModelLoader, "postprocess_weights"):
            engine.DefaultModelLoader.postprocess_weights(module, self.device)
            return
        for each in list(module.modules()):
            method = getattr(each, "quant_method", None)
            if method is not None:
                with engine.device_loading_context(each, self.device):
                    method.process_weights_after_loading(each)

    def _require_one_folder(self, module: nn.Module, label: str) -> None:
        others = [str(each.model_or_path) for each in getattr(module, "secondary_weights", ())]
        if others or getattr(module, "allow_patterns_overrides", None) is not None:
            where = f"also reads {', '.join(others)}" if others else "reads files of its own choice in the folder"
            raise CheckpointError(
                f"{label}: a {type(module).__name__} {where}, which modelexpress does not; start it with "
                "--load-format auto"
            )

    def _expectation(self, module: nn.Module) -> Expectation:
        optional = _OPTIONAL + _NEVER_READ.get(type(module).__name__, ())
        of_the_target = self._of_the_target(module)
        return Expectation(
            optional=lambda name: name.endswith(optional) or name in of_the_target,
            unused=self._is_unused,
            metadata=lambda name: name.endswith(_METADATA),
            padding=_padding_rows(module),
            widened=_widened_parameters(module),
        )

    def _of_the_target(self, module: nn.Module) -> frozenset[str]:
        """Parameters of a draft model that its target may give it."""
        if not getattr(self._model_config, "is_draft_model", False):
            return frozenset()
        names = (name for name, _ in module.named_parameters(remove_duplicate=False))
        return frozenset(name for name in names if name.endswith(_OF_THE_TARGET))

    def _is_unused(self, name: str) -> bool:
        text_config = getattr(self._model_config, "hf_text_config", self._model_config.hf_config)
        if getattr(self._model_config, "is_draft_model", False):
            return True  # a draft model takes what it wants from its target's checkpoint
        if "lm_head" in name and getattr(text_config, "tie_word_embeddings", False):
            return True
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) >= getattr(text_config, "num_hidden_layers", 0):
            return True  # layers of a draft model that comes in the same files
        if name.endswith(".bias") and self._model_config.quantization in _QUANTIZED_WITH_EMPTY_BIASES:
            return True
        return _UNUSED.search(name) is not None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a model was when its load ended: the names of its tensors, and its numbers."""

    names: frozenset[str]
    scalars: tuple[tuple[str, str], ...]

    def among(self, found: Discovery) -> Discovery:
        """The tensors and the numbers of then, where and what they are now.

        Raises:
            NotAvailable: one is gone; names it.
        """
        kept = tuple(each for each in found.tensors if each.name in self.names)
        gone = sorted(self.names - {each.name for each in kept})
        if gone:
            raise NotAvailable(f"{len(gone)} tensors of the loaded model are not there any more, like {gone[0]!r}")
        numbers = {name for name, _ in self.scalars}
        return Discovery(kept, tuple(each for each in found.scalars if each[0] in numbers))


def _unwrapped(found: FoundTensor) -> FoundTensor:
    """Under the name that it had before SGLang wrapped its layer for LoRA."""
    if _WRAPPER not in found.name:
        return found
    return msgspec.structs.replace(found, name=found.name.replace(_WRAPPER, "."))


def _renew_numbers(module: nn.Module) -> None:
    """Numbers do not travel: take those of scales from their tensors."""
    for each in module.modules():
        for number in set(_numbers_of_its_own(each)) & _NUMBERS_OF_SCALES.keys():
            setattr(each, number, getattr(each, _NUMBERS_OF_SCALES[number]).item())


def _numbers_of_its_own(module: nn.Module) -> Iterator[str]:
    """Attributes that a process makes by itself: memos of decisions, and numbers that `finalize` takes from tensors."""
    for name, value in vars(module).items():
        memo = isinstance(value, int) and isinstance(getattr(type(module), name, None), cached_property)
        if memo or isinstance(getattr(module, _NUMBERS_OF_SCALES.get(name, ""), None), torch.Tensor):
            yield name


def _post_load_weights(module: nn.Module) -> None:
    # Called `_post_load_weights` up to 0.5.20.
    post_load = getattr(engine, "post_load_weights", None) or engine._post_load_weights
    post_load(module)


@contextmanager
def _without_post_load(module: nn.Module) -> Iterator[None]:
    """A rehearsal has no values, so nothing is derived from them."""
    deriving = [each for each in module.modules() if hasattr(each, "post_load_weights")]
    for each in deriving:
        vars(each)["post_load_weights"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for each in deriving:
            del vars(each)["post_load_weights"]


def _padding_rows(module: nn.Module) -> dict[str, int]:
    """Where a vocabulary is padded to a multiple: parameter name to the first row that no checkpoint has."""
    rows = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, VocabParallelEmbedding):
            shard = each.shard_indices
            first = shard.org_vocab_end_index - shard.org_vocab_start_index
            rows.update({f"{prefix}.{name}".lstrip("."): first for name, _ in each.named_parameters(recurse=False)})
    return rows


def _widened_parameters(module: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{prefix}.{name}"
        for prefix, each in module.named_modules()
        if type(getattr(each, "quant_method", None)).__name__ in _WIDENING
        for name, _ in each.named_parameters(recurse=False)
    )
