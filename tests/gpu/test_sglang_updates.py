"""A33 on a GPU: the checks of tests/sglang/test_updates.py, with the weights and the memory service on the device.

It has not run on one yet. On a machine with one:

pip install -e '.[cuda,nixl,sglang,dev]'
python -m pytest -m gpu tests/gpu/test_sglang_updates.py

Left to the CPU: kinds of models that need their own kernels on a GPU (experts, MLA, fp8).
"""

from __future__ import annotations

import pytest

from tests.sglang.test_updates import (
    from_folders,
    from_tensors,
    test_a_good_update_is_what_the_engine_loads_and_has_a_new_name,
    test_a_refused_update_changes_nothing,
    test_an_update_leaves_shared_memory_as_it_is,
    test_tensors_that_do_not_fit_change_nothing,
    test_tensors_that_fit_are_loaded_and_offered_under_the_name_they_are_given,
    test_what_fails_half_way_is_brought_back_at_the_end,
    test_without_files_the_old_weights_come_back_from_the_service,
)

__all__ = [  # what pytest collects here
    "from_folders",
    "from_tensors",
    "test_a_good_update_is_what_the_engine_loads_and_has_a_new_name",
    "test_a_refused_update_changes_nothing",
    "test_an_update_leaves_shared_memory_as_it_is",
    "test_tensors_that_do_not_fit_change_nothing",
    "test_tensors_that_fit_are_loaded_and_offered_under_the_name_they_are_given",
    "test_what_fails_half_way_is_brought_back_at_the_end",
    "test_without_files_the_old_weights_come_back_from_the_service",
]
pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.nixl]
