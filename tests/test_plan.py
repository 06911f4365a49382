"""Two manifests in, a plan or a complete list of differences out."""

import pytest

from modelexpress.errors import ManifestMismatch
from modelexpress.manifest import NO_STORAGE, PIECE_NBYTES, Manifest, StorageSpec, TensorSpec, contiguous_stride
from modelexpress.plan import plan_checkpoint, plan_transfer


def tensor(name, offset, shape, *, storage=0, dtype="uint8", stride=None, kind="parameter"):
    shape = tuple(shape)
    return TensorSpec(name, storage, offset, shape, stride or contiguous_stride(shape), dtype, kind)


def manifest(*tensors, storages=1, scalars=()):
    blocks = tuple(StorageSpec(1 << 40, (at + 1) << 41, "cpu") for at in range(storages))
    return Manifest(blocks, tuple(sorted(tensors, key=lambda each: each.name)), scalars)


def moved(plan):
    """Every (source storage, source offset, target storage, target offset) byte pair of a plan."""
    return {
        (part.source_storage, part.source_offset + at, part.target_storage, part.target_offset + at)
        for chunk in plan.chunks
        for part in chunk.ranges
        for at in range(part.nbytes)
    }


def test_grouping_into_storages_may_differ():
    packed = manifest(tensor("a", 0, [4]), tensor("b", 4, [2]))
    apart = manifest(tensor("a", 8, [4]), tensor("b", 0, [2], storage=1), storages=2)

    plan = plan_transfer(packed, apart)

    assert moved(plan) == {(0, at, 0, 8 + at) for at in range(4)} | {(0, 4 + at, 1, at) for at in range(2)}
    assert plan.nbytes == 6


def test_neighbours_merge_only_when_they_touch_on_both_sides():
    source = manifest(tensor("a", 0, [4]), tensor("b", 4, [4]), tensor("c", 8, [4]))
    target = manifest(tensor("a", 100, [4]), tensor("b", 104, [4]), tensor("c", 200, [4]))

    (chunk,) = plan_transfer(source, target).chunks

    assert [part.nbytes for part in chunk.ranges] == [8, 4]
    assert len(chunk.pieces) == 3


def test_a_tie_travels_once():
    tied = manifest(tensor("embedding", 0, [4]), tensor("head", 0, [4]))

    assert plan_transfer(tied, tied).nbytes == 4


def test_order_of_storages_and_tensors_does_not_matter():
    one = manifest(tensor("a", 0, [4]), tensor("b", 0, [4], storage=1), storages=2)
    two = manifest(tensor("b", 0, [4]), tensor("a", 0, [4], storage=1), storages=2)

    assert moved(plan_transfer(one, two)) == {(0, i, 1, i) for i in range(4)} | {(1, i, 0, i) for i in range(4)}


A = manifest(tensor("a", 0, [4, 2]), tensor("b", 8, [4]))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (manifest(tensor("a", 0, [4, 2])), r"1 missing in the source \(b\)"),
        (manifest(*A.tensors, tensor("c", 90, [1])), r"1 unexpected in the source \(c\)"),
        (manifest(tensor("a", 0, [8]), tensor("b", 8, [4])), r"shape differs \(a: target \[4, 2\], source \[8\]\)"),
        (manifest(tensor("a", 0, [4, 2], dtype="int8"), tensor("b", 8, [4])), "dtype differs .a: target uint8"),
        (manifest(tensor("a", 0, [4, 2], stride=(1, 4)), tensor("b", 8, [4])), "stride differs"),
        (manifest(tensor("a", 0, [4, 2]), tensor("b", 4, [4])), "shared memory differs"),
        (manifest(*A.tensors, scalars=(("k_scale", "0.5"),)), "k_scale: target absent, source 0.5"),
    ],
)
def test_differences_are_named(source, reason):
    with pytest.raises(ManifestMismatch, match=reason):
        plan_transfer(source, A)


def test_a_tie_on_one_side_only_is_refused_both_ways():
    tied = manifest(tensor("embedding", 0, [4]), tensor("head", 0, [4]))
    untied = manifest(tensor("embedding", 0, [4]), tensor("head", 4, [4]))

    for source, target in ((tied, untied), (untied, tied)):
        with pytest.raises(ManifestMismatch, match="shared memory differs"):
            plan_transfer(source, target)


def test_a_view_at_another_place_of_the_same_memory_is_refused():
    here = manifest(tensor("base", 0, [8]), tensor("view", 2, [4]))
    there = manifest(tensor("base", 0, [8]), tensor("view", 4, [4]))

    with pytest.raises(ManifestMismatch, match="shared memory differs"):
        plan_transfer(here, there)


def test_only_the_first_five_are_listed_and_all_are_counted():
    many = manifest(*(tensor(f"t{at}", 8 * at, [8]) for at in range(9)))

    with pytest.raises(ManifestMismatch, match=r"9 missing in the source \(t0, t1, t2, t3, t4, and 4 more\)"):
        plan_transfer(manifest(), many)


def test_chunks_hold_whole_pieces():
    source = manifest(tensor("big", 0, [5 * PIECE_NBYTES + 3]), tensor("small", 6 * PIECE_NBYTES, [100]))

    plan = plan_transfer(source, source)

    assert all(chunk.nbytes <= PIECE_NBYTES for chunk in plan.chunks)
    assert [number for chunk in plan.chunks for number, _ in chunk.pieces] == list(range(7))


def test_an_empty_model_has_an_empty_plan():
    empty = manifest(TensorSpec("none", NO_STORAGE, 0, (0,), (1,), "uint8", "buffer"))

    assert plan_transfer(empty, empty).chunks == ()


def test_checkpoint_fills_a_tie_from_the_one_name_it_holds():
    target = manifest(tensor("embedding", 0, [4]), tensor("head", 0, [4]))

    plan = plan_checkpoint(manifest(tensor("embedding", 64, [4])), target)

    assert moved(plan) == {(0, 64 + at, 0, at) for at in range(4)}
    assert plan.compared == ()


def test_checkpoint_with_both_names_of_a_tie_writes_one_and_compares_the_other():
    target = manifest(tensor("embedding", 0, [4]), tensor("head", 0, [4]))
    source = manifest(tensor("embedding", 64, [4]), tensor("head", 68, [4]))

    plan = plan_checkpoint(source, target)

    assert plan.nbytes == 4
    assert len(plan.compared) == 1


def test_transposed_parameters_are_copied_by_element():
    target = manifest(tensor("w", 0, [4, 2], stride=(1, 4)), tensor("b", 8, [4]))

    plan = plan_checkpoint(A_NAMED := manifest(tensor("w", 0, [4, 2]), tensor("b", 8, [4])), target)

    assert plan.strided == ("w",)
    assert plan.nbytes == 4
    assert A_NAMED.nbytes == 12


def test_columns_of_one_base_are_copied_by_element_and_compared_afterwards():
    left = tensor("left", 0, [4, 3], stride=(8, 1))
    right = tensor("right", 3, [4, 5], stride=(8, 1))
    source = manifest(tensor("left", 0, [4, 3]), tensor("right", 12, [4, 5]))

    plan = plan_checkpoint(source, manifest(left, right))

    assert plan.strided == plan.compared == ("left", "right")


def test_half_of_a_shared_base_does_not_cover_the_other_half():
    left = tensor("left", 0, [4, 7], stride=(8, 1))
    right = tensor("right", 7, [4, 1], stride=(8, 1))

    with pytest.raises(ManifestMismatch, match=r"missing in the source \(right\)"):
        plan_checkpoint(manifest(tensor("left", 0, [4, 7])), manifest(left, right))


@pytest.mark.parametrize("shape", [[256, 500], [512], [1, 512], [512, 256]])
def test_checkpoint_tensor_of_another_shape_is_refused(shape):
    """A13: torch's copy_ would broadcast [512] and [1, 512] into [256, 512] without a word."""
    target = manifest(tensor("down_proj", 0, [256, 512]))

    with pytest.raises(ManifestMismatch, match=r"down_proj: target \[256, 512\], source"):
        plan_checkpoint(manifest(tensor("down_proj", 0, shape)), target)


def test_missing_layer_lists_its_tensors():
    """A12: SGLang starts healthy on this and answers with other tokens."""
    names = [f"layers.3.{part}" for part in ("q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2")]
    target = manifest(*(tensor(name, 8 * at, [8]) for at, name in enumerate(names)), tensor("head", 900, [8]))

    with pytest.raises(ManifestMismatch, match=r"9 missing in the source .layers\.3\.down, .* and 4 more"):
        plan_checkpoint(manifest(tensor("head", 0, [8])), target)
