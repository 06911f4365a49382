"""A34 on a GPU: the checks of tests/sglang/test_sleep.py, with the weights and the memory service on the device.

It has not run on one yet. On a machine with one:

pip install -e '.[cuda,nixl,sglang,dev]'
python -m pytest -m gpu tests/gpu/test_sglang_sleep.py
"""

from __future__ import annotations

import pytest

from tests.sglang.test_sleep import (
    test_lost_weights_may_come_as_tensors,
    test_weights_come_back_from_the_memory_service,
    test_weights_that_are_gone_are_answered_with_nothing_until_all_are_new,
)

__all__ = [  # what pytest collects here
    "test_lost_weights_may_come_as_tensors",
    "test_weights_come_back_from_the_memory_service",
    "test_weights_that_are_gone_are_answered_with_nothing_until_all_are_new",
]
pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.nixl]
