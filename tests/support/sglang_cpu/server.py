"""A whole SGLang server on loopback: start, wait, ask, kill, stop, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.redis_server import free_port
from tests.support.sglang_cpu.environment import ROOT, device, engine_environment, threads_binding
from tests.support.sglang_cpu.memory import AnonymousPeak
from tests.support.sglang_cpu.processes import (
    describe,
    end_session,
    send,
    session_members,
    start_session,
    wait_until_gone,
)

_TAIL_LINES = 40
_LINGER_S = 3.0
_SCHEDULER = re.compile(r"sglang::scheduler(?:.*_TP(\d+))?")
_FLAGS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    # A share of the whole machine's free memory: too small a one fails when others take memory meanwhile.
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "4096"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # else an idle scheduler polls, and takes a core from the servers beside it
)


class ServerFailed(Exception):
    """A server that ended, did not become ready in time, or gave no answer; the message has its last lines."""


class HttpFailure(Exception):
    """An answer other than 2xx."""

    def __init__(self, path: str, status: int, body: object) -> None:
        super().__init__(f"{path} answered {status}: {body}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Exit:
    """How a launch ended by itself; `left` names the processes that outlived it by three seconds."""

    returncode: int
    took_s: float
    last_lines: str
    left: tuple[str, ...]


class SglangServer:
    """One server. `with SglangServer(folder, "--load-format", "modelexpress") as server: server.wait_ready()`.

    Entering starts it and does not wait, so that a test can act while it loads. Leaving stops the whole tree and
    raises ProcessesLeft if that fails.

    `tp_size` above 1 gives each rank a core of its own and computes in float32, which makes the tokens of different
    sizes comparable. `warmup` lets SGLang generate once by itself, which some of our models cannot.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *args: str,
        tp_size: int = 1,
        env: Mapping[str, str] | None = None,
        warmup: bool = False,
    ) -> None:
        self.port = free_port()
        self.command = _command(model_dir, args, self.port, tp_size=tp_size, warmup=warmup)
        self._env = engine_environment(_rank_settings(tp_size) | dict(env or {}))
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._final_log = ""
        self._started_s = 0.0
        self._peak = AnonymousPeak(self._schedulers_by_rank)

    # --- life

    def start(self) -> None:
        """Start it, and return at once."""
        self._folder = Path(tempfile.mkdtemp(prefix="sglang-server-"))
        # SGLang makes half a dozen sockets and files there and removes none.
        env = {"TMPDIR": str(self._folder)} | self._env
        self._started_s = time.monotonic()
        self._process = start_session(self.command, env=env, output=self._folder / "log", cwd=ROOT)
        self._peak.start()

    def wait_ready(self, timeout_s: float = 300.0) -> SglangServer:
        """Return when it answers requests.

        Raises:
            ServerFailed: it ended, or time is over.
        """
        give_up = time.monotonic() + timeout_s
        while not self._healthy():
            if self._running.poll() is not None:
                raise ServerFailed(f"the server ended with {self._running.returncode}:\n{self.last_lines()}")
            if time.monotonic() > give_up:
                raise ServerFailed(f"the server is not ready after {timeout_s:.0f} s:\n{self.last_lines()}")
            time.sleep(0.2)
        return self

    def wait_log(self, text: str, timeout_s: float = 120.0) -> SglangServer:
        """Return when the log contains a text.

        Raises:
            ServerFailed: it ended without, or time is over.
        """
        give_up = time.monotonic() + timeout_s
        while text not in self.log:
            # The log is read once more after the end: its last lines may be what is waited for.
            if self._running.poll() is not None and text not in self.log:
                raise ServerFailed(f"the server ended and never said {text!r}:\n{self.last_lines()}")
            if time.monotonic() > give_up:
                raise ServerFailed(f"the server has not said {text!r} in {timeout_s:.0f} s:\n{self.last_lines()}")
            time.sleep(0.02)
        return self

    def run_to_exit(self, timeout_s: float = 120.0) -> Exit:
        """Wait for a launch that should fail by itself; then end whoever was left.

        Raises:
            ServerFailed: the main process is still there after `timeout_s`.
        """
        try:
            returncode = self._running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the server still runs after {timeout_s:.0f} s:\n{self.last_lines()}") from None
        took_s = time.monotonic() - self._started_s
        left = describe(wait_until_gone(self.pid, _LINGER_S))
        return Exit(returncode, took_s, self.last_lines(), left)

    def kill(self, sig: int = signal.SIGKILL, *, tp_rank: int | None = None) -> None:
        """Signal the scheduler of one rank, or every process of the server at once."""
        if tp_rank is None:
            send(session_members(self.pid), sig)
            return
        schedulers = self._schedulers_by_rank()
        if tp_rank not in schedulers:
            raise ServerFailed(f"no scheduler of TP rank {tp_rank} among {schedulers}:\n{self.last_lines()}")
        os.kill(schedulers[tp_rank], sig)

    def stop(self, patience_s: float = 20.0) -> None:
        """SIGTERM to the main process, SIGKILL to whoever is left after `patience_s`. Harmless twice.

        SGLang takes 5 to 10 s to end after SIGTERM; 0 kills it at once.

        Raises:
            ProcessesLeft: some outlive SIGKILL.
        """
        if self._process is None or self._folder is None:
            return
        self._peak.stop()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if patience_s > 0:
            self._process.terminate()
        end_session(self._process, patience_s)
        self._final_log = self.log
        shutil.rmtree(self._folder)
        self._folder = None

    def __enter__(self) -> SglangServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- looking at it

    @property
    def pid(self) -> int:
        """Of the main process, which is also the id of the session of all of them."""
        return self._running.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """All that its processes printed so far; still there after `stop`."""
        if self._folder is None:
            return self._final_log
        return (self._folder / "log").read_text(errors="replace")

    def last_lines(self, lines: int = _TAIL_LINES) -> str:
        return "\n".join(self.log.splitlines()[-lines:])

    def scheduler_pids(self) -> list[int]:
        """The processes that hold the weights, by TP rank; empty until they have imported SGLang."""
        by_rank = self._schedulers_by_rank()
        return [by_rank[tp_rank] for tp_rank in sorted(by_rank)]

    @property
    def peak_anonymous_bytes(self) -> dict[int, int]:
        """The most anonymous memory that each scheduler had since the start, by TP rank."""
        return self._peak.peak_bytes

    # --- asking it

    def generate(self, ids: Sequence[int] = (5, 6, 7, 8), max_new_tokens: int = 16, **request: object) -> list[int]:
        """Greedy tokens, never cut short; `request` adds fields to the request, such as `lora_path`."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return self.post("/generate", {"input_ids": list(ids), "sampling_params": sampling, **request})["output_ids"]

    def checksums(self) -> dict[int, dict[str, str]]:
        """SGLang's own checksum of each parameter and buffer, by TP rank and name.

        A tied parameter is there once. It hashes bytes alone; dtype and shape do not count.
        """
        ranks = self.post("/weights_checker", {"action": "checksum"})["ranks"]
        # One entry for each role (target, draft) that a rank plays, all with the same place.
        return {each["parallelism_info"][0]["tp_rank"]: each["checksums"] for each in ranks}

    def post(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 120.0) -> dict:
        """POST JSON, and the JSON of the answer; {} for an answer without a body.

        Raises:
            HttpFailure: the answer is not 2xx.
            ServerFailed: there is no answer.
        """
        return self._request(path, json.dumps(dict(body or {})).encode(), timeout_s)

    def get(self, path: str, *, timeout_s: float = 60.0) -> dict:
        """GET, otherwise like `post`."""
        return self._request(path, None, timeout_s)

    def _request(self, path: str, body: bytes | None, timeout_s: float) -> dict:
        try:
            return _ask(self.url + path, body, timeout_s)
        except urllib.error.HTTPError as exc:
            with exc:
                raise HttpFailure(path, exc.code, _decoded(exc.read())) from None
        except OSError as exc:
            raise ServerFailed(f"no answer from {path}: {exc}\n{self.last_lines()}") from exc

    def _healthy(self) -> bool:
        try:
            _ask(self.url + "/health", None, 5.0)
        except urllib.error.HTTPError as exc:
            exc.close()
            return False
        except OSError:
            return False
        return True

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed("the server was not started")
        return self._process

    def _schedulers_by_rank(self) -> dict[int, int]:
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return {}
        ranks = ((_tp_rank_of(child), child.pid) for child in children)
        return {tp_rank: pid for tp_rank, pid in ranks if tp_rank is not None}


def _command(model_dir: Path | str, args: Sequence[str], port: int, *, tp_size: int, warmup: bool) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_dir), *_FLAGS]
    command += ["--device", device(), "--host", "127.0.0.1", "--port", str(port)]
    if device() != "cpu":
        command.append("--disable-cuda-graph")
    if tp_size > 1:
        command += ["--tp", str(tp_size)]
    if tp_size > 1 and "--dtype" not in args:
        command += ["--dtype", "float32"]
    if not warmup:
        command.append("--skip-server-warmup")
    return [*command, *args]


def _rank_settings(tp_size: int) -> dict[str, str]:
    return {"SGLANG_CPU_OMP_THREADS_BIND": threads_binding(tp_size)} if tp_size > 1 else {}


def _tp_rank_of(process: psutil.Process) -> int | None:
    """SGLang names its schedulers `sglang::scheduler`, with `_TP1` and the like when there are several."""
    try:
        found = _SCHEDULER.match(" ".join(process.cmdline()))
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    return None if found is None else int(found[1] or 0)


def _ask(url: str, body: bytes | None, timeout_s: float) -> dict:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with opener.open(request, timeout=timeout_s) as answer:
        return _decoded(answer.read())


def _decoded(body: bytes) -> dict:
    """JSON, or the text of a body that is none."""
    try:
        return json.loads(body) if body else {}
    except ValueError:
        return {"text": body.decode(errors="replace")}
