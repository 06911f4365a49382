"""Every tensor a module holds is found under a name that both ends agree on, or refused by name."""

import functools
from collections import ChainMap, UserDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from modelexpress.discovery import discover, holds_tensors, manifest_of, persistent_tensors
from modelexpress.errors import NotAvailable
from modelexpress.manifest import NO_STORAGE
from tests.support.tensors import TinyModel


class Slotted:
    __slots__ = ("scale", "unset")

    def __init__(self):
        self.scale = torch.ones(2)


def names(module):
    return {each.name for each in discover(module).tensors}


def manifest(module):
    found = discover(module)
    return manifest_of(found.tensors, found.scalars)


def test_ties_share_a_storage_and_persistent_tensors_name_both():
    model = TinyModel()

    specs = {each.name: each for each in manifest(model).tensors}

    assert specs["head.weight"].storage == specs["embedding.weight"].storage
    persistent = {each.name for each in persistent_tensors(model)}
    assert {"head.weight", "embedding.weight", "blocks.0.scale"} <= persistent
    assert "blocks.0.positions" not in persistent
    assert "blocks.0.positions" in specs


@pytest.mark.parametrize(
    ("hang", "expected"),
    [
        (lambda w: {"k": w}, "cache['k']"),
        (lambda w: (w,), "cache[0]"),
        (lambda w: deque([None, w]), "cache[1]"),
        (lambda w: [{"deep": [w]}], "cache[0]['deep'][0]"),
        (lambda w: functools.partial(torch.add, w), "cache.args[0]"),
        (lambda w: lambda x: x + w, "cache.<closure>.w"),
        (lambda w: lambda x, y=w: x + y, "cache.__defaults__[0]"),
        (lambda w: lambda x, *, y=w: x + y, "cache.__kwdefaults__['y']"),
        (lambda w: w.matmul, "cache.__self__"),
        (lambda w: UserDict(k=w), "cache.data['k']"),
        (lambda w: ChainMap({"k": w}), "cache.maps[0]['k']"),
        (lambda w: {nn.Identity(): w}, "cache[#0]"),
        (lambda w: type("Named", (list,), {})([1, w]), "cache[1]"),
        (lambda w: Slotted(), "cache.scale"),
        (lambda w: w, "cache"),
    ],
)
def test_tensors_beside_parameters_are_found(hang, expected):
    """A15: SGLang and vLLM keep derived weights in all of these places."""
    module = nn.Linear(2, 2)
    module.cache = hang(torch.ones(3))

    assert expected in names(module)


def test_tensors_on_parameters_and_on_modules_in_lists_are_found():
    module = nn.Linear(2, 2)
    module.weight.scale = torch.ones(1)
    module.experts = [nn.Linear(1, 1, bias=False)]
    module.experts[0].extra = torch.ones(1)

    assert {"weight.scale", "experts[0].weight", "experts[0].extra"} <= names(module)


def test_hooks_are_named_by_their_place():
    module = nn.Linear(2, 2)
    w = torch.ones(1)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: w)

    assert "_forward_hooks[1].<closure>.w" in names(module)


def test_cycles_and_bound_methods_of_the_model_end():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].parent = [module]
    module[0].weight.loader = module.forward
    module.loop = loop = []
    loop.append(loop)

    assert names(module) == {"0.weight", "0.bias"}


def test_python_numbers_and_arrays_are_compared_and_names_are_not():
    module = nn.Module()
    module.k_scale = 0.25
    module.layers = [3, True]
    module.name = "x"
    module.options = UserDict(beta=2j)
    module.table = bytearray(b"ab")

    scalars = dict(discover(module).scalars)

    assert scalars.pop("table").startswith("bytearray 2 sha256:")
    assert scalars == {"k_scale": "0.25", "layers[0]": "3", "layers[1]": "True", "options.data['beta']": "2j"}


def test_a_long_table_of_numbers_is_one_value():
    module, other = nn.Module(), nn.Module()
    module.table, other.table = list(range(1000)), [*range(999), 0]

    (one,), (two,) = discover(module).scalars, discover(other).scalars

    assert one[0] == two[0] == "table"
    assert one[1] != two[1]


@pytest.mark.parametrize("member", [torch.ones(1), (torch.ones(1), 2)])
def test_a_set_that_holds_tensors_has_no_order_and_is_refused(member):
    module = nn.Linear(2, 2)
    module.cache = {member}

    with pytest.raises(NotAvailable, match="'cache' is a set that holds tensors"):
        discover(module)


def test_one_name_for_two_tensors_is_refused():
    module = nn.Linear(2, 2)
    module.__dict__["a.b"] = torch.ones(1)
    module.a = SimpleNamespace(b=torch.ones(1))

    with pytest.raises(NotAvailable, match=r"two tensors hang on the model under one name, 'a\.b'"):
        discover(module)


def test_a_module_that_contains_itself_is_refused():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].add_module("loop", module)

    with pytest.raises(NotAvailable, match=r"'0\.loop' contains itself"):
        discover(module)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_an_opaque_object_is_refused():
    class Pair(torch.nn.Module):
        def forward(self, x):
            return x

    module = nn.Linear(2, 2)
    module.packed = torch.jit.script(Pair())._c

    with pytest.raises(NotAvailable, match="'packed' is an opaque"):
        discover(module)


def test_freed_and_shrunk_memory_is_refused_by_name():
    """Reading or writing it would be reading or writing somebody else's."""
    for nbytes in (0, 4):
        module = nn.Linear(2, 2, bias=False)
        module.weight.untyped_storage().resize_(nbytes)

        with pytest.raises(NotAvailable, match="'weight': it needs 16 bytes of a storage that has"):
            manifest(module)


def test_two_storages_over_one_memory_count_as_one():
    array = np.zeros(12, dtype=np.uint8)
    module = nn.Module()
    module.register_buffer("left", torch.from_numpy(array[:8]))
    module.register_buffer("right", torch.from_numpy(array[4:]))

    described = manifest(module)

    assert [(each.storage, each.offset) for each in described.tensors] == [(0, 0), (0, 4)]
    assert described.storages[0].nbytes == 12
    assert len(described.spans()) == 1


def test_three_storages_over_one_memory_count_as_one_and_the_next_does_not():
    array = np.zeros(40, dtype=np.uint8)
    module = nn.Module()
    for name, part in {"a": array[:8], "b": array[4:20], "c": array[10:12], "d": array[20:]}.items():
        module.register_buffer(name, torch.from_numpy(part))

    described = manifest(module)

    assert [(each.storage, each.offset) for each in described.tensors] == [(0, 0), (0, 4), (0, 10), (1, 0)]
    assert [each.nbytes for each in described.storages] == [20, 20]


def test_storages_on_the_meta_device_never_overlap():
    """They have no address, however large they are."""
    module = nn.Module()
    module.parts = [torch.empty(1 << 40, dtype=torch.uint8, device="meta") for _ in range(20)]
    module.view = module.parts[3][5:9]

    described = manifest_of(discover(module).tensors, meta=True)

    assert [each.nbytes for each in described.storages] == [1 << 40] * 20
    specs = {each.name: each for each in described.tensors}
    assert (specs["view"].storage, specs["view"].offset) == (specs["parts[3]"].storage, 5)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugate"),
        (lambda: torch.empty(2, dtype=torch.bits8), "bits8 cannot travel"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(tensor, reason):
    module = nn.Linear(2, 2)
    module.cache = tensor()

    with pytest.raises(NotAvailable, match=f"tensor 'cache'.*{reason}"):
        manifest(module)


def test_views_strides_scalars_and_empty_tensors_are_described():
    module = nn.Module()
    base = torch.zeros(4, 8, dtype=torch.int16)
    module.column = base[:, 2:4]
    module.turned = base.t()
    module.single = torch.tensor(1.5)
    module.none = torch.empty(0, 8)

    specs = {each.name: each for each in manifest(module).tensors}

    assert (specs["column"].offset, specs["column"].stride) == (4, (8, 1))
    assert specs["turned"].stride == (1, 8)
    assert (specs["single"].shape, specs["single"].nbytes) == ((), 4)
    assert (specs["none"].shape, specs["none"].storage) == ((0, 8), NO_STORAGE)


def test_holds_tensors_looks_through_everything_but_the_module_itself():
    module = nn.Linear(2, 2)

    assert holds_tensors({"a": [torch.ones(1)]}, besides=module)
    assert holds_tensors(nn.Linear(1, 1).forward, besides=module)
    assert not holds_tensors(module.forward, besides=module)
    assert not holds_tensors({"a": ["text", 1, None]}, besides=module)
