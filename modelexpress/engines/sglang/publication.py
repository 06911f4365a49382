"""Publications of a serving engine: offered when it is ready, withdrawn before SGLang changes or moves the weights."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sglang
from torch import nn

from modelexpress.errors import ModelExpressError, NotAvailable, describe
from modelexpress.source import WeightSource
from modelexpress.strategies.base import LoadReport

logger = logging.getLogger(__name__)

# Where SGLang changes weights: module, class, methods. 0.5.20 and later; before that the runner did it itself.
_UPDATERS = (
    (
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "WeightUpdater",
        (
            "begin_weight_update",
            "load_weights_from_distributed",
            "update_weights_from_disk",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        ),
    ),
    (
        "sglang.srt.model_executor.model_runner",
        "ModelRunner",
        (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        ),
    ),
)
_SLEEPERS = (
    (
        "sglang.srt.managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager",
        ("release_memory_occupation",),
    ),
    ("sglang.srt.managers.scheduler", "Scheduler", ("release_memory_occupation",)),
)
_LOOPS = (
    ("sglang.srt.managers.scheduler", "Scheduler", ("run_event_loop", "event_loop_normal", "event_loop_overlap")),
)
_MARK = "_modelexpress"


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Kept on a loaded model, as `modelexpress`: how it came, and what it serves."""

    report: LoadReport


def keep(report: LoadReport) -> nn.Module:
    """Hang the report on the loaded model, and tie its publication to the engine's life; returns the model."""
    model = report.model
    if model is None:
        raise ModelExpressError("nothing was loaded, so there is nothing to keep")
    vars(model)["modelexpress"] = LoadedWeights(report)
    if isinstance(report.publication, WeightSource):
        try:
            _watch(_UPDATERS, _withdraw)
            _watch(_SLEEPERS, _withdraw)
            _watch(_LOOPS, _publish)
        except NotAvailable as exc:
            report.publication.withdraw()
            logger.warning("the model is loaded, and not offered to others: %s", describe(exc))
    return model


def _watch(places: tuple[tuple[str, str, tuple[str, ...]], ...], act: Callable[[WeightSource], None]) -> None:
    """Call `act` with each publication of the engine before one of the methods runs. Idempotent.

    Raises:
        NotAvailable: this SGLang has none of them, so a change of the weights would go unnoticed.
    """
    found = 0
    for module, cls, methods in places:
        try:
            owner = getattr(importlib.import_module(module), cls)
        except (ImportError, AttributeError):
            continue
        for name in methods:
            if name in vars(owner):
                found += 1
                _before(owner, name, act)
    if not found:
        looked = ", ".join(f"{module}.{cls}" for module, cls, _ in places)
        raise NotAvailable(f"SGLang {sglang.__version__} has none of the methods that modelexpress watches in {looked}")


def _before(owner: type, name: str, act: Callable[[WeightSource], None]) -> None:
    original = vars(owner)[name]
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for source in _sources_of(self):
            act(source)
        return original(self, *args, **kwargs)

    setattr(watched, _MARK, True)
    setattr(owner, name, watched)


def _sources_of(holder: Any) -> Iterator[WeightSource]:
    """The publications of the models behind one of SGLang's objects: a runner, its updater, a scheduler."""
    for model in _models_of(holder):
        kept = vars(model).get("modelexpress")
        if isinstance(kept, LoadedWeights) and isinstance(kept.report.publication, WeightSource):
            yield kept.report.publication


def _models_of(holder: Any) -> Iterator[nn.Module]:
    if hasattr(holder, "get_model"):
        yield holder.get_model()
    elif isinstance(getattr(holder, "model", None), nn.Module):
        yield holder.model
    else:
        for worker in (getattr(holder, "tp_worker", None), getattr(holder, "draft_worker", None)):
            runner = getattr(worker, "model_runner", None) or getattr(worker, "draft_runner", None)
            if runner is not None:
                yield runner.model


def _withdraw(source: WeightSource) -> None:
    if source.published:
        logger.info("withdrawing %s: the weights are about to change or go", source.record.name)
        source.withdraw()


def _publish(source: WeightSource) -> None:
    """The engine begins to serve: offer what waited for that."""
    if source.generation:
        return
    try:
        source.publish()
    except ModelExpressError as exc:
        logger.warning("the model serves, and could not be published: %s", describe(exc))
