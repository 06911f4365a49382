"""Memory for tensors that are handed out: reused when nobody has it any more, and never before."""

import gc
import random

import pytest
import torch

from modelexpress.checkpoint.blocks import Blocks
from modelexpress.checkpoint.index import open_index
from modelexpress.checkpoint.reader import DiskTensors
from tests.checkpoint.destination import TORCH, assert_same
from tests.support.safetensors_writer import raw, write_file

NBYTES = 5 << 20  # large enough to be reused


def large(blocks: Blocks) -> torch.Tensor:
    return blocks.empty((NBYTES,), torch.uint8, NBYTES)


def test_a_dropped_block_is_used_again():
    blocks = Blocks(2 * NBYTES)
    first = large(blocks)
    address = first.data_ptr()

    del first

    assert large(blocks).data_ptr() == address


@pytest.mark.parametrize("keep", [
    lambda t: t, lambda t: t[5:6], lambda t: t.view(torch.int32), lambda t: t.numpy(), lambda t: t.detach(),
    lambda t: t.untyped_storage(), lambda t: torch.nn.Parameter(t, requires_grad=False),
    lambda t: memoryview(t.numpy()), torch.from_dlpack,
])  # fmt: skip
def test_whatever_still_looks_at_a_block_keeps_it(keep):
    blocks = Blocks(2 * NBYTES)
    first = large(blocks)
    address, kept = first.data_ptr(), keep(first)
    del first
    gc.collect()

    other = large(blocks)
    assert other.data_ptr() != address

    del kept
    gc.collect()
    assert large(blocks).data_ptr() == address


@pytest.mark.parametrize("dtype", TORCH.values(), ids=str)
def test_tensors_are_ordinary_whatever_their_dtype(dtype):
    shape = (NBYTES // 8, 8 // dtype.itemsize)

    tensor = Blocks(0).empty(shape, dtype, NBYTES)

    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous(), tensor._base) == (dtype, shape, True, None)
    assert tensor.untyped_storage().nbytes() == NBYTES
    assert tensor.data_ptr() % 4096 == 0


def test_spare_blocks_stay_within_the_limit_and_go_at_the_end():
    blocks = Blocks(3 * (6 << 20))
    held = [large(blocks) for _ in range(5)]
    held.clear()
    held = [blocks.empty((9 << 20,), torch.uint8, 9 << 20)]  # fits no spare block

    assert len(blocks._spare) == 1
    blocks.close()
    assert blocks._spare == []
    held[0].fill_(1)


def test_a18_kept_tensors_stay_while_the_memory_of_dropped_ones_goes_round(tmp_path):
    tensors = {f"t{at:02d}": raw("BF16", 5 << 19, seed=at) for at in range(12)}
    write_file(tmp_path / "model.safetensors", tensors)
    chosen = random.Random(18).sample(sorted(tensors), 5)

    kept = {name: tensor for name, tensor in DiskTensors(open_index(tmp_path)).tensors() if name in chosen}
    gc.collect()

    assert_same(kept, {name: tensors[name] for name in chosen})
