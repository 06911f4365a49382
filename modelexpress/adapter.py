"""The EngineAdapter contract: what an engine must tell us about its model, and ModuleAdapter for plain torch.

An adapter knows one engine. It builds, fills and describes; it decides nothing about which way to load.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.checkpoint.index import open_index
from modelexpress.discovery import Discovery, FoundTensor, discover, manifest_of, persistent_tensors, torch_dtype
from modelexpress.errors import CheckpointError, ConfigError, NotAvailable
from modelexpress.manifest import Manifest, WeightsIdentity
from modelexpress.plan import plan_checkpoint


class EngineAdapter(ABC):
    """What modelexpress asks of an engine. One adapter serves one load of one model.

    Attributes:
        repeatable: `load_checkpoint` changes nothing but bytes, and overwrites every byte that an earlier
            try can have changed. It may then run again on the same model without a rebuild.
    """

    repeatable = False

    @abstractmethod
    def identity(self) -> WeightsIdentity:
        """Which weights the engine wants.

        Raises:
            NotAvailable: they cannot be named, so no other process can be asked for them; says why.
        """

    @abstractmethod
    def initialize(self) -> nn.Module:
        """Build a fresh model with allocated and still empty weights."""

    @abstractmethod
    def prepare_layout(self, module: nn.Module, served: Manifest) -> bool:
        """Give a fresh model the layout that a source serves. True when that changed the model."""

    @abstractmethod
    def load_checkpoint(self, module: nn.Module, tensors: CheckpointTensors) -> int:
        """Fill the model from raw checkpoint tensors, the engine's native way; returns the bytes written.

        Raises:
            ManifestMismatch: the checkpoint does not fit the model; nothing was written.
        """

    @abstractmethod
    def finalize(self, module: nn.Module, *, from_checkpoint: bool) -> None:
        """Make whatever the engine derives from weights, after they are in place."""

    def tensors(self, module: nn.Module) -> Discovery:
        """Every tensor of the model that makes up its weights.

        Raises:
            NotAvailable: the model holds something that cannot travel; names it.
        """
        return discover(module)

    def manifest(self, module: nn.Module) -> Manifest:
        """Every tensor of the model where it lies now.

        Raises:
            NotAvailable: the model holds something that cannot travel; names it.
        """
        found = self.tensors(module)
        return manifest_of(found.tensors, found.scalars)


class ModuleAdapter(EngineAdapter):
    """Any `torch.nn.Module`, filled by name: as strict as `load_state_dict`, and without conversion.

    Names, not code: a model that saves more than parameters and buffers is refused, and hooks of
    `load_state_dict` are not called. The dtype of a tensor must be the same in the checkpoint and in the
    module, on every path; a model that should run in another precision is built in the checkpoint's and
    converted afterwards.

    Args:
        build: makes a fresh module, like the first one. None: a module was passed that cannot be rebuilt.
        identify: names the weights; called once, and only when another process is to be asked.
        derive: called with the module after a checkpoint was read into it, to renew tensors that are
            computed from weights and stored nowhere in the checkpoint.
    """

    repeatable = True

    def __init__(
        self,
        build: Callable[[], nn.Module] | None,
        identify: Callable[[], WeightsIdentity],
        derive: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self._build = build
        self._identify = identify
        self._derive = derive

    def identity(self) -> WeightsIdentity:
        return self._identify()

    def initialize(self) -> nn.Module:
        if self._build is None:
            raise ConfigError(
                "the model is half-written and cannot be built again; pass a function that builds it instead of "
                "a module, or give initialize="
            )
        module = self._build()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"the function that builds the model returned a {type(module).__name__}, not a module")
        return module

    def prepare_layout(self, module: nn.Module, served: Manifest) -> bool:
        return False

    def load_checkpoint(self, module: nn.Module, tensors: CheckpointTensors) -> int:
        targets = persistent_tensors(module)
        plan = plan_checkpoint(tensors.manifest, manifest_of(targets))
        by_name = {each.name: each for each in targets}
        tensors.read(plan)
        nbytes = plan.nbytes
        for name, value in tensors.tensors(plan.strided) if plan.strided else ():
            _copy_elements(by_name[name], value)
            nbytes += value.nbytes
        for name, value in tensors.tensors(plan.compared) if plan.compared else ():
            _require_equal(by_name[name], value, tensors.label)
        return nbytes

    def finalize(self, module: nn.Module, *, from_checkpoint: bool) -> None:
        if from_checkpoint and self._derive is not None:
            self._derive(module)


class CheckpointModule(nn.Module):
    """A checkpoint's tensors and nothing else: one parameter per tensor, under its own name."""

    def allocate(self, layout: Manifest) -> None:
        """Make an empty tensor for each one in the manifest, instead of what was there.

        Raises:
            NotAvailable: there is not enough memory.
        """
        self._parameters.clear()
        for spec in layout.tensors:
            try:
                fresh = torch.empty(spec.shape, dtype=torch_dtype(spec), device="cpu")
            except RuntimeError as exc:
                self._parameters.clear()
                raise NotAvailable(f"no memory for tensor {spec.name!r} of {spec.nbytes:,} bytes") from exc
            # Names hold dots, which register_parameter refuses and named_parameters allows.
            self._parameters[spec.name] = nn.Parameter(fresh, requires_grad=False)


class CheckpointAdapter(ModuleAdapter):
    """Loads a checkpoint as it is, without a model: for the command line and for measurements.

    Where the files cannot be read, each source that is tried gives the layout it serves.
    """

    def __init__(self, checkpoint: Path, identify: Callable[[], WeightsIdentity]) -> None:
        super().__init__(self._allocate, identify)
        self._checkpoint = checkpoint
        self._adopts = False

    def _allocate(self) -> nn.Module:
        module = CheckpointModule()
        try:
            module.allocate(open_index(self._checkpoint).manifest)
        except CheckpointError:
            self._adopts = True  # the disk strategy meets the same error, and reports it
        return module

    def prepare_layout(self, module: nn.Module, served: Manifest) -> bool:
        self._adopt(module, served)
        return False

    def load_checkpoint(self, module: nn.Module, tensors: CheckpointTensors) -> int:
        self._adopt(module, tensors.manifest)
        return super().load_checkpoint(module, tensors)

    def _adopt(self, module: nn.Module, layout: Manifest) -> None:
        if self._adopts and isinstance(module, CheckpointModule):
            module.allocate(layout)


def _copy_elements(target: FoundTensor, value: torch.Tensor) -> None:
    """Copy by element into memory that is not in file order."""
    with torch.no_grad():
        target.tensor.copy_(value)


def _require_equal(target: FoundTensor, value: torch.Tensor, label: str) -> None:
    """Both names of a tie are in the checkpoint: they must hold the same bytes, since memory holds only one."""
    if not torch.equal(_as_bytes(target.tensor), _as_bytes(value)):
        raise CheckpointError(
            f"{label}: tensor {target.name!r} shares its memory with another one in the model, but the "
            "checkpoint holds different values for the two; untie the model or fix the checkpoint"
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # torch.equal refuses the 8-bit and 4-bit floats on the CPU, and calls two NaNs different.
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
