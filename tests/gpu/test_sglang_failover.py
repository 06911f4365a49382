"""Standbys on a GPU: the primary is killed while it answers, a standby maps the committed device memory and goes on.

It has not run on one yet. On a machine with one:

pip install -e '.[cuda,nixl,sglang,dev]'
python -m pytest -m gpu tests/gpu/test_sglang_failover.py
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from modelexpress.takeover_lock import look
from tests.sglang.test_failover import (
    Fleet,
    running,
    strategies,
    test_one_of_two_standbys_takes_over_and_then_the_other,
    under_load,
)
from tests.support.sglang_cpu.model_cache import ModelCache

__all__ = ["running", "test_one_of_two_standbys_takes_over_and_then_the_other"]  # what pytest collects here
pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(900)]


def test_the_weights_of_a_gigabyte_are_taken_over_within_a_second(
    models: ModelCache, tmp_path: Path, running: ExitStack
) -> None:
    fleet = Fleet(tmp_path, running, models("llama_large"))
    primary = fleet.primary()
    wanted = primary.generate()
    standby = fleet.standby()
    owner = look(fleet.lock).owner

    with under_load(primary):
        os.kill(owner.pid, signal.SIGKILL)
        taken = fleet.owner_after(owner.pid)

    print(f"weights after {taken.weights_s:.3f} s, first health check answered after {taken.answered_s:.3f} s")
    assert strategies(standby) == {"gms"}
    assert standby.generate() == wanted
    assert taken.weights_s < 1.0
