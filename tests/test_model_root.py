"""One root object, at most one parameter set, whatever failed before."""

import gc
import weakref

import pytest
import torch
from torch import nn

from modelexpress.errors import ModelExpressError, RecoveryFailed
from modelexpress.model_root import Dirt, ModelRoot
from tests.support.tensors import TinyModel, snapshot


class Lazy(nn.Module):
    """Keeps a closure over itself, as 13 SGLang models do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.count = lambda: len(self.layers)


def test_writing_makes_dirty_even_when_the_block_raises():
    root = ModelRoot(TinyModel())

    with pytest.raises(KeyError), root.writing():
        raise KeyError

    assert root.dirt == Dirt.ANYTHING


def test_dirt_never_shrinks_by_writing_less():
    root = ModelRoot(TinyModel())
    with root.writing(Dirt.LAYOUT_BYTES):
        pass
    with root.writing(Dirt.CHECKPOINT_BYTES):
        pass

    assert root.dirt == Dirt.LAYOUT_BYTES


def test_an_accepted_model_is_never_written_again():
    root = ModelRoot(TinyModel())
    root.accept()

    with pytest.raises(ModelExpressError, match="accepted"), root.writing():
        pass


@pytest.mark.parametrize(("changed", "dirt"), [(True, Dirt.LAYOUT), (False, Dirt.NONE)])
def test_prepare_runs_once_and_says_whether_it_changed_the_model(changed, dirt):
    root = ModelRoot(TinyModel())

    root.prepare(lambda module: changed)

    assert root.dirt == dirt


def test_prepare_that_raises_leaves_anything():
    root = ModelRoot(TinyModel())

    with pytest.raises(KeyError):
        root.prepare(lambda module: {}["missing"])

    assert root.dirt == Dirt.ANYTHING


def test_reset_keeps_the_object_and_what_the_engine_put_on_it():
    model = TinyModel().eval()
    model.engine_tag = {"rank": 3}
    handle = model.register_forward_hook(lambda *_: None)
    root = ModelRoot(model)

    root.reset(TinyModel)

    assert root.module is model
    assert model.engine_tag == {"rank": 3}
    assert not model.training
    assert not model.blocks[0].training
    assert len(model._forward_hooks) == 1
    handle.remove()
    assert not model._forward_hooks
    assert (root.dirt, root.resets) == (Dirt.NONE, 1)


def test_reset_makes_what_initialize_makes():
    torch.manual_seed(5)
    expected = snapshot(TinyModel())
    root = ModelRoot(TinyModel())

    torch.manual_seed(5)
    root.reset(TinyModel)

    assert snapshot(root.module) == expected
    assert root.module.head.weight is root.module.embedding.weight


def test_no_old_parameter_is_alive_when_initialize_starts():
    model = TinyModel()
    model.register_forward_hook(model.blocks[0].forward)  # a hook that holds the old layers
    model.pinned = [model.head.weight]
    old = [weakref.ref(each) for each in model.parameters()]
    alive = []

    def initialize():
        alive.append(sum(ref() is not None for ref in old))
        return TinyModel()

    ModelRoot(model).reset(initialize)

    assert alive == [0]
    assert not hasattr(model, "pinned")


def test_constructor_hooks_are_not_doubled():
    class Hooked(TinyModel):
        def __init__(self):
            super().__init__()
            self.register_forward_pre_hook(lambda *_: None)

    model = Hooked()
    model.register_forward_pre_hook(lambda *_: None)

    ModelRoot(model).reset(Hooked)

    assert len(model._forward_pre_hooks) == 2


def test_closures_over_the_fresh_model_see_the_root():
    model = Lazy()
    root = ModelRoot(model)

    root.reset(Lazy)
    del root.module.layers[1]

    assert model.count() == 1


def test_what_is_referenced_from_outside_is_reported(caplog):
    model = TinyModel()
    outside = model.head.weight

    ModelRoot(model).reset(TinyModel)

    assert "1 of 7 old parameters are still referenced from outside" in caplog.text
    assert outside is not model.head.weight


def test_initialize_that_raises_is_the_cause_and_the_memory_is_free():
    root = ModelRoot(TinyModel())
    half = []

    def initialize():
        model = TinyModel()
        half.append(weakref.ref(model.head.weight))
        raise ValueError("no such config")

    with pytest.raises(RecoveryFailed, match="no such config") as caught:
        root.reset(initialize)

    assert type(caught.value.__cause__) is ValueError
    gc.collect()
    assert half[0]() is None
    assert not vars(root.module)
    assert root.dirt == Dirt.ANYTHING


def test_slots_do_not_survive():
    class Slotted(nn.Module):
        __slots__ = ("turned", "unset")

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 3))
            self.turned = self.w.t()

    model = Slotted()
    old = weakref.ref(model.w)

    ModelRoot(model).reset(Slotted)

    assert old() is None
    assert model.turned.data_ptr() == model.w.data_ptr()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_class_made_for_each_model_is_taken_over():
    def parametrised():
        return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))

    def local():
        class Local(nn.Linear):
            pass

        return Local(2, 2)

    for build in (parametrised, local):
        model = build()
        ModelRoot(model).reset(build)
        assert model(torch.ones(1, 2)).shape == (1, 2)


def test_a_builder_that_hands_out_the_old_model_is_named():
    model = TinyModel()

    with pytest.raises(RecoveryFailed, match="must build a new one each time"):
        ModelRoot(model).reset(lambda: model)


def test_another_class_is_refused():
    with pytest.raises(RecoveryFailed, match="was a TinyModel and is built as a Linear"):
        ModelRoot(TinyModel()).reset(lambda: nn.Linear(1, 1))
