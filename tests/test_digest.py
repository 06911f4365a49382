"""A flipped bit in memory is found, and the tensor named."""

import pytest
import torch
import xxhash
from torch import nn

from modelexpress.digest import TensorVerifier, Verifier, checksum_at, checksums_of
from modelexpress.discovery import discover, manifest_of
from modelexpress.errors import ManifestMismatch, VerificationFailed
from modelexpress.manifest import PIECE_NBYTES
from modelexpress.memory import memory_at
from modelexpress.plan import plan_transfer
from tests.support.tensors import TinyModel, randomize


def described(module):
    found = discover(module)
    return manifest_of(found.tensors, found.scalars)


def verify_all(plan, checksums, mode):
    verifier = Verifier(plan, checksums, mode)
    for chunk in plan.chunks:
        verifier.check(chunk)


def test_checksum_is_xxh3_of_the_bytes():
    data = torch.arange(1000, dtype=torch.int16)

    assert checksum_at(data.data_ptr(), 2000, "cpu") == xxhash.xxh3_64_intdigest(data.numpy().tobytes())
    assert checksum_at(torch.zeros(0).data_ptr(), 0, "cpu") == 0x2D06800538D394C2  # xxh3_64 of nothing


def test_memory_at_is_the_memory_itself():
    data = torch.zeros(4, dtype=torch.uint8)

    memory_at(data.data_ptr(), 4)[2] = 7

    assert data.tolist() == [0, 0, 7, 0]


@pytest.mark.parametrize("name", ["blocks.1.down.bias", "head.weight", "blocks.0.positions"])
def test_one_flipped_bit_is_found_and_named(name):
    """A37: verification that verifies nothing is worse than none."""
    source, target = randomize(TinyModel(), 1), randomize(TinyModel(), 1)
    plan = plan_transfer(described(source), described(target))
    checksums = checksums_of(plan.source, threads=2)
    verify_all(plan, checksums, "on")

    damaged = dict((*target.named_parameters(remove_duplicate=False), *target.named_buffers()))[name]
    damaged.detach().flatten().view(torch.uint8)[1] ^= 4

    with pytest.raises(VerificationFailed, match=name):
        verify_all(plan, checksums, "on")
    verify_all(plan, checksums, "off")


def test_sampled_checks_one_piece_in_eight_and_at_least_one():
    module = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(80))
    plan = plan_transfer(described(module), described(module))
    checksums = checksums_of(plan.source, threads=1)
    for each in module:
        each.data.fill_(1)

    with pytest.raises(VerificationFailed):
        verify_all(plan, checksums, "sampled")
    assert len(Verifier(plan, checksums, "sampled").chosen) == 10


def test_checksums_of_another_model_are_refused_before_anything_moves():
    model = TinyModel()
    plan = plan_transfer(described(model), described(model))

    with pytest.raises(ManifestMismatch, match="0 checksums for"):
        Verifier(plan, b"", "on")
    Verifier(plan, b"", "off")


def test_tensors_that_arrive_whole_are_checked_piece_by_piece():
    big = torch.zeros(PIECE_NBYTES + 100, dtype=torch.uint8)
    module = nn.Module()
    module.register_buffer("big", big)
    module.register_buffer("none", torch.zeros(0))
    manifest = described(module)
    checksums = checksums_of(manifest, threads=1)
    copy = big.clone()

    verifier = TensorVerifier(manifest, checksums, "on")
    verifier.check("big", copy)
    verifier.check("none", torch.zeros(0))
    copy[-1] = 1

    with pytest.raises(VerificationFailed, match="tensor big"):
        verifier.check("big", copy)
