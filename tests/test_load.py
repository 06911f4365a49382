"""load() on plain modules, by disk: every tensor covered, nothing converted, ties kept, nothing aliased."""

import struct

import pytest
import torch
from torch import nn

import modelexpress
from modelexpress.errors import ConfigError, LoadFailed, RecoveryFailed
from tests.support.safetensors_writer import Raw, raw, write_file
from tests.support.tensors import Block, TinyModel, bytes_of, randomize, snapshot

RAW_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def save(path, module, *, without=(), extra=None):
    """Writes a module's persistent tensors with the test's own writer; each tie under its first name."""
    tensors = {
        name: Raw(RAW_NAMES[each.dtype], tuple(each.shape), bytes_of(each))
        for name, each in module.state_dict().items()
        if name not in without
    }
    return write_file(path / "model.safetensors", tensors | (extra or {}))


def test_a_function_that_builds_the_model(tmp_path):
    model = randomize(TinyModel(), 5)
    report = modelexpress.load(TinyModel, save(tmp_path, model, without=["head.weight"]))

    assert snapshot(report.model)["head.weight"] == snapshot(model)["head.weight"]
    assert report.strategy == "disk"


def test_a_module_is_filled_in_place(tmp_path):
    model, target = randomize(Block(8), 5), Block(8)
    before = {name: each.data_ptr() for name, each in target.named_parameters()}

    report = modelexpress.load(target, save(tmp_path, model))

    assert report.model is target
    assert {name: each.data_ptr() for name, each in target.named_parameters()} == before
    loaded = snapshot(target)
    assert loaded.pop("positions")[2] == bytes_of(torch.arange(5))  # not persistent: as it was built
    assert loaded == {name: each for name, each in snapshot(model).items() if name != "positions"}


@pytest.mark.parametrize("without", [["head.weight"], ["embedding.weight"], []])
def test_a_tie_is_filled_from_whichever_name_is_stored(tmp_path, without):
    """A14: unset, loaded twice, or broken are the three ways to get it wrong."""
    model = randomize(TinyModel(), 5)

    report = modelexpress.load(TinyModel, save(tmp_path, model, without=without))

    loaded = report.model
    assert loaded.head.weight is loaded.embedding.weight
    assert bytes_of(loaded.head.weight) == bytes_of(model.head.weight)
    with torch.no_grad():
        loaded.embedding.weight[0, 0] = 42
    assert loaded.head.weight[0, 0] == 42


def test_a_tie_whose_two_copies_differ_is_an_error(tmp_path):
    other = {"head.weight": raw("F32", 16, 8)}
    file = save(tmp_path, randomize(TinyModel(), 5), without=["head.weight"], extra=other)

    with pytest.raises(LoadFailed, match=r"CheckpointError.*'(head|embedding)\.weight' shares its memory"):
        modelexpress.load(TinyModel, file)


@pytest.mark.parametrize(
    ("without", "extra", "reason"),
    [
        (["down.weight", "scale"], {}, r"2 missing in the source \(down\.weight, scale\)"),
        ([], {"stray": raw("F32", 2)}, r"1 unexpected in the source \(stray\)"),
        (["up.weight"], {"up.weight": raw("F32", 16, 8)}, "dtype differs .up.weight: target bfloat16, source float32"),
        (["up.weight"], {"up.weight": raw("BF16", 8, 16)}, r"up\.weight: target \[16, 8\], source \[8, 16\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path, without, extra, reason):
    """A12, A13, A16: every persistent tensor is covered, in its own shape and precision."""
    target = randomize(Block(8), 1)
    before = snapshot(target)

    with pytest.raises(LoadFailed, match=reason):
        modelexpress.load(target, save(tmp_path, Block(8), without=without, extra=extra))

    assert snapshot(target) == before


def test_strided_parameters_get_their_logical_values(tmp_path):
    """A24 on disk: transposed, and two columns of one base."""

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            base = torch.zeros(4, 8)
            self.left, self.right = nn.Parameter(base[:, :3]), nn.Parameter(base[:, 3:])
            self.turned = nn.Parameter(torch.zeros(6, 2).t())

    model = randomize(Strided(), 5)

    loaded = modelexpress.load(Strided, save(tmp_path, model)).model

    assert snapshot(loaded) == snapshot(model)
    assert loaded.left.untyped_storage().data_ptr() == loaded.right.untyped_storage().data_ptr()


@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
def test_tensors_whose_elements_overlap_get_their_values_or_are_refused(tmp_path, stride):
    """Writing one element after the other, the last write would win without a word."""

    def build():
        module = nn.Module()
        module.register_buffer("w", torch.zeros(5).as_strided((2, 3), stride))
        return module

    good = Raw("F32", (2, 3), struct.pack("<6f", *([7.0] * 6)))
    bad = Raw("F32", (2, 3), struct.pack("<6f", *range(6)))

    loaded = modelexpress.load(build, write_file(tmp_path / "good.safetensors", {"w": good})).model
    assert bytes_of(loaded.w) == good.data
    with pytest.raises(LoadFailed, match="'w' shares its memory"):
        modelexpress.load(build, write_file(tmp_path / "bad.safetensors", {"w": bad}))


def test_a_model_that_saves_by_its_own_code_is_refused(tmp_path):
    class Own(nn.Linear):
        def get_extra_state(self):
            return {"scale": 2}

        def set_extra_state(self, state):
            self.scale = state["scale"]

    file = write_file(tmp_path / "m.safetensors", {"weight": raw("F32", 1, 1), "bias": raw("F32", 1)})

    with pytest.raises(LoadFailed, match=r"saves 1 values that are no parameters or buffers \(_extra_state\)"):
        modelexpress.load(lambda: Own(1, 1), file)


def test_the_default_device_is_the_callers_own(tmp_path):
    model = randomize(TinyModel(), 5)
    file, target = save(tmp_path, model), TinyModel()

    with torch.device("meta"):
        modelexpress.load(target, file)

    assert snapshot(target)["head.weight"] == snapshot(model)["head.weight"]


def test_zero_elements_and_scalars(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in {"s": (), "e": (0,), "e0": (0, 8), "n": (3,)}.items():
                self.register_buffer(name, torch.zeros(shape))

    model = randomize(Odd(), 5)

    assert snapshot(modelexpress.load(Odd, save(tmp_path, model)).model) == snapshot(model)


def test_derived_tensors_are_renewed_by_the_function_that_makes_them(tmp_path):
    """A15: a checkpoint does not hold them."""

    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))
            self.cache = {"double": self.w.detach() * 2}

        def derive(self):
            self.cache = {"double": self.w.detach() * 2}

    model = randomize(Derived(), 5)

    loaded = modelexpress.load(Derived, save(tmp_path, model), derive=Derived.derive).model

    assert bytes_of(loaded.cache["double"]) == bytes_of(model.w * 2)


@pytest.mark.parametrize("damage", ["overwrite", "truncate", "replace"])
def test_a_loaded_model_does_not_depend_on_its_file(tmp_path, damage):
    """A17: with the usual mmap the first changes the weights and the second kills the process."""
    model = randomize(TinyModel(), 5)
    file = save(tmp_path, model)
    loaded = modelexpress.load(TinyModel, file).model

    if damage == "overwrite":
        file.write_bytes(bytes(file.stat().st_size))
    elif damage == "truncate":
        file.write_bytes(b"")
    else:
        save(tmp_path, TinyModel())

    assert bytes_of(loaded.head.weight) == bytes_of(model.head.weight)


def test_a_meta_model_is_refused_with_the_tensors_name(tmp_path):
    with torch.device("meta"):
        model = TinyModel()

    with pytest.raises(LoadFailed, match=r"'blocks\.0\.down\.bias': it is on the meta device"):
        modelexpress.load(model, save(tmp_path, TinyModel()))


def test_a_function_that_builds_something_else_is_a_wrong_call(tmp_path):
    with pytest.raises(ConfigError, match="returned a dict, not a module"):
        modelexpress.load(dict, tmp_path)


def test_initialize_rebuilds_a_module_that_was_passed(tmp_path):
    """A load that fails after it wrote leaves a mixture, and derive counts as writing anything."""
    built = []

    def derive(module):
        raise ValueError("no such kernel")

    model = Block(8)
    with pytest.raises(LoadFailed, match="no such kernel"):
        modelexpress.load(model, save(tmp_path, Block(8)), initialize=lambda: built.append(1), derive=derive)
    assert built == []


@pytest.mark.parametrize("wrong", [{"strategies": "rdma"}, {"publish": True}, {"registri": "x"}, {"threads": 0}])
def test_wrong_options_touch_nothing(tmp_path, wrong):
    with pytest.raises(ConfigError):
        modelexpress.load(lambda: pytest.fail("built"), tmp_path, **wrong)


@pytest.mark.parametrize("checkpoint", [3, None, b"bytes", ""])
def test_a_checkpoint_is_a_path(checkpoint):
    with pytest.raises(ConfigError, match="give the path"):
        modelexpress.load(TinyModel, checkpoint)


def test_public_names_are_all_importable():
    assert all(getattr(modelexpress, name) is not None for name in modelexpress.__all__)
    assert issubclass(RecoveryFailed, modelexpress.ModelExpressError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        modelexpress.nothing  # noqa: B018 - the access is the test


def test_files_that_change_while_they_are_loaded_are_not_published(tmp_path):
    """Their digest would be that of other bytes than those that were loaded."""
    folder = tmp_path / "changing"
    folder.mkdir()
    model = randomize(TinyModel(), 5)
    path = save(folder, model, without=["head.weight"])

    def change(_loaded):
        save(folder, randomize(TinyModel(), 6), without=["head.weight"])

    report = modelexpress.load(TinyModel, path, derive=change, registry=f"file://{tmp_path}/registry", publish=True)

    assert report.strategy == "disk"
    assert report.publication is None
    assert snapshot(report.model)["head.weight"] == snapshot(model)["head.weight"]
