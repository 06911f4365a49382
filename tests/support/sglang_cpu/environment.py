"""The environment in which tests run SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
"""The folder that `tests` is imported from."""

PLATFORM = "plain_cpu"

DEVICE = "TESTS_DEVICE"
"""The variable that says where engines of tests compute: "cpu" unless tests/gpu sets "cuda"."""

_SETTINGS = {
    # A health check would otherwise generate a token; some models of ours load but cannot.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # SGLang decorates a few functions for MoE; compiling them takes half a minute and a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def device() -> str:
    """Where engines compute, as SGLang names it. Isolated functions and servers inherit it."""
    return os.environ.get(DEVICE, "cpu")


def service_device() -> str:
    """What memory a service must keep for these engines, as `modelexpress gms serve --device` names it."""
    return "host" if device() == "cpu" else f"{device()}:0"


def platform_settings() -> dict[str, str]:
    """On a CPU our platform; on a GPU SGLang finds its own."""
    return {"SGLANG_PLATFORM": PLATFORM} if device() == "cpu" else {}


def engine_environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment made fit for SGLang: offline, loopback only, the device's platform.

    MX_* and SGLANG_* of the caller are left out: a test says what it needs in `overrides`.
    PYTHONDONTWRITEBYTECODE too: every process would compile what it imports anew.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MX_", "SGLANG_"))}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return kept | platform_settings() | _SETTINGS | dict(overrides or {})


def threads_binding(tp_size: int) -> str:
    """SGLANG_CPU_OMP_THREADS_BIND: one core a rank. Without it SGLang wants a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[tp_rank % len(cores)]) for tp_rank in range(tp_size))
