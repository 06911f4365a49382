"""The two classes that SGLang calls: ModelExpressLoader for `--load-format modelexpress`, MxModelLoader for
`--load-format remote_instance --remote-instance-weight-loader-backend modelexpress`. Both run the same chain.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from torch import nn

from modelexpress.api import fill_root
from modelexpress.checkpoint.index import open_index
from modelexpress.config import Config, resolve_config
from modelexpress.engines.sglang import failover, memory, ranks
from modelexpress.engines.sglang.adapter import SglangAdapter
from modelexpress.engines.sglang.lifecycle import keep, resident_of
from modelexpress.engines.sglang.regions import publish_outside
from modelexpress.engines.sglang.resident import ResidentWeights
from modelexpress.errors import CheckpointError, ConfigError
from modelexpress.strategies.disk import open_files

logger = logging.getLogger(__name__)

# The keys of --model-loader-extra-config that SGLang's own loader reads; LoRA and others make one from the same record.
_ENGINE_KEYS = ("enable_multithread_load", "num_threads")
# Formats that SGLang quantises while it reads, by loaders of their own.
_OWN_LOADERS = ("auto-round-int8", "modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")


class ModelExpressLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang has no types
    """`--load-format modelexpress`. Options come from --model-loader-extra-config, else from `MX_*` variables.

    A DefaultModelLoader, because live updates from disk accept nothing else. The load config is changed in
    place: SGLang keeps it, and makes its own loader of adapters from it.

    Raises:
        ConfigError: an option is wrong; nothing was touched.
    """

    def __init__(self, load_config: Any) -> None:
        options = dict(load_config.model_loader_extra_config or {})
        kept = {name: options.pop(name) for name in _ENGINE_KEYS if name in options}
        self._config = _config_of(load_config, options)
        load_config.model_loader_extra_config = kept
        load_config.load_format = LoadFormat.AUTO
        super().__init__(load_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Build the model of this rank and fill it by the first way that works; returns it in eval mode.

        Raises:
            LoadFailed: no way worked; the message has every attempt.
        """
        if model_config.quantization in _OWN_LOADERS or getattr(model_config, "modelopt_quant", None):
            logger.warning("%s is loaded by SGLang's own loader", model_config.quantization or "modelopt")
            loader = get_model_loader(self.load_config, model_config)
            module: nn.Module = loader.load_model(model_config=model_config, device_config=device_config)
            return module
        return self.fill(None, model_config=model_config, device_config=device_config).eval()

    def fill(self, module: nn.Module | None, *, model_config: Any, device_config: Any) -> nn.Module:
        """Run the chain on a model that SGLang built, or on one that is built now; see to it from then on.

        It is published where that is asked, when SGLang has left its memory regions.

        Raises: as `load_model`.
        """
        path, config = model_config.model_path, _among_ranks(self._config)
        checkpoint, fetch = Path(path), None
        if not checkpoint.is_dir() and config.revision is None:
            # Only the commit in the hub's cache says which weights a name means, so the files are needed first.
            checkpoint = self._folder(path, model_config.revision)
        elif not checkpoint.is_dir():
            fetch = partial(self._folder, path, model_config.revision)
        device = torch.device(device_config.device)
        adapter = SglangAdapter(checkpoint, config, model_config, self.load_config, device)
        root = adapter.initialize if module is None else lambda: module
        role = failover.claim(config, lambda: adapter.identity().key)
        if role is not None:
            config = role.config
        memory.prepare(config, draft=bool(getattr(model_config, "is_draft_model", False)))
        filled = fill_root(adapter, root, checkpoint, config, fetch=fetch)
        logger.info("modelexpress loaded %s: %s", path, filled.report.to_json())
        memory.tell(self, filled.report)
        resident = ResidentWeights(filled, adapter, lambda name: self._folder(name, None), loader=type(self), role=role)
        keep(resident)
        publish_outside(resident)
        return resident.model

    def load_weights_and_postprocess(self, model: nn.Module, weights: Any, target_device: torch.device) -> None:
        """What a live update calls: weights that were prepared are loaded by modelexpress; `weights` are not read.

        SGLang calls it again when it raised, to go back. The old weights are brought back when its update ends.

        Raises: as a load.
        """
        resident = resident_of(model)
        if resident is None or not resident.updating:
            super().load_weights_and_postprocess(model, weights, target_device)
        elif resident.broken is None:
            resident.load_prepared()

    def download_model(self, model_config: Any) -> None:
        """Fetch the files of a hub name; a folder has them."""
        self._folder(model_config.model_path, model_config.revision)

    def _folder(self, model: str, revision: str | None) -> Path:
        """Where the files of a model are, downloaded by SGLang's own code where they are not on this machine."""
        if os.path.isdir(model):
            return Path(model)
        if os.path.isabs(model) or model.startswith("."):  # no name of the hub's
            raise CheckpointError(f"{model}: there is no such folder on this machine")
        folder, _, _ = self._prepare_weights(model, revision, fall_back_to_pt=False)
        return Path(folder)

    def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What a live update reads: files that were validated as a whole before the first tensor is handed out."""
        index = open_index(self._folder(source.model_or_path, source.revision))
        config = _among_ranks(self._config)
        direct = config.direct_reads != "off"
        tensors = open_files(index, threads=config.threads, verify=config.verify, progress=None, direct=direct)
        return ((source.prefix + name, tensor) for name, tensor in tensors.tensors())


class MxModelLoader:
    """The back end that SGLang's `remote_instance` format calls, with a model that it has built.

    Its options are `--modelexpress-config '{"url": REGISTRY}'` and `MX_*` variables: SGLang refuses others.

    Raises:
        ConfigError: an option is wrong; nothing was touched.
    """

    def __init__(self, load_config: Any) -> None:
        self._loader = ModelExpressLoader(load_config)

    def load_model(self, *, model: nn.Module, model_config: Any, device_config: Any) -> nn.Module:
        """Fill `model`, which stays the object that SGLang holds.

        Raises:
            LoadFailed: no way worked; the message has every attempt.
        """
        return self._loader.fill(model, model_config=model_config, device_config=device_config)


def _among_ranks(config: Config) -> Config:
    """Several ranks read the same files: the first to come leaves them in the page cache for the others."""
    several = config.direct_reads == "auto" and ranks.are_several()
    return replace(config, direct_reads="off") if several else config


def _config_of(load_config: Any, options: dict[str, object]) -> Config:
    transport = getattr(load_config, "modelexpress_transport", None) or "nixl"
    if transport != "nixl":
        raise ConfigError(f"transport in --modelexpress-config is {transport!r}; modelexpress moves weights by 'nixl'")
    url = getattr(load_config, "modelexpress_url", None)
    if url and options.get("registry") is None:
        options["registry"] = url
    return resolve_config({}, extra_config=options)
