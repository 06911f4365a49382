"""Offers off a registry: refused, or planned so that no byte lands beside its tensor, within bounded memory."""

from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from modelexpress.checkpoint.peer import PeerTensors
from modelexpress.digest import TensorVerifier, Verifier
from modelexpress.errors import ManifestMismatch, NotAvailable, VerificationFailed
from modelexpress.manifest import PIECE_NBYTES, Manifest, StorageSpec, TensorSpec
from modelexpress.offer import Offer, decode_offer
from modelexpress.plan import TransferPlan, plan_checkpoint, plan_transfer
from tests.fuzz.inputs import INTEGERS, allocates_less_than, fuzzed, packed_near

MANIFEST = Manifest(
    (StorageSpec(64, 0x10_000, "cpu"), StorageSpec(32, 0x20_000, "cpu"), StorageSpec(24, 0x30_000, "cpu")),
    (
        TensorSpec("a", 0, 0, (4, 4), (4, 1), "float32", "parameter"),
        TensorSpec("b", 1, 0, (16,), (1,), "bfloat16", "parameter"),
        TensorSpec("c", 2, 0, (3,), (1,), "int64", "buffer"),
        TensorSpec("e", -1, 0, (0, 8), (1, 1), "uint8", "parameter"),
    ),
    (("scale", "0.5"),),
)
OFFER = Offer(MANIFEST, b"endpoint", bytes(24))

# Raw tensors: no scalars, and the same names and shapes as the target.
RAW = Offer(Manifest(MANIFEST.storages, MANIFEST.tensors), b"endpoint", bytes(24))


def without(nbytes: int) -> st.SearchStrategy[Offer]:
    """Offers whose tensors keep names, shapes and dtypes, so that they get past the first comparisons."""
    place = st.tuples(
        st.integers(-1, 2), INTEGERS, st.lists(INTEGERS, min_size=1, max_size=2).map(tuple), st.integers(0, 3)
    )

    def make(places, sizes):
        tensors = list(MANIFEST.tensors)
        for storage, offset, stride, at in places:
            spec = tensors[at]
            wide = (stride * 2)[: len(spec.shape)]
            tensors[at] = msgspec.structs.replace(spec, storage=storage, offset=offset, stride=wide)
        storages = tuple(msgspec.structs.replace(s, nbytes=n) for s, n in zip(MANIFEST.storages, sizes, strict=True))
        return Offer(Manifest(storages, tuple(tensors)), b"endpoint", bytes(nbytes))

    sizes = st.lists(st.sampled_from([24, 32, 64, 128, 1 << 20, 1 << 48]), min_size=3, max_size=3)
    return st.builds(make, st.lists(place, min_size=1, max_size=3), sizes)


OFFERS = st.one_of(packed_near(OFFER), packed_near(RAW), without(24).map(Offer.encode), without(32).map(Offer.encode))


def strided(name, storage, shape, stride):
    return TensorSpec(name, storage, 0, shape, stride, "float32", "parameter")


# What the first hours of fuzzing found, each with what it did.
OVERLAP = Manifest(  # wrote 24 bytes into the 16 of `a`, and none into `b`
    (StorageSpec(24, 0x50_000, "cpu"),),
    (strided("a", 0, (4,), (1,)), TensorSpec("b", 0, 8, (4,), (1,), "float32", "parameter")),
)
GAPS = Manifest((StorageSpec(30_000, 0x50_000, "cpu"),), (strided("a", 0, (4,), (1000,)),))  # wrote 12,004 bytes
REPEATS = Manifest((StorageSpec(64, 0x50_000, "cpu"),), (strided("a", 0, (4,), (0,)),))  # wrote 4 of 16 bytes
FOUR = Manifest((StorageSpec(16, 0x60_000, "cpu"),), (strided("a", 0, (4,), (1,)),))
EIGHT = Manifest(
    (StorageSpec(16, 0x60_000, "cpu"), StorageSpec(16, 0x70_000, "cpu")),
    (strided("a", 0, (4,), (1,)), strided("b", 1, (4,), (1,))),
)


@pytest.mark.parametrize(("source", "target"), [(OVERLAP, EIGHT), (GAPS, FOUR), (REPEATS, FOUR)])
def test_raw_tensors_that_do_not_lie_plainly_are_refused(source, target):
    source.validate()  # possible as a layout

    with pytest.raises(ManifestMismatch, match="raw tensor"):
        plan_checkpoint(source, target)
    with pytest.raises(ManifestMismatch, match="raw tensor"):
        PeerTensors("peer", Recorder(source))


def test_checksums_of_a_tensor_that_claims_more_than_it_has_read_nothing_beyond_it():
    """The overlap of two raw tensors made the check of the first read 16 MB behind its end."""
    with pytest.raises(VerificationFailed, match="its checksums cover more"):
        TensorVerifier(OVERLAP, bytes(8), "on").check("a", torch.zeros(4))


def test_a_tensor_larger_than_the_machine_is_not_available():
    vast = TensorSpec("a", 0, 0, (1 << 47,), (1,), "uint8", "parameter")
    peer = PeerTensors("peer", Recorder(Manifest((StorageSpec(1 << 48, 1, "cpu"),), (vast,))))

    with pytest.raises(NotAvailable, match="peer: no memory for tensor 'a' of 140,737,488,355,328 bytes"):
        next(peer.tensors())


def test_pieces_are_counted_before_they_are_made():
    """A storage of 2**48 bytes has 16 million pieces: 2 GB of Python objects for an offer of 200 bytes."""
    vast = Manifest(
        (StorageSpec(1 << 48, 0x50_000, "cpu"),),
        (TensorSpec("a", 0, 0, (1 << 48,), (1,), "uint8", "parameter"),),
    )

    reason = f"for {(1 << 48) // PIECE_NBYTES} pieces"
    with allocates_less_than(1 << 20), pytest.raises(ManifestMismatch, match=reason):
        TensorVerifier(vast, bytes(24), "on")


@pytest.mark.parametrize(
    ("storage", "tensor", "reason"),
    [
        (StorageSpec(8, 1, "meta"), None, "device 'meta'"),
        (StorageSpec(8, 1, "cuda:99999999999999999999"), None, "device 'cuda:999"),
        (StorageSpec(8, 1, "x" * 1000), None, "device 'xxxx.{,60};"),
        (
            StorageSpec(8, 1, "cpu"),
            TensorSpec("t", -1, 0, ((1 << 62),) * 100_000 + (0,), (1,) * 100_001, "uint8", "buffer"),
            "100,001 dimensions",
        ),
        (
            StorageSpec(8, 1, "cpu"),
            TensorSpec("t", -1, 0, (1 << 63, 0), (1, 1), "uint8", "buffer"),
            "sizes that overflow",
        ),
        (
            StorageSpec(8, 1, "cpu"),
            TensorSpec("t", 0, 0, (1 << 62,), (0,), "uint8", "buffer"),
            "sizes that overflow",
        ),
    ],
)
def test_manifests_that_no_machine_has_are_impossible(storage, tensor, reason):
    manifest = Manifest((storage,), () if tensor is None else (tensor,))

    with pytest.raises(ManifestMismatch, match=reason):
        decode_offer(Offer(manifest, b"", b"").encode())


@fuzzed
@given(data=OFFERS)
@example(data=b"\x93\x93\xdd\xff\xff\xff\xff")  # an array that claims 4 billion storages
@example(data=b"\x93\xc6\xff\xff\xff\xff")
@example(data=b"\x91" * 100_000)
@example(data=Offer(OVERLAP, b"", b"").encode())
@example(data=Offer(GAPS, b"", b"").encode())
def test_an_offer_is_refused_or_planned_within_the_target(data):
    with allocates_less_than(200_000 + 64 * len(data)):
        try:
            offer = decode_offer(data)
        except ManifestMismatch:
            return

    for make in (plan_transfer, plan_checkpoint):
        try:
            plan = make(offer.manifest, MANIFEST)
        except ManifestMismatch:
            continue
        if make is plan_checkpoint:
            assert (plan.strided, plan.compared) == ((), ())
        check_plan(plan)
        try:
            Verifier(plan, offer.checksums, "on")
        except ManifestMismatch:
            assert len(offer.checksums) != 24


def check_plan(plan: TransferPlan) -> None:
    """Every byte of the target once, and from the tensor of the same name."""
    ranges = sorted((r.target_storage, r.target_offset, r.nbytes) for chunk in plan.chunks for r in chunk.ranges)
    for before, after in pairwise(ranges):
        assert before[0] < after[0] or before[1] + before[2] <= after[1]
    for storage, offset, nbytes in ranges:
        assert 0 <= offset < offset + nbytes <= plan.target.storages[storage].nbytes
    assert sum(nbytes for _, _, nbytes in ranges) == plan.target.nbytes
    for chunk in plan.chunks:
        for part in chunk.ranges:
            assert part.source_offset >= 0
            assert part.source_offset + part.nbytes <= plan.source.storages[part.source_storage].nbytes


class Recorder:
    """A stripe that moves nothing and checks where it was to write."""

    def __init__(self, manifest):
        self._offer = Offer(manifest, b"endpoint", b"")

    def offer(self):
        return self._offer

    def read(self, plan, *, arrived=None, moved=None):
        check_plan(plan)
        for chunk in plan.chunks:
            if arrived is not None:
                arrived(chunk)


@fuzzed
@given(data=OFFERS)
@example(  # a TypeError of torch went up
    data=Offer(Manifest((), (TensorSpec("e", -1, 0, (1 << 63, 0), (1, 1), "uint8", "buffer"),)), b"", b"").encode()
)
def test_raw_tensors_of_a_peer_are_refused_or_read_into_memory_of_their_size(data):
    try:
        offer = decode_offer(data)
        peer = PeerTensors("peer", Recorder(offer.manifest))
    except ManifestMismatch:
        return
    if sum(tensor.nbytes for tensor in offer.manifest.tensors) > 1 << 20:
        return  # what it asks for is what it would have to deliver
    try:
        verifier = TensorVerifier(offer.manifest, offer.checksums, "on")
    except ManifestMismatch:
        verifier = TensorVerifier(offer.manifest, b"", "off")
    try:
        for name, tensor in peer.tensors():
            verifier.check(name, tensor)
    except (NotAvailable, VerificationFailed):
        return
