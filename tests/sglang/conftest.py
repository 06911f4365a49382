"""Tests on the real SGLang. They need its environment; elsewhere the folder is left out, and the summary says so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.sglang_cpu.model_cache import ModelCache

_HERE = Path(__file__).parent
_TIMEOUT_S = 300
_INSTALLED = find_spec("sglang") is not None


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of ours stay errors; SGLang and what it imports warn a lot."""
    if _INSTALLED:
        for line in ("default", r"error:::modelexpress(\.|$)", r"error:::tests(\.|$)"):
            config.addinivalue_line("filterwarnings", line)


def pytest_ignore_collect() -> bool | None:
    """Asked for each file of this folder."""
    return None if _INSTALLED else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _INSTALLED:
        terminalreporter.write_line("tests/sglang was left out: SGLang is not installed here; run make test-sglang")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server takes up to a minute to start, and longer on a busy machine."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="session")
def models() -> ModelCache:
    """`models("llama")` is a folder, `models.adapter()` one of a LoRA adapter for it."""
    return ModelCache()
