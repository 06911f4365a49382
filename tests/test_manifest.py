"""What weights are: identity keys, spans, bounds of foreign manifests."""

import msgspec
import pytest

from modelexpress.errors import ConfigError, ManifestMismatch
from modelexpress.manifest import (
    NO_STORAGE,
    PIECE_NBYTES,
    Manifest,
    StorageSpec,
    TensorSpec,
    WeightsIdentity,
    contiguous_stride,
    pieces,
)
from modelexpress.offer import Offer, decode_offer

IDENTITY = WeightsIdentity(
    model="org/model",
    revision="abc123",
    engine="sglang",
    engine_version="0.5.23",
    dtype="bfloat16",
    quantization="none",
    role="target",
    tp_rank=1,
    tp_size=2,
    pp_rank=0,
    pp_size=1,
    ep_rank=0,
    ep_size=1,
    dp_rank=0,
    dp_size=1,
    extra=(("kv_cache_dtype", "auto"), ("attention", "flashinfer")),
)


def tensor(name, offset, count, *, storage=0, dtype="uint8", kind="parameter"):
    return TensorSpec(name, storage, offset, (count,), (1,), dtype, kind)


def manifest(*tensors, nbytes=1 << 40):
    return Manifest((StorageSpec(nbytes, 4096, "cpu"),), tuple(sorted(tensors, key=lambda each: each.name)))


def test_identity_key_is_pinned():
    """A key that drifts between versions makes every peer of a fleet invisible to the other half."""
    assert IDENTITY.key == "24b84b41966836688a03dbf364eb18863ebe852adfb76963930652404e257c99"
    assert IDENTITY.content_key == "5e0045b6e4faf3509387428e2ab861a14d75f03d7b979363b4b1638d2f865550"


def test_identity_key_ignores_the_order_of_extra_fields():
    swapped = msgspec.structs.replace(IDENTITY, extra=tuple(reversed(IDENTITY.extra)))

    assert swapped.key == IDENTITY.key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "org/other"),
        ("revision", "abc124"),
        ("engine", "vllm"),
        ("engine_version", "0.5.24"),
        ("dtype", "float16"),
        ("quantization", "fp8"),
        ("role", "draft"),
        ("tp_rank", 0),
        ("tp_size", 4),
        ("pp_size", 2),
        ("ep_size", 2),
        ("dp_size", 2),
        ("extra", ()),
    ],
)
def test_every_field_changes_the_key(field, value):
    assert msgspec.structs.replace(IDENTITY, **{field: value}).key != IDENTITY.key


@pytest.mark.parametrize(("field", "value"), [("tp_rank", 2), ("tp_rank", -1), ("tp_size", 0), ("revision", "")])
def test_impossible_identities_are_refused(field, value):
    with pytest.raises(ConfigError, match=field.split("_")[0]):
        msgspec.structs.replace(IDENTITY, **{field: value})


def test_overlapping_tensors_are_one_span_and_touching_ones_are_two():
    tied = manifest(tensor("a", 0, 8), tensor("b", 0, 8), tensor("view", 4, 2), tensor("c", 8, 8))

    assert [(s.offset, s.nbytes, s.names) for s in tied.spans()] == [(0, 8, ("a", "b", "view")), (8, 8, ("c",))]
    assert tied.nbytes == 16


def test_a_tensor_that_reaches_out_of_another_extends_the_span():
    partly = manifest(tensor("a", 0, 8), tensor("b", 6, 8))

    assert [(s.offset, s.nbytes) for s in partly.spans()] == [(0, 14)]


def test_empty_tensors_have_no_span():
    empty = Manifest((), (TensorSpec("none", NO_STORAGE, 0, (0, 8), (1, 1), "float32", "buffer"),))

    assert empty.spans() == ()
    assert empty.nbytes == 0
    empty.validate()


def test_strided_tensor_counts_the_bytes_between_its_elements():
    column = TensorSpec("column", 0, 2, (4, 3), (8, 1), "bfloat16", "parameter")

    assert column.nbytes == (3 * 8 + 2 + 1) * 2
    assert not column.is_contiguous


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((4, 3), (3, 1), True),
        ((4, 3), (1, 4), True),
        ((2, 1, 3), (3, 1, 1), True),
        ((), (), True),
        ((4, 3), (8, 1), False),
        ((4, 3), (0, 1), False),
        ((2, 2, 2), (1, 1, 5), False),
    ],
)
def test_dense_means_that_elements_fill_their_bytes(shape, stride, dense):
    assert TensorSpec("t", 0, 0, shape, stride, "uint8", "buffer").is_dense is dense


@pytest.mark.parametrize(
    ("shape", "stride"), [((), ()), ((3,), (1,)), ((2, 3), (3, 1)), ((2, 1, 3), (3, 1, 1)), ((0, 3), (1, 1))]
)
def test_contiguous_stride(shape, stride):
    assert contiguous_stride(shape) == stride


def test_pieces_cut_a_span_at_fixed_places():
    big = manifest(tensor("a", 5, 2 * PIECE_NBYTES + 1), tensor("b", 3 * PIECE_NBYTES, 7))

    assert [(p.span, p.offset, p.nbytes) for p in pieces(big)] == [
        (0, 5, PIECE_NBYTES),
        (0, 5 + PIECE_NBYTES, PIECE_NBYTES),
        (0, 5 + 2 * PIECE_NBYTES, 1),
        (1, 3 * PIECE_NBYTES, 7),
    ]


def test_layout_digest_ignores_addresses_only():
    here = manifest(tensor("a", 0, 8))
    moved = Manifest((StorageSpec(1 << 40, 8192, "cuda:0"),), here.tensors)
    other = manifest(tensor("a", 0, 9))

    assert moved.layout_digest == here.layout_digest != other.layout_digest


def test_manifest_survives_the_wire():
    sent = manifest(tensor("a", 0, 8), tensor("b", 8, 4, dtype="float32"))

    assert decode_offer(Offer(sent, b"", b"").encode()).manifest == sent


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (manifest(tensor("a", 0, 9), nbytes=8), "ends at byte 9 of a storage of 8"),
        (manifest(tensor("a", -1, 4)), "negative"),
        (manifest(tensor("a", 0, 4, storage=1)), "storage 1 of 1"),
        (manifest(tensor("a", 0, 4, storage=-2)), "storage -2"),
        (manifest(tensor("a", 0, 4, dtype="float7")), "float7"),
        (Manifest((StorageSpec(8, 0, "cpu"),), (tensor("a", 0, 1), tensor("a", 1, 1))), "unique"),
        (Manifest((StorageSpec(1 << 60, 0, "cpu"),), ()), "impossible"),
        (Manifest((StorageSpec(8, -5, "cpu"),), ()), "impossible"),
        (manifest(TensorSpec("a", 0, 0, (2, 2), (1,), "uint8", "buffer")), "strides"),
        (manifest(TensorSpec("a", NO_STORAGE, 0, (2,), (1,), "uint8", "buffer")), "no storage"),
        (manifest(TensorSpec("a", 0, 0, (1 << 62, 1 << 62), (1, 1), "uint8", "buffer")), "sizes that overflow"),
    ],
)
def test_foreign_manifests_that_reach_outside_are_refused(bad, reason):
    with pytest.raises(ManifestMismatch, match=reason):
        decode_offer(Offer(bad, b"", b"").encode())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x90\x90", b"not msgpack", b"\x93" * 5000])
def test_garbage_is_no_manifest(data):
    with pytest.raises(ManifestMismatch, match="cannot be read"):
        decode_offer(data)
