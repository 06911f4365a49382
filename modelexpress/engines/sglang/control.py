"""One SGLang engine, as whoever captures it needs it: ask, hold, release, resume. By HTTP, or in this process.

Neither imports SGLang before it is asked something, and the one by HTTP not at all. Written against 0.5.23.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from modelexpress.errors import SnapshotError, printable
from modelexpress.processes import environ_of, folder_of, listener_on

_ANSWER_S = 30.0  # for one answer that no model computes
_SHOWN = 500  # characters of a refusal
_ENDS = ("registry", "gms")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says about itself, as far as a snapshot must know it."""

    version: str
    is_generation: bool
    skip_server_warmup: bool
    has_tokenizer: bool
    dp_size: int
    nnodes: int
    disaggregation_mode: str
    settings: Mapping[str, str | None]  # of modelexpress: registry and gms


class EngineControl(ABC):
    """What can be asked of an engine. Every call returns or raises SnapshotError, in the time it is given."""

    @abstractmethod
    def facts(self) -> EngineFacts:
        """What it is."""

    @abstractmethod
    def pid(self) -> int:
        """Its main process, of which all others are descendants."""

    @abstractmethod
    def environ(self) -> Mapping[str, str]:
        """The environment that its main process was started with."""

    @abstractmethod
    def folder(self) -> str:
        """Where its main process works."""

    @abstractmethod
    def busy(self) -> int:
        """How many requests run or wait, as its schedulers last said."""

    @abstractmethod
    def generate(self, request: Mapping[str, object], *, timeout_s: float) -> Mapping[str, Any]:
        """One request, and its answer."""

    @abstractmethod
    def hold(self) -> None:
        """Compute nothing more. Requests wait, and whatever runs is put back and begins anew afterwards.

        SGLang ends itself when it is told to release memory while a request runs. A held engine never does, and a
        health check that arrives cannot touch weights that are not there.
        """

    @abstractmethod
    def go_on(self) -> None:
        """The end of `hold`."""

    @abstractmethod
    def release(self, tags: Sequence[str], *, timeout_s: float) -> None:
        """Let go of memory; with `weights`, of everything that modelexpress holds."""

    @abstractmethod
    def resume(self, tags: Sequence[str], *, timeout_s: float) -> None:
        """Take it back. Twice in a row ends SGLang."""


def control_of(engine: Any, *, api_key: str | None = None) -> EngineControl:
    """For the URL of a server on this host, an `sgl.Engine` of this process, or what is a control already.

    Raises:
        SnapshotError: it is neither.
    """
    if isinstance(engine, EngineControl):
        return engine
    if isinstance(engine, str):
        return ServerControl(engine, api_key=api_key)
    if hasattr(engine, "tokenizer_manager") and hasattr(engine, "loop"):
        return LocalControl(engine)
    raise SnapshotError(f"a {type(engine).__name__} is no engine; give a URL like http://127.0.0.1:30000, or an Engine")


class ServerControl(EngineControl):
    """A server by its HTTP interface.

    Args:
        api_key: the server's admin key, else its key, when it has one.
        pid: its main process; otherwise who listens on the port.
    """

    def __init__(self, url: str, *, api_key: str | None = None, pid: int | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise SnapshotError(f"{url!r} is no URL of a server; give one like http://127.0.0.1:30000")
        self.url = url.rstrip("/")
        self._port = parts.port or 80
        self._api_key = api_key
        self._pid = pid

    def facts(self) -> EngineFacts:
        server, model = self._get("/server_info"), self._get("/model_info")
        return _facts(server, model, self.environ())

    def pid(self) -> int:
        if self._pid is None:
            self._pid = listener_on(self._port)
        return self._pid

    def environ(self) -> Mapping[str, str]:
        return environ_of(self.pid())

    def folder(self) -> str:
        return folder_of(self.pid())

    def busy(self) -> int:
        return _requests(self._get("/v1/loads")["loads"])

    def generate(self, request: Mapping[str, object], *, timeout_s: float) -> Mapping[str, Any]:
        return self._ask("/generate", request, timeout_s)

    def hold(self) -> None:
        self._ask("/pause_generation", {"mode": "retract"}, _ANSWER_S)

    def go_on(self) -> None:
        self._ask("/continue_generation", {}, _ANSWER_S)

    def release(self, tags: Sequence[str], *, timeout_s: float) -> None:
        self._ask("/release_memory_occupation", {"tags": list(tags)}, timeout_s)

    def resume(self, tags: Sequence[str], *, timeout_s: float) -> None:
        self._ask("/resume_memory_occupation", {"tags": list(tags)}, timeout_s)

    def _get(self, path: str) -> Mapping[str, Any]:
        return self._ask(path, None, _ANSWER_S)

    def _ask(self, path: str, body: Mapping[str, object] | None, timeout_s: float) -> Mapping[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(self.url + path, data=data, headers=headers)  # noqa: S310 - http: see __init__
        # A proxy of the environment does not lead to a server on this host.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=max(0.001, timeout_s)) as answer:
                found = json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as exc:
            with exc:
                said = printable(exc.read(_SHOWN).decode(errors="replace"))
            raise SnapshotError(f"{self.url}{path} answered {exc.code}: {said or exc.reason}") from exc
        except TimeoutError as exc:
            raise SnapshotError(f"{self.url}{path} did not answer within {timeout_s:g} s") from exc
        except (OSError, ValueError) as exc:  # ValueError: JSON; what urllib wraps is an OSError
            reason = getattr(exc, "reason", exc)
            late = isinstance(reason, TimeoutError)
            why = f"did not answer within {timeout_s:g} s" if late else f"gave no answer: {reason}"
            raise SnapshotError(f"{self.url}{path} {why}; is the server there?") from exc
        return found if isinstance(found, dict) else {"answer": found}


class LocalControl(EngineControl):
    """An `sgl.Engine` of this process. For the thread that made the engine, outside of its event loop."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def facts(self) -> EngineFacts:
        model = self._engine.get_model_info()
        return _facts(self._engine.get_server_info(), model, self.environ())

    def pid(self) -> int:
        return os.getpid()

    def environ(self) -> Mapping[str, str]:
        return dict(os.environ)

    def folder(self) -> str:
        return os.getcwd()

    def busy(self) -> int:
        loads = self._run(self._engine.tokenizer_manager.get_loads(), _ANSWER_S)
        return _requests([each.to_dict({"core"}) for each in loads])

    def generate(self, request: Mapping[str, object], *, timeout_s: float) -> Mapping[str, Any]:
        given = {("prompt" if name == "text" else name): value for name, value in request.items()}
        found: Mapping[str, Any] = self._run(self._engine.async_generate(**given), timeout_s)
        return found

    def hold(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._run(self._engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="retract")), _ANSWER_S)

    def go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._run(self._engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput()), _ANSWER_S)

    def release(self, tags: Sequence[str], *, timeout_s: float) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        request = ReleaseMemoryOccupationReqInput(tags=list(tags))
        self._run(self._engine.tokenizer_manager.release_memory_occupation(request, None), timeout_s)

    def resume(self, tags: Sequence[str], *, timeout_s: float) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        request = ResumeMemoryOccupationReqInput(tags=list(tags))
        self._run(self._engine.tokenizer_manager.resume_memory_occupation(request, None), timeout_s)

    def _run(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        try:
            return self._engine.loop.run_until_complete(asyncio.wait_for(work, max(0.001, timeout_s)))
        except TimeoutError as exc:
            raise SnapshotError(f"the engine did not answer within {timeout_s:g} s") from exc
        except (ValueError, RuntimeError) as exc:  # what SGLang refuses a request with
            raise SnapshotError(f"the engine refused: {exc}") from exc


def wait_until_idle(control: EngineControl, *, timeout_s: float) -> None:
    """Return when no request runs or waits.

    Raises:
        SnapshotError: there still are some after `timeout_s`; says how many.
    """
    give_up = time.monotonic() + timeout_s
    while left := control.busy():
        if time.monotonic() > give_up:
            raise SnapshotError(f"{left} requests still run or wait after {timeout_s:g} s; send none, and try again")
        time.sleep(0.2)


def _requests(loads: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(each["num_running_reqs"]) + int(each["num_waiting_reqs"]) for each in loads)


def _facts(server: Mapping[str, Any], model: Mapping[str, Any], environ: Mapping[str, str]) -> EngineFacts:
    try:
        return EngineFacts(
            version=str(server["version"]),
            is_generation=bool(model["is_generation"]),
            skip_server_warmup=bool(server["skip_server_warmup"]),
            has_tokenizer=not server["skip_tokenizer_init"],
            dp_size=int(server["dp_size"]),
            nnodes=int(server["nnodes"]),
            disaggregation_mode=str(server["disaggregation_mode"]),
            settings=_settings(server, environ),
        )
    except KeyError as exc:
        raise SnapshotError(f"this SGLang does not say {exc}; snapshots are written against 0.5.23") from exc


def _settings(server: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str | None]:
    """Where modelexpress in the engine finds registry and memory service, by the rules of `config`."""
    extra = _mapping(server.get("model_loader_extra_config"))
    native = {"registry": _mapping(server.get("modelexpress_config")).get("url")}
    return {name: extra.get(name) or native.get(name) or environ.get(f"MX_{name.upper()}") or None for name in _ENDS}


def _mapping(given: object) -> Mapping[str, Any]:
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return {}  # a file's name
    return found if isinstance(found, dict) else {}
