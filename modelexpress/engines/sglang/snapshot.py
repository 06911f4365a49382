"""Capture of a running SGLang engine: warm up, quiesce, and after the restore resume.

    warm_up      one real generation, so that nothing is captured that the first request would only initialise
    quiesce      warm_up; no request runs; memory released, publications withdrawn; looked for what is left of us in
                 every process; then, and only then, the ready file appears
    (capture, and restore, by CRIU: see modelexpress/criu.py and docs/snapshot.md)
    resume       the same devices in the same order; memory back, published again; one generation; the file goes

None of this touches a device or imports SGLang, except through an `Engine` of this process. What its schedulers do
when memory is released and resumed is in `engines.sglang.lifecycle`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from modelexpress import __version__
from modelexpress.devices import Device, devices, require_same_devices, shown, visible
from modelexpress.engines.sglang.control import EngineControl, EngineFacts, control_of, wait_until_idle
from modelexpress.errors import SnapshotError, describe
from modelexpress.leftovers import Ends, Leftover, ends_of, leftovers
from modelexpress.processes import tree_of

logger = logging.getLogger(__name__)

DEFAULT_TAGS = ("kv_cache", "weights")
TIMEOUT_VARIABLE = "SGLANG_WARMUP_TIMEOUT"

_WARM_UP_S = 600.0
_DISAGGREGATED_WARM_UP_S = 1800.0
_IDLE_S = 60.0
# Withdrawing waits 20 s for readers and a lease for a registry that does not answer.
_RELEASE_S = 120.0
# Weights are mapped, compared with their checksums, and published.
_RESUME_S = 600.0
_SETTLE_S = 5.0  # a thread that was told to end may be seen for a moment
_SHOWN = 8

_MAX_NEW_TOKENS = 8
_TEXT = "One, two, three,"
_IDS = (10, 11, 12)
# What SGLang takes for a peer that needs no kv-cache from anybody (`FAKE_BOOTSTRAP_HOST`).
_NO_PEER = "2.2.2.2"
_FILE_VERSION = 1


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What was asked of the engine: how many ranks made how many tokens, or why none."""

    ranks: int
    tokens: int
    seconds: float
    skipped: str | None = None

    def __str__(self) -> str:
        if self.skipped:
            return f"no warm-up: {self.skipped}"
        return f"warmed up: {self.tokens} tokens on {self.ranks} data-parallel ranks in {self.seconds:.2f} s"


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ready file: an engine that may be captured, as it was at that moment.

    `state` is `resumed` once memory was taken back, so that a resume that failed later can be repeated.
    """

    version: int = _FILE_VERSION
    modelexpress: str
    sglang: str
    created: str
    pid: int
    processes: tuple[int, ...]
    tags: tuple[str, ...]
    devices: tuple[Device, ...]
    visible: tuple[Device, ...]
    warm_up: str
    state: Literal["quiesced", "resumed"] = "quiesced"


def warm_up(engine: Any, *, api_key: str | None = None, environ: Mapping[str, str] | None = None) -> WarmUp:
    """Let every data-parallel rank generate up to eight tokens, greedily, one rank after the other.

    Skipped where SGLang's own warm-up is (`--skip-server-warmup`), and for models that do not generate.

    Args:
        engine: a server's URL, an `sgl.Engine` of this process, or an EngineControl.
        environ: where SGLANG_WARMUP_TIMEOUT is looked up.

    Raises:
        SnapshotError: a rank refused, made no token, or time is over; a snapshot of it would not start either.
    """
    control = control_of(engine, api_key=api_key)
    return _warm_up(control, control.facts(), environ)


def warm_up_timeout_s(disaggregation_mode: str, environ: Mapping[str, str] | None = None) -> float:
    """Seconds for all ranks together: SGLANG_WARMUP_TIMEOUT if above 0, else 600, disaggregated 1800.

    Raises:
        SnapshotError: the variable is no number.
    """
    given = (os.environ if environ is None else environ).get(TIMEOUT_VARIABLE, "").strip()
    try:
        seconds = float(given or 0)
    except ValueError as exc:
        raise SnapshotError(f"{TIMEOUT_VARIABLE} is {given!r}; give a number of seconds") from exc
    if seconds > 0:  # NaN is not
        return seconds
    return _WARM_UP_S if disaggregation_mode == "null" else _DISAGGREGATED_WARM_UP_S


def warm_up_requests(facts: EngineFacts, *, as_ids: bool = False) -> list[dict[str, object]]:
    """One request for each data-parallel rank. Ids where there is no tokenizer, or no peer to prefill for.

    A rank is named where there are several: a balancer may give two to one of them, and none to another.
    """
    disaggregated = facts.disaggregation_mode != "null"
    requests = []
    for dp_rank in range(facts.dp_size):
        sampling: dict[str, object] = {"temperature": 0, "max_new_tokens": _MAX_NEW_TOKENS}
        request: dict[str, object] = {"sampling_params": sampling}
        if as_ids or disaggregated or not facts.has_tokenizer:
            request["input_ids"] = list(_IDS)
        else:
            request["text"] = _TEXT
        if disaggregated:
            sampling["ignore_eos"] = True
            request |= {"bootstrap_host": _NO_PEER, "bootstrap_room": dp_rank}
        if disaggregated or facts.dp_size > 1:
            request["routed_dp_rank"] = dp_rank
        requests.append(request)
    return requests


def quiesce(
    engine: Any,
    ready_file: str | os.PathLike[str],
    *,
    api_key: str | None = None,
    tags: Sequence[str] = DEFAULT_TAGS,
    idle_timeout_s: float = _IDLE_S,
    environ: Mapping[str, str] | None = None,
) -> Ready:
    """Make an engine fit for capture, and say so in a file. It answers nothing from then on, until `resume`.

    Anything that fails is undone: memory is taken back, the engine serves again, and there is no file.

    Args:
        engine: as for `warm_up`; on this host, in this network namespace.
        ready_file: must not be there yet. It appears whole, by a rename.
        tags: what SGLang releases.
        idle_timeout_s: how long running requests may take to end. Later ones wait until `resume`.

    Raises:
        SnapshotError: the warm-up failed, requests do not end, something of modelexpress is left in one of the
            engine's processes (each thing is named), or the file cannot be written.
    """
    control = control_of(engine, api_key=api_key)
    path = Path(ready_file)
    _require_place_for(path)
    if "weights" not in tags:
        raise SnapshotError(
            f"tags are {','.join(tags) or 'empty'}; without weights nothing of modelexpress is let go of"
        )
    facts = control.facts()
    if facts.nnodes > 1:
        raise SnapshotError(
            f"this engine runs on {facts.nnodes} nodes; the processes of one node alone can be looked at"
        )
    ends = ends_of(facts.settings, control.folder())
    listed = devices()
    warmed = _warm_up(control, facts, environ)
    wait_until_idle(control, timeout_s=idle_timeout_s)
    control.hold()
    released = False
    try:
        control.release(tags, timeout_s=_RELEASE_S)
        released = True
        pids = tree_of(control.pid())
        _require_nothing_left(pids, ends)
        ready = Ready(
            modelexpress=__version__,
            sglang=facts.version,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            pid=control.pid(),
            processes=pids,
            tags=tuple(tags),
            devices=listed,
            visible=visible(listed, control.environ().get("CUDA_VISIBLE_DEVICES")),
            warm_up=str(warmed),
        )
        write_ready(path, ready)
    except BaseException as exc:
        stuck = _serve_again(control, tags if released else ())
        if stuck is None or not isinstance(exc, SnapshotError):
            raise
        raise SnapshotError(f"{exc}; and the engine does not serve again ({stuck}): restart it") from exc
    logger.info("%s may be captured: %d processes, devices %s", ready.pid, len(pids), shown(listed))
    return ready


def resume(
    engine: Any,
    ready_file: str | os.PathLike[str],
    *,
    api_key: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> WarmUp:
    """Let an engine serve again, after its restore or instead of it; then remove the ready file.

    Can be called again after it failed.

    Raises:
        SnapshotError: the devices or the process are not those of the file (nothing was touched); or the engine did
            not take its memory back, or does not generate.
    """
    control = control_of(engine, api_key=api_key)
    path = Path(ready_file)
    ready = read_ready(path)
    require_as_recorded(ready, devices(), control.environ().get("CUDA_VISIBLE_DEVICES"))
    if control.pid() != ready.pid:
        raise SnapshotError(f"{path} is of process {ready.pid}, and the engine is process {control.pid()}")
    if ready.state == "quiesced":
        control.resume(ready.tags, timeout_s=_RESUME_S)
        _replace(path, msgspec.structs.replace(ready, state="resumed"))
    control.go_on()
    facts = control.facts()
    answered = WarmUp(0, 0, 0.0, "the model does not generate")
    if facts.is_generation:
        answered = _ask_all(control, warm_up_requests(facts, as_ids=True), _timeout_s(facts, environ))
    path.unlink()
    return answered


def left_behind(engine: Any, *, api_key: str | None = None) -> tuple[Leftover, ...]:
    """Everything of modelexpress in the engine's processes at this moment. Empty after `quiesce`."""
    control = control_of(engine, api_key=api_key)
    return leftovers(tree_of(control.pid()), ends_of(control.facts().settings, control.folder()))


def require_as_recorded(ready: Ready, listed: Sequence[Device], setting: str | None) -> None:
    """Refuse to go on with devices that are not those of the ready file.

    Args:
        listed: what the driver lists now.
        setting: the engine's CUDA_VISIBLE_DEVICES.

    Raises:
        SnapshotError: names what was recorded and what is there.
    """
    require_same_devices(ready.devices, listed)
    require_same_devices(ready.visible, visible(listed, setting), what="devices that the engine sees")


def read_ready(path: Path) -> Ready:
    """The ready file.

    Raises:
        SnapshotError: it is not there, or is not one of this version.
    """
    try:
        ready = msgspec.json.decode(path.read_bytes(), type=Ready)
    except OSError as exc:
        raise SnapshotError(f"there is no ready file {path} ({exc.strerror}); quiesce the engine first") from exc
    except msgspec.DecodeError as exc:
        raise SnapshotError(f"{path} is no ready file of this version: {exc}") from exc
    if ready.version != _FILE_VERSION:
        raise SnapshotError(f"{path} has version {ready.version}; this modelexpress reads {_FILE_VERSION}")
    return ready


def write_ready(path: Path, ready: Ready) -> None:
    """Let the file appear, whole and on the disk, or not at all.

    Raises:
        SnapshotError: there is one already, or the folder cannot be written.
    """
    _require_place_for(path)
    _replace(path, ready)


def _replace(path: Path, ready: Ready) -> None:
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(ready)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as exc:
        raise SnapshotError(f"the ready file {path} cannot be written: {exc.strerror}") from exc
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def _require_place_for(path: Path) -> None:
    if os.path.lexists(path):
        raise SnapshotError(f"{path} is there already; resume that engine, or remove it if the engine is gone")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SnapshotError(f"the ready file's folder {path.parent} is not there or cannot be written")


def _warm_up(control: EngineControl, facts: EngineFacts, environ: Mapping[str, str] | None) -> WarmUp:
    timeout_s = _timeout_s(facts, environ)
    if facts.skip_server_warmup:
        return WarmUp(0, 0, 0.0, "the engine was started with --skip-server-warmup")
    if not facts.is_generation:
        return WarmUp(0, 0, 0.0, "the model does not generate")
    return _ask_all(control, warm_up_requests(facts), timeout_s)


def _timeout_s(facts: EngineFacts, environ: Mapping[str, str] | None) -> float:
    return warm_up_timeout_s(facts.disaggregation_mode, environ)


def _ask_all(control: EngineControl, requests: Sequence[Mapping[str, object]], timeout_s: float) -> WarmUp:
    started = time.monotonic()
    tokens = 0
    for dp_rank, request in enumerate(requests):
        left_s = timeout_s - (time.monotonic() - started)
        if left_s <= 0:
            raise SnapshotError(f"{dp_rank} of {len(requests)} ranks generated within {timeout_s:g} s")
        try:
            tokens += _tokens_of(control.generate(request, timeout_s=left_s))
        except SnapshotError as exc:
            raise SnapshotError(f"rank {dp_rank} of {len(requests)} did not generate: {exc}") from exc
    return WarmUp(len(requests), tokens, time.monotonic() - started)


def _tokens_of(answer: Mapping[str, Any]) -> int:
    """How many tokens were generated.

    Raises:
        SnapshotError: none, or the request was broken off.
    """
    about = answer.get("meta_info") or {}
    reason = about.get("finish_reason") or {}
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise SnapshotError(f"the request was broken off: {reason.get('message') or reason}")
    tokens = int(about.get("completion_tokens") or 0)
    if tokens < 1:
        raise SnapshotError(f"the answer has no token: {str(dict(answer))[:200]}")
    return tokens


def _require_nothing_left(pids: Sequence[int], ends: Ends) -> None:
    give_up = time.monotonic() + _SETTLE_S
    while found := leftovers(pids, ends):
        if time.monotonic() > give_up:
            shown_ = "; ".join(map(str, found[:_SHOWN])) + ("; ..." if len(found) > _SHOWN else "")
            raise SnapshotError(f"{len(found)} things of modelexpress are left after release: {shown_}")
        time.sleep(0.1)


def _serve_again(control: EngineControl, tags: Sequence[str]) -> str | None:
    """Undo what was done so far; why not, when it cannot be undone."""
    try:
        if tags:
            control.resume(tags, timeout_s=_RESUME_S)
        control.go_on()
    except SnapshotError as exc:
        logger.warning("the engine was not captured, and does not serve again: %s", describe(exc))
        return str(exc)
    return None
