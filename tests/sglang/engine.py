"""SGLang's own runner and its manager of weight updates in one process: what a scheduler has, without its sockets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from modelexpress.api import registry_of
from modelexpress.config import Config
from modelexpress.engines.sglang.resident import ResidentWeights
from tests.support.sglang_cpu.harness import Harness, generate
from tests.support.sglang_cpu.oracle import tensor_digests


class Engine:
    """A loaded model that can generate, be updated, sleep and wake by SGLang's own code."""

    def __init__(self, folder: str, options: dict[str, object], **server_args: object) -> None:
        self.harness = Harness(
            folder, **({"load_format": "modelexpress", "model_loader_extra_config": options} | server_args)
        )
        self.registry = options.get("registry")
        self.runner = self.harness.runner()
        self.idle = True
        worker = SimpleNamespace(
            model_runner=self.runner,
            weight_update_runners=lambda: [("target", self.runner)],
            deserialize_own_rank=lambda given: given[0],  # SGLang's serializer wants two processes on a CPU
        )
        scheduler = SimpleNamespace(
            record_weight_version_change=lambda new_version: None,
            _engine_paused=False,
            disaggregation_mode=DisaggregationMode.NULL,
        )
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: self.idle,
            scheduler=scheduler,
        )

    @property
    def resident(self) -> ResidentWeights:
        return self.runner.model.modelexpress

    def generate(self) -> list[int]:
        return generate(self.runner)

    def digests(self) -> dict[str, str]:
        return tensor_digests(self.runner.model)

    def offered(self) -> list[str]:
        """What the registry has, each as its label and generation."""
        opened = registry_of(Config(registry=self.registry))
        try:
            return sorted(f"{each.record.label} {each.record.generation}" for each in opened.find(None))
        finally:
            opened.close()

    def update(self, folder: Path | str, **fields: object) -> tuple[bool, str]:
        request = io_struct.UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="modelexpress", **fields)
        answer = self.manager.update_weights_from_disk(request)
        return answer.success, answer.message

    def begin(self) -> tuple[bool, str]:
        answer = self.manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput())
        return answer.success, answer.message

    def give(self, tensors: list[tuple[str, torch.Tensor]], **fields: object) -> tuple[bool, str]:
        request = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[tensors], **fields)
        answer = self.manager.update_weights_from_tensor(request)
        return answer.success, answer.message

    def end(self) -> tuple[bool, str]:
        answer = self.manager.end_weight_update(io_struct.EndWeightUpdateReqInput())
        return answer.success, answer.message

    def release(self, *tags: str) -> None:
        self.manager.release_memory_occupation(io_struct.ReleaseMemoryOccupationReqInput(tags=list(tags) or None))

    def resume(self, *tags: str) -> None:
        self.manager.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput(tags=list(tags) or None))
