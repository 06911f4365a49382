"""An engine's own loading code, watched: what it leaves out, writes twice or cannot hold is refused by name."""

import concurrent.futures

import pytest
import torch
from torch import nn

from modelexpress.discovery import FoundTensor, manifest_of
from modelexpress.engines.coverage import Expectation, Rehearsed, load_rehearsed, rehearse
from modelexpress.errors import CheckpointError

NOTHING_LEFT_OUT = Expectation()
NARROWING = Rehearsed(nbytes=0, narrows=True)


class Layer(nn.Module):
    """q and k fused by rows, a row-parallel weight, and a scale."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.fused = nn.Parameter(torch.empty(6, 4, dtype=dtype))
        self.down = nn.Parameter(torch.empty(4, 8, dtype=dtype))
        self.scale = nn.Parameter(torch.full((1,), -1.0, dtype=dtype))


class Engine(nn.Module):
    """Loads as engines do: by name, into slices, without looking whether all was written."""

    def __init__(self, layers=3, dtype=torch.float32, threads=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(layers))
        self.head = nn.Parameter(torch.empty(10, 4, dtype=dtype))
        self.threads = threads

    def load_weights(self, weights):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            tasks = []
            for name, value in weights:
                if self.threads:
                    tasks.append(pool.submit(self.load_one, name, value))
                else:
                    self.load_one(name, value)
            for task in tasks:
                task.result()

    def load_one(self, name, value):
        if name == "head":
            self.head[: value.shape[0]].data.copy_(value)
            self.head[value.shape[0] :].data.fill_(0)
            return
        _, layer, part = name.split(".")
        layer = self.layers[int(layer)]
        if part == "q":
            layer.fused.data.narrow(0, 0, 4).copy_(value)
        elif part == "k":
            layer.fused.data.narrow(0, 4, 2).copy_(value)
        elif part == "down":
            if value.shape[-1] < 8:
                value = torch.cat([value, torch.zeros(4, 8 - value.shape[-1])], dim=1)
            layer.down.data.copy_(value)
        elif part == "scale":
            layer.scale.data.fill_(value.item())


def checkpoint(layers=3, rows=10, dtype=torch.float32):
    made = {"head": torch.randn(rows, 4).to(dtype)}
    for layer in range(layers):
        made[f"layers.{layer}.q"] = torch.randn(4, 4).to(dtype)
        made[f"layers.{layer}.k"] = torch.randn(2, 4).to(dtype)
        made[f"layers.{layer}.down"] = torch.randn(4, 8).to(dtype)
        made[f"layers.{layer}.scale"] = torch.rand(1).to(dtype)
    return made


def manifest(tensors):
    return manifest_of(tuple(FoundTensor(name, each, "parameter", True) for name, each in tensors.items()))


def load(module, weights):
    module.load_weights(weights)


def try_rehearsal(tensors, engine=None, expected=NOTHING_LEFT_OUT):
    return rehearse(engine or Engine(), manifest(tensors), "DIR", load, expected)


@pytest.mark.parametrize("threads", [False, True])
def test_a_rehearsal_writes_nothing_and_a_load_everything(threads):
    engine, tensors = Engine(threads=threads), checkpoint()
    for each in engine.parameters():
        each.data.fill_(7)

    rehearsed = try_rehearsal(tensors, engine)
    untouched = [bool((each == 7).all()) for each in engine.parameters()]
    load(engine, iter(tensors.items()))

    assert all(untouched)
    assert torch.equal(engine.layers[2].fused, torch.cat([tensors["layers.2.q"], tensors["layers.2.k"]]))
    assert torch.equal(engine.head, tensors["head"])
    # scalars go through Python, and are not counted
    assert rehearsed.nbytes == sum(each.nbytes for name, each in tensors.items() if not name.endswith("scale"))
    assert not rehearsed.narrows
    assert "submit_watched" not in concurrent.futures.ThreadPoolExecutor.submit.__name__


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("name", ["layers.1.q", "layers.1.k", "layers.2.down", "layers.0.scale", "head"])
def test_a_missing_tensor_is_named_as_the_checkpoint_would(name, threads):
    tensors = checkpoint()
    del tensors[name]

    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors that the model needs: '{name}'"):
        try_rehearsal(tensors, Engine(threads=threads))


def test_a_missing_layer_is_listed_whole():
    tensors = {name: each for name, each in checkpoint().items() if not name.startswith("layers.1")}

    with pytest.raises(
        CheckpointError, match=r"lacks 4 .*'layers\.1\.down', 'layers\.1\.k', 'layers\.1\.q', 'layers\.1\.scale'"
    ):
        try_rehearsal(tensors)


def test_what_no_layer_has_is_named_by_the_parameter_and_its_bytes():
    tensors = {name: each for name, each in checkpoint().items() if not name.endswith(".k")}

    with pytest.raises(CheckpointError, match=r"'layers\.0\.fused' \(32 of 96 bytes\)"):
        try_rehearsal(tensors)


@pytest.mark.parametrize(
    ("name", "shape"), [("layers.1.q", (1, 4)), ("layers.1.q", (4,)), ("layers.1.q", ()), ("layers.1.q", (4, 1))]
)
def test_a_broadcast_is_refused_with_both_shapes(name, shape):
    tensors = checkpoint() | {name: torch.randn(shape)}

    with pytest.raises(CheckpointError) as raised:
        try_rehearsal(tensors)

    assert f"'{name}' has shape {list(shape)} where the model has [4, 4]" in str(raised.value)


@pytest.mark.parametrize("threads", [False, True])
def test_what_the_engine_says_to_a_tensor_is_told_with_its_name_and_its_like(threads):
    tensors = checkpoint() | {"layers.1.scale": torch.rand(2)}

    with pytest.raises(CheckpointError, match=r"'layers\.1\.scale' of shape \[2\], where 'layers\.0\.scale' has \[1\]"):
        try_rehearsal(tensors, Engine(threads=threads))


def test_one_short_tensor_that_would_be_filled_up_is_refused():
    tensors = checkpoint() | {"layers.1.down": torch.randn(4, 6)}

    with pytest.raises(CheckpointError, match=r"'layers\.1\.down' of shape \[4, 6\] would be filled up to \[4, 8\]"):
        try_rehearsal(tensors)


def test_a_model_that_is_wider_than_its_checkpoint_everywhere_loads():
    tensors = checkpoint() | {f"layers.{layer}.down": torch.randn(4, 6) for layer in range(3)}

    try_rehearsal(tensors)


def test_padding_rows_may_be_filled_and_others_not():
    short = checkpoint(rows=8)

    try_rehearsal(short, expected=Expectation(padding={"head": 8}))
    with pytest.raises(CheckpointError, match="head"):
        try_rehearsal(short, expected=Expectation(padding={"head": 9}))
    with pytest.raises(CheckpointError, match="head"):
        try_rehearsal(short)


def test_tensors_that_share_memory_must_be_the_same():
    """A tied weight that is stored under both names."""
    engine, tensors = Engine(), checkpoint()
    engine.layers[1].fused = engine.layers[0].fused
    rehearsed = try_rehearsal(tensors, engine)

    assert rehearsed.same == {("layers.0.q", "layers.1.q"), ("layers.0.k", "layers.1.k")}
    with pytest.raises(CheckpointError, match=r"tensors 'layers\.0\.q' and 'layers\.1\.q' differ"):
        load_rehearsed(engine, iter(tensors.items()), "DIR", load, NOTHING_LEFT_OUT, rehearsed)

    tensors |= {"layers.1.q": tensors["layers.0.q"].clone(), "layers.1.k": tensors["layers.0.k"].clone()}
    assert load_rehearsed(engine, iter(tensors.items()), "DIR", load, NOTHING_LEFT_OUT, rehearsed) == rehearsed.nbytes


def test_metadata_may_be_converted_and_written_over():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.shape = nn.Parameter(torch.empty(2))

        def load_weights(self, weights):
            for _, value in weights:
                self.shape.data.copy_(value)

    tensors = {f"{part}.shape": torch.tensor([at, 4]) for at, part in enumerate("qkv")}

    with pytest.raises(CheckpointError, match="is int64"):
        try_rehearsal(tensors, Packed())
    assert not try_rehearsal(tensors, Packed(), Expectation(metadata=lambda name: name.endswith("shape"))).same


def test_what_a_rehearsal_does_to_modules_is_undone():
    class Restless(Engine):
        """Drops a layer's parameter when it has derived something from it, and puts another in place of one."""

        def load_weights(self, weights):
            super().load_weights(weights)
            self.derived = self.layers[0].fused * 2
            del self.layers[0].fused
            self.layers[1].down.data = torch.zeros(1)
            self.extra = nn.Linear(2, 2)

    engine = Restless()
    before = {name: each.data_ptr() for name, each in engine.named_parameters()}

    try_rehearsal(checkpoint(), engine)

    assert {name: each.data_ptr() for name, each in engine.named_parameters()} == before
    assert not hasattr(engine, "derived")
    assert not hasattr(engine, "extra")


def test_widened_parameters_have_the_same_gap_in_every_layer():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Module() for _ in range(2))
            for each in self.layers:
                each.w = nn.Parameter(torch.zeros(2, 4, 4))

        def load_weights(self, weights):
            for name, value in weights:
                layer = self.layers[int(name.split(".")[1])]
                layer.w.data[:, : value.shape[1], : value.shape[2]].copy_(value)

    tensors = {f"layers.{at}.w": torch.randn(2, 3, 3) for at in range(2)}
    expected = Expectation(widened=frozenset({"layers.0.w", "layers.1.w"}))

    try_rehearsal(tensors, Wide(), expected)
    for broken in ({"layers.0.w": tensors["layers.0.w"]}, tensors | {"layers.1.w": torch.randn(2, 2, 3)}):
        with pytest.raises(CheckpointError, match=r"layers\.1\.w"):
            try_rehearsal(broken, Wide(), expected)


def test_a_tensor_of_a_known_module_must_be_used_and_of_others_need_not(caplog):
    with pytest.raises(CheckpointError, match=r"does not use them: 'layers\.0\.bias'"):
        try_rehearsal(checkpoint() | {"layers.0.bias": torch.randn(4)})

    try_rehearsal(checkpoint() | {"tower.weight": torch.randn(4)}, TowerlessEngine())
    assert "belong to no part of this model: tower.weight" in caplog.text


class TowerlessEngine(Engine):
    def load_one(self, name, value):
        if not name.startswith("tower"):
            super().load_one(name, value)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (torch.complex64, torch.float32),
        (torch.int32, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.bool, torch.float32),
    ],
)
def test_types_without_a_conversion_are_refused(kind, target):
    tensors = checkpoint(dtype=target) | {"layers.1.q": torch.zeros(4, 4).to(kind)}

    with pytest.raises(CheckpointError, match=r"'layers\.1\.q' is .* there is no conversion"):
        try_rehearsal(tensors, Engine(dtype=target))


def test_values_that_do_not_fit_are_found_when_they_arrive():
    tensors = checkpoint() | {"layers.1.q": torch.full((4, 4), 1e6)}

    with pytest.raises(CheckpointError, match=r"'layers\.1\.q'.* holds 16 values that float16 cannot"):
        load_rehearsed(Engine(dtype=torch.float16), iter(tensors.items()), "DIR", load, NOTHING_LEFT_OUT, NARROWING)


def test_conversions_to_a_narrower_type_are_counted(caplog):
    engine = Engine(dtype=torch.bfloat16)
    assert try_rehearsal(checkpoint(), engine).narrows

    load_rehearsed(engine, iter(checkpoint().items()), "DIR", load, NOTHING_LEFT_OUT, NARROWING)

    assert "10 from float32 to bfloat16" in caplog.text


def test_what_the_engine_swallows_is_still_refused():
    class Swallowing(Engine):
        def load_one(self, name, value):
            try:
                super().load_one(name, value)
            except Exception:
                self.head.data.copy_(torch.zeros(10, 4))

    with pytest.raises(CheckpointError, match=r"'layers\.1\.q' has shape"):
        try_rehearsal(checkpoint() | {"layers.1.q": torch.randn(4)}, Swallowing())


def test_rewriting_a_parameter_from_itself_is_no_second_write():
    class Transforming(Engine):
        def load_one(self, name, value):
            super().load_one(name, value)
            if name == "head":
                self.head.data.copy_(-torch.exp(self.head))

    engine, tensors = Transforming(), checkpoint()

    try_rehearsal(tensors, engine)
    load(engine, iter(tensors.items()))

    assert torch.equal(engine.head, -torch.exp(tensors["head"]))


def test_a_fused_temporary_keeps_its_origins():
    class Pending(Engine):
        def load_weights(self, weights):
            waiting = {}
            for name, value in weights:
                _, _, part = name.rpartition(".")
                if part in ("q", "k"):
                    waiting[name] = value
                    continue
                self.load_one(name, value)
            for at, layer in enumerate(self.layers):
                layer.fused.data.copy_(torch.cat([waiting[f"layers.{at}.q"], waiting[f"layers.{at}.k"]]).float())

    tensors = checkpoint()

    try_rehearsal(tensors, Pending())
    del tensors["layers.1.k"]
    with pytest.raises(CheckpointError, match="does not fit the model"):
        try_rehearsal(tensors, Pending())


def test_a_parameter_that_may_stay_as_built_is_not_missed():
    tensors = {name: each for name, each in checkpoint().items() if not name.endswith("scale")}

    rehearsed = try_rehearsal(tensors, expected=Expectation(optional=lambda name: name.endswith("scale")))

    assert rehearsed.unfilled == {f"layers.{layer}.scale" for layer in range(3)}


def test_strided_destinations_are_followed():
    class Interleaved(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(4, 6))

        def load_weights(self, weights):
            for name, value in weights:
                start = 0 if name == "even" else 1
                self.w.data[:, start::2].copy_(value)

    both = {"even": torch.randn(4, 3), "odd": torch.randn(4, 3)}

    try_rehearsal(both, Interleaved())
    with pytest.raises(CheckpointError, match=r"'w' \(48 of 96 bytes\)"):
        try_rehearsal({"even": both["even"]}, Interleaved())
