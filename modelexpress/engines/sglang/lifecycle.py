"""Where SGLang's life touches its weights: what is hooked, and what the resident weights do there.

| SGLang is about to | then |
|---|---|
| leave its memory regions after a load | the weights are published |
| begin to serve | what waited for that is offered; a standby begins to watch |
| update from a folder | every rank validates all of it; the old are withdrawn; then all ranks change, or none |
| update from tensors that it is given | the same, tensor by tensor, in the session that SGLang opens |
| release memory, resume it | withdrawn, let go; come back byte for byte, or answer nothing until an update |
| queue a request while the weights are not right | it is refused with the reason |
| go on after a pause, likewise | requests that waited are refused with the reason |
| read its weights for somebody while their memory is not there | that is refused, too |

The hooks are put on SGLang's classes where the first model of a process was loaded, once.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
import sglang
from torch import nn

from modelexpress.engines.sglang import failover, ranks
from modelexpress.engines.sglang.resident import Checkpoint, Phase, ResidentWeights
from modelexpress.errors import CheckpointError, NotAvailable, describe

logger = logging.getLogger(__name__)

# Formats of tensors that go through the model's own load_weights, where each is checked before it is written.
_CHECKED = (None, "flattened_bucket")

Around = Callable[..., Any]

_MARK = "_modelexpress"
_SESSION_OPEN = "an update of the weights is running; end it with /end_weight_update first"
_WEIGHTS = "weights"  # SGLang's tag
_RUNNERS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"  # before 0.5.20
_CONTROL = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def keep(resident: ResidentWeights) -> nn.Module:
    """Hang the weights on their model, and tie them to the engine's life; returns the model."""
    vars(resident.model)["modelexpress"] = resident
    try:
        _hook(_UPDATES)
        _hook(_LOOPS)
    except NotAvailable as exc:
        if resident.withdraw():
            logger.warning("the model is loaded, and not offered to others: %s", describe(exc))
    with suppress(NotAvailable):  # a release that neither sleeps nor updates in this way; what it has is hooked above
        _hook(_CONTROLS)
    return resident.model


def resident_of(model: nn.Module) -> ResidentWeights | None:
    """The weights that were kept on a model."""
    found = vars(model).get("modelexpress")
    return found if isinstance(found, ResidentWeights) else None


def residents_of(holder: Any) -> list[ResidentWeights]:
    """The weights of the models behind one of SGLang's objects: a runner, its updater, a scheduler or its part."""
    return [each for model in _models_of(holder) if (each := resident_of(model)) is not None]


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


# --- what is put around SGLang's methods


def _offer_first(original: Around, self: Any, *args: Any, **kwargs: Any) -> Any:
    for each in residents_of(self):
        each.offer()
        role, each.role = each.role, None  # run_event_loop calls another of these loops: one watch, not two
        if role is not None:
            failover.watch(role, refuses=each.why_not_serving, taken=partial(each.serve_as, role.wanted))
    return original(self, *args, **kwargs)


def _withdraw_first(original: Around, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A change that nobody announced: what is in memory afterwards has no name, and is not offered again."""
    for each in residents_of(self):
        if not each.updating:
            each.begin(None)
    return original(self, *args, **kwargs)


def _update_from_disk(original: Around, self: Any, request: Any) -> Any:
    """All runners of all ranks have the new weights after this, or the old ones."""
    residents, runners = residents_of(self), [runner for _, runner in self._select_runners()]
    if not residents or len(residents) != len(runners):
        return original(self, request)
    if any(each.updating for each in residents):
        return _output("UpdateWeightFromDiskReqOutput", _SESSION_OPEN)
    before = [_Shown.of(runner) for runner in runners]
    prepared: list[Checkpoint | None] = []

    def prepare() -> None:
        prepared.extend(each.prepare(request.model_path, request.weight_version) for each in residents)

    failure = _on_every_rank(prepare) or _on_every_rank(lambda: _begin(residents, prepared))
    answer = None
    if failure is None:
        answer, failure = _answered(original, self, msgspec.structs.replace(request, load_format=residents[0].loader))
    changed = [each.changed for each in residents]
    if answer is not None and any(changed) and not all(changed):
        failure = answer.message  # a draft was refused after its target had changed
    failure = _end(residents, failure)
    for runner, shown in zip(runners, before, strict=True):
        if failure is None and all(changed):
            shown = _Shown(request.model_path, request.load_format, runner.load_config)
        shown.put_on(runner)
    if failure is None:
        return answer
    logger.error("update from %s: %s", request.model_path, failure)
    return _output("UpdateWeightFromDiskReqOutput", failure)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What SGLang says about the weights of a runner."""

    model_path: str
    load_format: object
    load_config: object

    @classmethod
    def of(cls, runner: Any) -> _Shown:
        from sglang.srt.runtime_context import get_model

        return cls(runner.model_config.model_path, get_model().load_format, runner.load_config)

    def put_on(self, runner: Any) -> None:
        runner.model_config.model_path = self.model_path
        runner.update_model_fields(
            runner.model, model_path=self.model_path, load_format=self.load_format, load_config=self.load_config
        )


def _begin_session(original: Around, self: Any, request: Any) -> Any:
    residents = residents_of(self)
    if any(each.updating for each in residents):
        return original(self, request)  # which says that one is open
    failure = _on_every_rank(lambda: _begin(residents, [None] * len(residents)))
    answer = None
    if failure is None:
        answer, failure = _answered(original, self, request)
    if failure is None and answer is not None and answer.success:
        for each in residents:
            _guard(each)
        return answer
    failure = _end(residents, failure)
    return answer or _output("BeginWeightUpdateReqOutput", failure)


def _update_in_session(kind: str, original: Around, self: Any, request: Any) -> Any:
    """Some tensors. One that does not fit changes nothing; one that fails half-way ends the whole session's update."""
    answer, failure = _answered(original, self, request)
    if answer is not None and answer.success:
        for each in residents_of(self):
            each.call_it(request.weight_version)
    elif answer is None and failure is not None and request.load_format not in _CHECKED:
        for each in residents_of(self):
            each.doubt(failure)
    return answer or _output(kind, failure)


def _end_session(original: Around, self: Any, request: Any) -> Any:
    residents = residents_of(self)
    answer, failure = _answered(original, self, request)
    for each in residents:
        _unguard(each.model)
    failure = _end(residents, failure)
    return answer if failure is None else _output("EndWeightUpdateReqOutput", failure)


def _update_at_once(kind: str, original: Around, self: Any, request: Any) -> Any:
    """An update that SGLang takes from another process, or makes, in one step and unseen."""
    residents = residents_of(self)
    if any(each.updating for each in residents):
        return _output(kind, _SESSION_OPEN)
    failure = _on_every_rank(lambda: _begin(residents, [None] * len(residents)))
    answer = None
    if failure is None:
        answer, failure = _answered(original, self, request)
        for each in residents:
            each.call_it(getattr(request, "weight_version", None))
    failure = _end(residents, failure or (answer.message if answer is not None and not answer.success else None))
    return answer if failure is None else _output(kind, failure)


def _release(original: Around, self: Any, request: Any) -> Any:
    """A release that SGLang refuses, because requests run, is undone, and its exception goes up."""
    residents = residents_of(self)
    tags = request.tags or _all_tags()
    if _WEIGHTS not in tags:
        return original(self, request)
    if any(each.phase is Phase.ASLEEP for each in residents):
        logger.warning("the weights are released already")
        return _without_weights(original, self, request, tags, "ReleaseMemoryOccupationReqOutput")
    failure = _on_every_rank(lambda: _sleep(residents))
    if failure is not None:
        logger.error("the weights are not released: %s", failure)
        _wake([each for each in residents if each.phase is Phase.ASLEEP])
        return _without_weights(original, self, request, tags, "ReleaseMemoryOccupationReqOutput")
    try:
        answer = original(self, request)
    except BaseException:
        for each in residents:
            each.woken(each.lost)
        raise
    for each in residents:
        each.let_go()
    return answer


def _resume(original: Around, self: Any, request: Any) -> Any:
    residents = residents_of(self)
    if not residents:
        return original(self, request)
    tags = _released(self, request.tags or _all_tags())
    request = msgspec.structs.replace(request, tags=tags)
    if _WEIGHTS not in tags:
        return original(self, request) if tags else _output("ResumeMemoryOccupationReqOutput", None)
    if any(each.phase is not Phase.ASLEEP for each in residents):
        logger.warning("the weights are not released, so there is nothing to resume")
        return _without_weights(original, self, request, tags, "ResumeMemoryOccupationReqOutput")
    failures = [each.come_back() for each in residents]  # SGLang writes buffers, and their memory must be there
    answer = original(self, request)
    _wake(residents, failures)
    return answer


def _check_weights(original: Around, self: Any, request: Any) -> Any:
    """SGLang's checker reads all weights, or puts random ones in their place: those have no name."""
    residents = residents_of(self)
    reason = _why_unreadable(residents)
    if residents and (reason := ranks.first_error(reason)) is not None:
        return _output("CheckWeightsReqOutput", reason)
    if request.action == "reset_tensors" and residents:
        return _update_at_once("CheckWeightsReqOutput", original, self, request)
    return original(self, request)


def _get_weights(original: Around, self: Any, request: Any) -> Any:
    reason = _why_unreadable(residents_of(self))
    if reason is None:
        return original(self, request)
    from sglang.srt.managers.io_struct import GetWeightsByNameReqOutput

    logger.error("weights are not read: %s", reason)
    return GetWeightsByNameReqOutput(parameter=None)


def _save_weights(original: Around, self: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang catches what is raised here, and answers with it."""
    reason = _why_unreadable(residents_of(self))
    if reason is not None:
        raise NotAvailable(reason)
    return original(self, *args, **kwargs)


def _why_unreadable(residents: Sequence[ResidentWeights]) -> str | None:
    return next((why for each in residents if (why := each.why_unreadable())), None)


def _go_on(original: Around, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Requests that were paused came when the weights were right. They are put back to the queue and end there."""
    reason = next((why for each in residents_of(self) if (why := each.why_not_serving())), None)
    if reason is not None:
        from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

        if self.running_batch.reqs or self.last_batch is not None:
            self.pause_generation(PauseGenerationReqInput(mode="retract"))
        finished = {"type": "abort", "message": reason, "status_code": HTTPStatus.SERVICE_UNAVAILABLE.value}
        self.abort_request(AbortReq(abort_all=True, finished_reason=finished))
    return original(self, *args, **kwargs)


def _refuse(original: Around, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    reason = next((why for each in residents_of(self) if (why := each.why_not_serving())), None)
    if reason is None:
        return original(self, req, *args, **kwargs)
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(req, reason, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    self.output_streamer.stream_output([req], req.return_logprob)
    self._release_aborted_request(req)
    return None


# --- steps of these, each made by every rank


def _on_every_rank(step: Callable[[], object]) -> str | None:
    """Run a step on this rank, and find out whether it worked on all of them; returns what went wrong."""
    failure = None
    try:
        step()
    except Exception as exc:  # noqa: BLE001 - an exception here would end the server, and the other ranks wait
        failure = describe(exc)
    return ranks.first_error(failure)


def _answered(original: Around, self: Any, request: Any) -> tuple[Any, str | None]:
    """What SGLang answers, or why it could not: its exception would end the server, whose weights are seen to."""
    try:
        return original(self, request), None
    except Exception as exc:
        logger.exception("SGLang failed to change the weights")
        return None, describe(exc)


def _begin(residents: Sequence[ResidentWeights], prepared: Sequence[Checkpoint | None]) -> None:
    for each, checkpoint in zip(residents, prepared, strict=True):
        each.begin(checkpoint)


def _end(residents: Sequence[ResidentWeights], failure: str | None) -> str | None:
    """All ranks and all models go on with the new weights, with the old ones, or with none."""
    residents = [each for each in residents if each.updating]
    failure = ranks.first_error(failure or next((each.broken for each in residents if each.broken), None))
    texts = [_ended(each, failure) for each in residents]
    failure = ranks.first_error(next((each for each in texts if each), failure))
    _lose_together(residents)
    return failure


def _ended(resident: ResidentWeights, failure: str | None) -> str | None:
    try:
        return resident.end(failure)
    except Exception as exc:  # noqa: BLE001 - an exception here would end the server, and the other ranks wait
        reason = f"an update could not be ended: {describe(exc)}"
        resident.lose(reason)
        return reason


def _sleep(residents: Sequence[ResidentWeights]) -> None:
    for each in residents:
        each.sleep()


def _wake(residents: Sequence[ResidentWeights], failures: Sequence[str | None] = ()) -> None:
    if not any(failures):  # else there may be no memory to compare
        failures = [each.compare() for each in residents]
    failure = ranks.first_error(next((each for each in failures if each), None))
    for each in residents:
        each.woken(failure)


def _lose_together(residents: Sequence[ResidentWeights]) -> None:
    """A rank or a model that lost its weights makes those of the others useless."""
    reason = ranks.first_error(next((each.lost for each in residents if each.lost), None))
    if reason is None:
        return
    for each in residents:
        each.withdraw()
        if each.phase is not Phase.LOST:
            each.lose(reason)


def _guard(resident: ResidentWeights) -> None:
    """During a session, SGLang loads nothing that does not fit."""
    model = resident.model
    load: Callable[[Any], object] = model.load_weights  # type: ignore[assignment]  # every model of SGLang has it

    def load_weights(weights: Any) -> object:
        given = list(weights)
        _unguard(model)
        try:
            failure = _on_every_rank(lambda: resident.check_some(given))
            if failure is not None:
                raise CheckpointError(failure)
            return resident.load_some(load, given)
        finally:
            vars(model)["load_weights"] = load_weights

    setattr(load_weights, _MARK, vars(model).get("load_weights"))
    vars(model)["load_weights"] = load_weights


def _unguard(model: nn.Module) -> None:
    guarded = vars(model).get("load_weights")
    if hasattr(guarded, _MARK):
        del vars(model)["load_weights"]
        if (before := getattr(guarded, _MARK)) is not None:
            vars(model)["load_weights"] = before


def _without_weights(original: Around, self: Any, request: Any, tags: Sequence[str], output: str) -> Any:
    """The same request without the weights; SGLang takes no tag for all of them."""
    others = [tag for tag in tags if tag != _WEIGHTS]
    return original(self, msgspec.structs.replace(request, tags=others)) if others else _output(output, None)


def _released(holder: Any, tags: Sequence[str]) -> list[str]:
    """Of tags that are to be resumed, those that can be: SGLang ends when it is told one that was not released."""
    released = getattr(holder, "offload_tags", tags)
    return [tag for tag in tags if tag in released or tag == _WEIGHTS]


def _all_tags() -> Sequence[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return list(GPU_MEMORY_ALL_TYPES)


def _output(name: str, failure: str | None) -> Any:
    """One of SGLang's answers, by the name of its class."""
    from sglang.srt.managers import io_struct

    cls = getattr(io_struct, name)
    return cls() if failure is None else cls(success=False, message=failure)


# --- hooks

_UPDATES: dict[str, Mapping[str, Around]] = {
    _RUNNERS: dict.fromkeys(
        (
            "begin_weight_update",
            "load_weights_from_distributed",
            "update_weights_from_disk",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        ),
        _withdraw_first,
    ),
    _RUNNER: dict.fromkeys(
        (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        ),
        _withdraw_first,
    ),
}
_LOOPS: dict[str, Mapping[str, Around]] = {
    _SCHEDULER: dict.fromkeys(("run_event_loop", "event_loop_normal", "event_loop_overlap"), _offer_first)
}
_CONTROLS: dict[str, Mapping[str, Around]] = {
    _CONTROL: {
        "update_weights_from_disk": _update_from_disk,
        "begin_weight_update": _begin_session,
        "update_weights_from_tensor": partial(_update_in_session, "UpdateWeightsFromTensorReqOutput"),
        "update_weights_from_distributed": partial(_update_in_session, "UpdateWeightsFromDistributedReqOutput"),
        "end_weight_update": _end_session,
        "update_weights_from_ipc": partial(_update_at_once, "UpdateWeightsFromIPCReqOutput"),
        "release_memory_occupation": _release,
        "resume_memory_occupation": _resume,
        "check_weights": _check_weights,
        "get_weights_by_name": _get_weights,
        "save_remote_model": _save_weights,
        "save_sharded_model": _save_weights,
    },
    _SCHEDULER: {"_add_request_to_queue": _refuse, "continue_generation": _go_on},
}


def _hook(places: Mapping[str, Mapping[str, Around]]) -> None:
    """Put each function around the method of its name, where there is one. Idempotent.

    Raises:
        NotAvailable: this SGLang has none of them.
    """
    found = 0
    for dotted, methods in places.items():
        module, _, cls = dotted.rpartition(".")
        try:
            owner = getattr(importlib.import_module(module), cls)
        except (ImportError, AttributeError):
            continue
        for name in methods.keys() & vars(owner).keys():
            found += 1
            _put_around(owner, name, methods[name])
    if not found:
        raise NotAvailable(
            f"SGLang {sglang.__version__} has none of the methods that are watched in {', '.join(places)}"
        )


def _put_around(owner: type, name: str, around: Around) -> None:
    original = vars(owner)[name]
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(hooked, _MARK, True)
    setattr(owner, name, hooked)
