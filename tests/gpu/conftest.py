"""Tests on a GPU; what is missing for one is the reason why it is skipped.

Those on SGLang run what tests/sglang runs, and set TESTS_DEVICE=cuda for its engines and services. With
TESTS_DEVICE=cpu in the environment they run on the host: a rehearsal where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.sglang_cpu.environment import DEVICE
from tests.support.sglang_cpu.model_cache import ModelCache

_HERE = Path(__file__).parent
_TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        on_sglang = item.get_closest_marker("sglang") is not None
        if on_sglang and find_spec("sglang") is None:
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed here"))
        rehearsal = on_sglang and _device() == "cpu"
        if item.get_closest_marker("gpu") and not rehearsal and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or a torch without CUDA"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(autouse=True, scope="module")
def _on_the_device() -> Iterator[None]:
    """Before the fixtures of a module start engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEVICE, _device())
        yield


def _device() -> str:
    return os.environ.get(DEVICE, "cuda")


@pytest.fixture(scope="session")
def models() -> ModelCache:
    """As in tests/sglang."""
    return ModelCache()
