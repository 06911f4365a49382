"""The platform that the other tests here stand on: models, processes, the oracle, the harness and the server."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.sglang_cpu.harness import Harness, generate
from tests.support.sglang_cpu.isolated import (
    IsolatedCall,
    IsolatedFailure,
    announce,
    run_isolated,
    run_together,
    wait_released,
)
from tests.support.sglang_cpu.memory import AnonymousPeak
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.models import make_model
from tests.support.sglang_cpu.oracle import tensor_digests
from tests.support.sglang_cpu.processes import session_members, start_session, wait_until_gone
from tests.support.sglang_cpu.server import SglangServer

pytestmark = pytest.mark.sglang


@dataclass(frozen=True)
class Case:
    """A model, the server arguments that change what is loaded, and how many parameters it then has."""

    kind: str
    parameters: int
    server_args: dict[str, str] = field(default_factory=dict)
    answers: bool = True


CASES = {
    "llama": Case("llama", 27),
    "llama_tied": Case("llama_tied", 27),  # lm_head.weight is the embedding under a second name
    "llama_online_fp8": Case("llama", 51, {"quantization": "fp8"}),
    "qwen3_moe": Case("qwen3_moe", 39),
    "mixtral": Case("mixtral", 17),
    "deepseek_v3": Case("deepseek_v3", 55),
    "qwen3_fp8": Case("qwen3_fp8", 51),
    "deepseek_v3_fp8": Case("deepseek_v3_fp8", 101, answers=False),
}


# --- what runs in other processes


def examine(folder: str, *, answers: bool, server_args: dict[str, str]) -> dict[str, object]:
    harness = Harness(folder, **server_args)
    first = harness.load()
    return {
        "parameters": [name for name, _ in first.named_parameters(remove_duplicate=False)],
        "digests": tensor_digests(first),
        "again": tensor_digests(harness.load()),
        "tokens": generate(harness.runner()) if answers else None,
    }


def echo(*values: object, **named: object) -> list[object]:
    return [*values, named]


def fail() -> None:
    raise LookupError("no such shard")


def sleep_long() -> None:
    time.sleep(600)


def start_and_wait(folder: str) -> None:
    sleep = shutil.which("sleep")
    child = start_session([sleep, "600"], env={}, output=Path(folder) / "out", cwd=Path(folder))
    announce(child.pid)
    wait_released()


def say_and_wait(word: str) -> str:
    announce(word)
    wait_released()
    return "released"


# --- models


def test_a_model_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    first = make_model("llama", tmp_path / "first")
    again = make_model("llama", tmp_path / "again")
    other = make_model("llama", tmp_path / "other", seed=1)

    shards = sorted(path.name for path in first.glob("*.safetensors"))
    assert len(shards) == 3
    for shard in shards:
        assert (first / shard).read_bytes() == (again / shard).read_bytes()
        assert (first / shard).read_bytes() != (other / shard).read_bytes()


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model kind 'gpt'; there are llama, "):
        make_model("gpt", tmp_path / "out")


# --- calls in other processes


def test_arguments_and_results_travel() -> None:
    assert run_isolated(echo, 1, Path("x"), name=[None]) == [1, "x", {"name": [None]}]


def test_an_exception_in_the_process_is_told() -> None:
    with pytest.raises(IsolatedFailure, match="LookupError: no such shard"):
        run_isolated(fail)


def test_a_call_that_hangs_is_ended() -> None:
    call = IsolatedCall(sleep_long)
    with pytest.raises(IsolatedFailure, match="no reply in time"), call:
        call.result(timeout_s=2)
    assert session_members(call.pid) == []


def test_a_call_announces_and_waits_for_its_release() -> None:
    with IsolatedCall(say_and_wait, "ready") as call:
        assert call.announced() == "ready"
        call.release()
        assert call.result() == "released"


def test_a_killed_call_is_told() -> None:
    with IsolatedCall(say_and_wait, "ready") as call:
        call.announced()
        call.kill()
        with pytest.raises(IsolatedFailure, match="the process ended with -9"):
            call.result()


def test_what_a_killed_process_started_dies_with_it(tmp_path: Path) -> None:
    with IsolatedCall(start_and_wait, tmp_path) as call:
        session = call.announced()
        assert len(session_members(session)) == 1
        call.kill(signal.SIGKILL)
        assert wait_until_gone(session, timeout_s=20) == []


# --- the oracle


class Helper:
    """Stands for a helper object of SGLang's, which the oracle knows by its module."""

    __module__ = "sglang.srt.layers.quantization"

    def __init__(self) -> None:
        self.scale = torch.ones(1)


def test_the_oracle_sees_tensors_wherever_they_hang() -> None:
    model = nn.Module()
    model.inner = nn.Linear(2, 2, bias=False)
    model.tied = model.inner
    model.register_buffer("table", torch.ones(2), persistent=False)
    model.plain = torch.ones(3, 2).t()
    model.kept = {"a": [torch.ones(1)], "b": (torch.ones(1),)}
    model.method = Helper()

    digests = tensor_digests(model)

    names = {"inner.weight", "tied.weight", "table", "plain", "kept['a'][0]", "kept['b'][0]", "method.scale"}
    assert set(digests) == names
    assert digests["inner.weight"] == digests["tied.weight"]
    model.plain = model.plain.contiguous()
    assert tensor_digests(model) == digests
    model.plain[0, 0] = 2
    assert tensor_digests(model)["plain"] != digests["plain"]


def test_the_oracle_refuses_tensors_without_data() -> None:
    with pytest.raises(ValueError, match="weight has no data"):
        tensor_digests(nn.Linear(2, 2, device="meta"))


# --- memory


def test_the_peak_is_of_memory_that_was_written() -> None:
    with AnonymousPeak(lambda: {0: os.getpid()}) as peak:
        time.sleep(0.1)
        before = peak.peak_bytes[0]
        kept = bytearray(os.urandom(1 << 20) * 64)
        time.sleep(0.1)
        del kept

    assert 60 << 20 <= peak.peak_bytes[0] - before < 160 << 20


# --- the harness


@pytest.fixture(scope="module")
def examined(models: ModelCache) -> dict[str, dict[str, object]]:
    """`examine` of each case, in a process each."""
    calls = [
        IsolatedCall(examine, models(case.kind), answers=case.answers, server_args=case.server_args)
        for case in CASES.values()
    ]
    return dict(zip(CASES, run_together(calls), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_the_harness_loads(name: str, examined: dict[str, dict[str, object]]) -> None:
    """Each parameter is there, and a second load in the same process is equal."""
    found = examined[name]

    assert len(found["parameters"]) == CASES[name].parameters
    assert set(found["parameters"]) <= set(found["digests"])
    assert found["again"] == found["digests"]


def test_the_oracle_sees_what_latent_attention_derives(examined: dict[str, dict[str, object]]) -> None:
    for kind, derived in {"deepseek_v3": ("w_kc", "w_vc"), "deepseek_v3_fp8": ("w_kc", "w_vc", "w_scale")}.items():
        expected = {f"model.layers.{layer}.self_attn.{name}" for layer in range(4) for name in derived}
        assert expected <= set(examined[kind]["digests"]) - set(examined[kind]["parameters"])


def test_every_model_answers_with_tokens_of_its_own(examined: dict[str, dict[str, object]]) -> None:
    answers = [tuple(found["tokens"]) for name, found in examined.items() if CASES[name].answers]
    assert all(len(set(tokens)) >= 8 for tokens in answers), answers
    assert len(set(answers)) == len(answers)


# --- the server


def test_a_server_answers_and_leaves_nothing(models: ModelCache, examined: dict[str, dict[str, object]]) -> None:
    """Greedy tokens repeat and are the harness's; an adapter changes them; the whole tree ends."""
    lora = ("--enable-lora", "--lora-paths", f"a={models.adapter()}", "--lora-backend", "torch_native")
    with SglangServer(models("llama"), *lora, "--max-loras-per-batch", "2") as server:
        server.wait_ready()
        tokens = server.generate()
        assert tokens == examined["llama"]["tokens"]
        assert server.generate() == tokens
        assert server.generate(lora_path="a") != tokens
        assert {tp_rank: len(sums) for tp_rank, sums in server.checksums().items()} == {0: CASES["llama"].parameters}
        assert len(server.scheduler_pids()) == 1
        assert server.peak_anonymous_bytes[0] > 100 << 20

    assert session_members(server.pid) == []
    assert "The server is fired up" in server.log


def test_a_refused_launch_ends_by_itself(tmp_path: Path) -> None:
    with SglangServer(tmp_path / "nothing") as server:
        ended = server.run_to_exit(timeout_s=90)

    assert ended.returncode != 0
    assert ended.left == ()
    assert "nothing" in ended.last_lines
