"""The KV pool on a GPU: free memory is the device's own, measured by SGLang, as tests/sglang/test_memory.py cannot.

It has not run on one yet. On a machine with one that nobody else uses meanwhile:

pip install -e '.[cuda,nixl,sglang,dev]'
python -m pytest -m gpu tests/gpu/test_sglang_memory.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.sources import keeping
from tests.sglang.test_memory import Pools, started
from tests.support.sglang_cpu.harness import Harness
from tests.support.sglang_cpu.isolated import run_isolated
from tests.support.sglang_cpu.model_cache import ModelCache

pytestmark = [pytest.mark.gpu, pytest.mark.sglang]


def one_start(folder: str, gms: str, options: dict[str, str]) -> dict[str, object]:
    """In a process of its own: it takes nothing with it that another would measure."""
    harness = Harness(folder, load_format="modelexpress", max_total_tokens=None)
    return started(harness, Pools(gms), **options)


def test_imported_weights_are_counted_once(models: ModelCache, tmp_path: Path) -> None:
    """A gigabyte: half of it, which is what a pool without the count is too large by, is far above the noise."""
    path = str(tmp_path / "gms.sock")
    keep = {"gms": path, "strategies": "gms,disk", "publish": "true"}
    with keeping(path):
        disk, writer, imported = (
            run_isolated(one_start, models("llama_large"), path, options, timeout_s=400)
            for options in ({"strategies": "disk"}, keep, keep)
        )

    assert [each["strategy"] for each in (disk, writer, imported)] == ["disk", "disk", "gms"]
    assert writer["baseline grew"] == disk["baseline grew"] == 0
    held = imported["service held"]
    assert imported["baseline grew"] == imported["loader says"] == held > 500_000_000
    more_nbytes = held + imported["private"] - disk["private"]  # what an import costs
    wanted = beside_share(disk["budget"], disk["free before"]) - more_nbytes
    assert beside_share(imported["budget"], imported["free before"] + held) == pytest.approx(wanted, abs=held / 5)


def beside_share(budget_nbytes: int, free_nbytes: int) -> float:
    """A pool beside its share, which is a half, of what was free without any weights: others' memory does not count."""
    return budget_nbytes - 0.5 * free_nbytes
