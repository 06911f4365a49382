"""Imported weights in the size of SGLang's KV pool: counted once.

SGLang sizes the pool by `free_now - baseline * (1 - f)`, where f is --mem-fraction-static and the baseline is what was
free before the weights were loaded: of all that was free, the part 1 - f stays free. Weights that a memory service
holds are in use before a load begins. The baseline lacks them, so the part that stays free is too small by (1 - f) of
them, and the pool is too large by as much. With the service's memory for the generation added to the baseline, a pool
has the size that it has after a load from disk:

    free before anything F, generation S, private copies P, other memory O
    from disk    F - W - O     - F * (1 - f)
    imported     F - S - P - O - ((F - S) + S) * (1 - f)

S is what the service keeps, whole segments with their gaps and with tensors that an engine copies into memory of its
own, since all of that is in use at both measurements; S + P - W is what an import really costs more. On a CPU server
the same holds for host memory.

| SGLang | kind | where the baseline is | hooked method of ModelRunner |
|---|---|---|---|
| 0.5.19 and later | "loader" | its `account_preloaded_weights` adds what loaders say | `account_preloaded_weights` |
| 0.5.14 to 0.5.18 | "runner" | `alloc_memory_pool` reads `self.pre_model_load_memory` | `alloc_memory_pool` |
| 0.5.13 | "argument" | `init_memory_pool(pre_model_load_memory)` is told it | `init_memory_pool` |

0.5.14 and 0.5.15 have both of the last two, one calling the other; the first that is found in this order is used. In
the first two, drafts are loaded before the pool of their target is made, and are counted with it. With "argument" they
are not: a draft that is imported makes its target's pool smaller by f of it, which errs on the safe side.

The baseline is the least of all ranks, so what is added is the most of all ranks. Baselines are GiB, our sizes bytes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, Literal, NamedTuple

from modelexpress.config import Config
from modelexpress.engines.sglang.ranks import largest
from modelexpress.errors import ConfigError
from modelexpress.strategies.base import LoadReport

logger = logging.getLogger(__name__)

Kind = Literal["loader", "runner", "argument"]

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_LOADER = "sglang.srt.model_loader.loader.BaseModelLoader"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_GIB = 1 << 30
# On a hooked method: what it was. On a runner: the bytes that its baseline has, and the drafts that share its pool.
_ORIGINAL = "_modelexpress_original"
_COUNTED = "_modelexpress_counted"
_DRAFTS = "_modelexpress_drafts"
# Where the workers of speculative decoding keep their runners, by release; the first that is there is the one.
_DRAFT_RUNNERS = ("draft_runners", "draft_runner_list", "model_runner_list", "draft_runner", "model_runner")

_Method = Callable[..., Any]
_Wrapper = Callable[[_Method], _Method]


def prepare(config: Config, *, draft: bool) -> None:
    """Before a load: see to it that what it imports will be counted. Every rank that loads must call it.

    Args:
        draft: the model is a draft of speculative decoding, which exist on one pipeline stage alone.

    Raises:
        ConfigError: a memory service is set on some rank, and this SGLang sizes its pool in no way that is known.
    """
    # All ranks or none: what is hooked here asks the others for their values.
    if largest(int(config.gms is not None), one_stage=draft):
        install()


def tell(loader: Any, report: LoadReport) -> None:
    """After a load: give SGLang's own attribute of a loader the imported bytes. Harmless where there is none."""
    loader.preloaded_weights_bytes = report.preloaded_nbytes


def install() -> Kind:
    """Hook what this SGLang sizes its pool with; says what was found. Idempotent.

    Raises:
        ConfigError: nothing was found; names what was looked for.
    """
    kind, hooks = _probe()
    for hook in hooks:
        if not hasattr(vars(hook.owner)[hook.name], _ORIGINAL):
            original = vars(hook.owner)[hook.name]
            hooked = functools.wraps(original)(hook.wrap(original))
            setattr(hooked, _ORIGINAL, original)
            setattr(hook.owner, hook.name, hooked)
    return kind


def uninstall() -> None:
    """Undo `install`. Baselines keep what they have."""
    _, hooks = _probe()
    for hook in hooks:
        found = vars(hook.owner)[hook.name]
        if hasattr(found, _ORIGINAL):
            setattr(hook.owner, hook.name, getattr(found, _ORIGINAL))


class _Hook(NamedTuple):
    """A method, by the class that defines it, and what is put around it."""

    owner: type
    name: str
    wrap: _Wrapper


def _probe() -> tuple[Kind, tuple[_Hook, ...]]:
    """Which kind this is, by what it can do, and what to hook there.

    Raises:
        ConfigError: none.
    """
    runner = _class(_RUNNER)
    pools = _method(_class(_SCHEDULER), "init_target_memory_pool")
    account = _method(runner, "account_preloaded_weights")
    if pools and account and hasattr(_class(_LOADER), "preloaded_weights_bytes"):
        return "loader", (_Hook(*pools, _with_drafts), _Hook(*account, _account))
    allocate, initialize = _method(runner, "alloc_memory_pool"), _method(runner, "init_memory_pool")
    if pools and allocate and "pre_model_load_memory" in _names_in(*allocate):
        return "runner", (_Hook(*pools, _with_drafts), _Hook(*allocate, _allocate))
    if initialize and "pre_model_load_memory" in _parameters(*initialize):
        return "argument", (_Hook(*initialize, _initialize),)
    version = getattr(importlib.import_module("sglang"), "__version__", "of an unknown version")
    raise ConfigError(
        f"gms is set, and SGLang {version} would not count imported weights when it sizes its KV pool: it has neither "
        f"{_LOADER}.preloaded_weights_bytes with {_RUNNER}.account_preloaded_weights, nor a "
        "ModelRunner.alloc_memory_pool that reads self.pre_model_load_memory (either with "
        f"{_SCHEDULER}.init_target_memory_pool), nor a ModelRunner.init_memory_pool(pre_model_load_memory); "
        "start without gms, or with SGLang 0.5.13 to 0.5.23"
    )


# --- the hooks


def _with_drafts(original: _Method) -> _Method:
    """Scheduler.init_target_memory_pool: the target's runner gets to know the drafts that are loaded by now."""

    def init_target_memory_pool(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = self.tp_worker.model_runner
        vars(target)[_DRAFTS] = _draft_runners(getattr(self, "draft_worker", None), target)
        return original(self, *args, **kwargs)

    return init_target_memory_pool


def _account(original: _Method) -> _Method:
    """ModelRunner.account_preloaded_weights: gets the sum of what the loaders of a target and its drafts were told.

    SGLang's own loaders of the `remote_instance` route were told nothing yet, and of memory that two models share
    both loaders were told.
    """

    def account_preloaded_weights(self: Any, preloaded_weights_bytes: int) -> Any:
        runners = _sharing(self)
        ours = [runner for runner in runners if _report(runner) is not None]
        others_nbytes = preloaded_weights_bytes - sum(runner.loader.preloaded_weights_bytes for runner in ours)
        for runner, nbytes in zip(runners, _distinct(runners), strict=True):
            if runner in ours:
                runner.loader.preloaded_weights_bytes = nbytes
        total_nbytes = others_nbytes + sum(_distinct(runners))
        return _count(self, total_nbytes, lambda nbytes: original(self, nbytes))

    return account_preloaded_weights


def _allocate(original: _Method) -> _Method:
    """ModelRunner.alloc_memory_pool: reads the runner's baseline, which is made right before."""

    def alloc_memory_pool(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_draft(self):

            def add(nbytes: int) -> None:
                self.pre_model_load_memory += nbytes / _GIB

            _count(self, sum(_distinct(_sharing(self))), add)
        return original(self, *args, **kwargs)

    return alloc_memory_pool


def _initialize(original: _Method) -> _Method:
    """ModelRunner.init_memory_pool: is told the baseline as it was measured, at every call."""

    signature = inspect.signature(original)

    def init_memory_pool(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_draft(self):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        nbytes = _agreed(self, sum(_distinct((self,))))
        if nbytes:
            baseline = given.arguments["pre_model_load_memory"]
            _require_baseline(baseline, "the argument of ModelRunner.init_memory_pool")
            _log(baseline, nbytes)
            given.arguments["pre_model_load_memory"] = baseline + nbytes / _GIB
        return original(*given.args, **given.kwargs)

    return init_memory_pool


def _count(runner: Any, nbytes: int, add: Callable[[int], object]) -> object:
    """Make the baseline of a runner count these bytes, whatever it counted before: a retry adds nothing."""
    missing = _agreed(runner, nbytes) - vars(runner).get(_COUNTED, 0)
    if not missing:
        return None
    _require_baseline(getattr(runner, "pre_model_load_memory", None), "ModelRunner.pre_model_load_memory")
    _log(runner.pre_model_load_memory, missing)
    added = add(missing)
    vars(runner)[_COUNTED] = vars(runner).get(_COUNTED, 0) + missing
    return added


def _agreed(runner: Any, nbytes: int) -> int:
    # A target that another format loads hooks nothing, so the ranks of other stages are not here.
    return largest(nbytes, one_stage=_report(runner) is None)


def _require_baseline(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"{where} is {value!r}, and weights were imported that have to be counted in it: looked for the GiB that "
            "were free before the load, a finite number; start without gms, and report this release of SGLang"
        )


def _log(baseline: Real, nbytes: int) -> None:
    logger.info("%d bytes of weights were there when %.3f GiB were measured as free; counting them", nbytes, baseline)


# --- what lies under the models


def _distinct(runners: tuple[Any, ...]) -> Iterator[int]:
    """For each runner the imported bytes under its model that lie under none before it."""
    seen: set[tuple[str, int]] = set()
    for runner in runners:
        report = _report(runner)
        if report is None or report.imported is None or not report.preloaded_nbytes:
            yield 0
            continue
        generation = (report.imported.instance, report.imported.generation)
        yield 0 if generation in seen else report.preloaded_nbytes
        seen.add(generation)


def _report(runner: Any) -> LoadReport | None:
    """How the model of a runner was loaded, if it was by us: `keep` hangs that on it."""
    kept = getattr(getattr(runner, "model", None), "modelexpress", None)
    report = getattr(kept, "report", None)
    return report if isinstance(report, LoadReport) else None


def _sharing(runner: Any) -> tuple[Any, ...]:
    """A runner and its drafts: their weights are all in memory when its pool is sized."""
    return (runner, *vars(runner).get(_DRAFTS, ()))


def _draft_runners(worker: Any, target: Any) -> tuple[Any, ...]:
    """The runners behind a worker of speculative decoding; one that has no model borrows its target's."""
    inner = getattr(worker, "draft_worker", None) or worker
    for name in _DRAFT_RUNNERS:
        found = getattr(inner, name, None)
        if found:
            runners = tuple(found) if isinstance(found, list | tuple) else (found,)
            return tuple(each for each in runners if each is not target)
    return ()


def _is_draft(runner: Any) -> bool:
    """A draft gets the sizes of its target's pool, and measures nothing."""
    return bool(getattr(runner, "is_draft_worker", False))


# --- probing


def _class(dotted: str) -> type:
    """A class of SGLang's; `object`, which has no method of interest, where this release has none of that name."""
    module, name = dotted.rsplit(".", 1)
    try:
        found: type = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return object
    return found


def _method(cls: type, name: str) -> tuple[type, str] | None:
    """The class that defines a method, with its name."""
    owner = next((each for each in cls.__mro__ if name in vars(each)), None)
    return None if owner is None else (owner, name)


def _names_in(owner: type, name: str) -> tuple[str, ...]:
    """The names of attributes that the method's own code mentions."""
    code = getattr(inspect.unwrap(vars(owner)[name]), "__code__", None)
    return code.co_names if code is not None else ()


def _parameters(owner: type, name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(vars(owner)[name]).parameters)
