"""RdmaFromPeer and WeightSource over a directory registry and a wire that moves real bytes in this process."""

import os
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from modelexpress.adapter import ModuleAdapter
from modelexpress.config import Config
from modelexpress.errors import ConfigError, LoadFailed, ModelExpressError, TransferFailed
from modelexpress.identity import module_identity
from modelexpress.model_root import ModelRoot
from modelexpress.registry.directory import DirectoryRegistry
from modelexpress.source import Served, WeightSource
from modelexpress.strategies.base import LoadTarget
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.rdma import RdmaFromPeer
from modelexpress.transport import Connection, LocalTransport
from tests.support.tensors import TinyModel, bytes_of, randomize, snapshot

CONFIG = Config(revision="r1", model_name="org/tiny")
NOWHERE = Path("/nonexistent")


class Wire(LocalTransport):
    """A LocalTransport whose reads can be disturbed: `during` is called after each chunk that moved."""

    during = None

    def connect(self, endpoint, *, deadline, stop=None):
        return _Disturbed(super().connect(endpoint, deadline=deadline), self.during)


class _Disturbed(Connection):
    transport = "local"

    def __init__(self, inner, during):
        self._inner = inner
        self._during = during

    def read(self, plan, *, deadline, arrived=None, moved=None, work=None):
        def both(chunk):
            if arrived is not None:
                arrived(chunk)
            if self._during is not None:
                self._during(plan)

        self._inner.read(plan, deadline=deadline, arrived=both, moved=moved, work=work)

    def close(self):
        self._inner.close()


class Fleet:
    """One registry and one wire; makes sources and targets."""

    def __init__(self, path):
        self.path = path
        self.endpoints = set()

    def open_registry(self):
        return DirectoryRegistry(self.path, signing_key=None)

    def wire(self, during=None):
        wire = Wire(self.endpoints)
        wire.during = during
        return wire

    def adapter(self, build=TinyModel, config=CONFIG, derive=None):
        return ModuleAdapter(build, lambda: module_identity(NOWHERE, config), derive)

    def source(self, model, *, checksums=True, config=CONFIG):
        adapter = self.adapter(config=config)

        def rename(revision):
            return (self.adapter(config=replace(config, revision=revision)).identity().key,), f"tiny@{revision}"

        key = adapter.identity().key
        served = Served(lambda: (adapter.manifest(model), model), (key,), "layout", "tiny", rename)
        return WeightSource(served, self.open_registry, self.wire, checksums=checksums, threads=1, lease_ttl_s=5)

    def load(self, build=TinyModel, *, during=None, verify="on", **adapter):
        adapter = self.adapter(build, **adapter)
        target = LoadTarget(adapter, ModelRoot(adapter.initialize()))
        with closing(self.open_registry()) as registry:
            strategy = RdmaFromPeer(
                registry, lambda: self.wire(during), verify=verify, transfer_timeout_s=5, max_sources=3, max_readers=1
            )
            return LoadStrategyChain([strategy]).run(target)


@pytest.fixture
def fleet(tmp_path):
    return Fleet(tmp_path / "registry")


def test_a_target_gets_the_sources_bytes_ties_included(fleet):
    model = randomize(TinyModel(), 3)
    with fleet.source(model) as source:
        report = fleet.load()

    assert snapshot(report.model) == snapshot(model)
    assert report.model.head.weight is report.model.embedding.weight
    assert report.source == source_name(report)
    assert source.published is False
    assert report.nbytes == sum(span.nbytes for span in fleet.adapter().manifest(model).spans())


def source_name(report):
    return report.attempts[-1].source


def test_nothing_is_found_before_publish_and_after_withdraw(fleet):
    source = fleet.source(randomize(TinyModel(), 3))
    with pytest.raises(LoadFailed, match="no source in the registry for revision r1 of org/tiny"):
        fleet.load()
    source.publish()
    source.withdraw()
    source.withdraw()

    with pytest.raises(LoadFailed, match="no source in the registry"):
        fleet.load()


def test_another_identity_is_never_served(fleet):
    with fleet.source(randomize(TinyModel(), 3)), pytest.raises(LoadFailed, match="no source in the registry"):
        fleet.load(config=Config(revision="r2", model_name="org/tiny"))


def test_another_layout_is_refused_before_a_byte_is_written(fleet):
    built = []

    def narrow():
        built.append(randomize(TinyModel(width=4), 1))
        return built[0]

    with fleet.source(randomize(TinyModel(), 3)), pytest.raises(LoadFailed, match="shape differs"):
        fleet.load(narrow)

    assert snapshot(built[0]) == snapshot(randomize(TinyModel(width=4), 1))


def test_a_publication_is_one_at_a_time(fleet):
    with fleet.source(TinyModel()) as source, pytest.raises(ModelExpressError, match="published already"):
        source.publish()


def test_a_second_source_is_tried_when_the_first_dies_mid_read(fleet):
    """Bytes of the first stay in the prepared layout, and the second overwrites all of them: no rebuild."""
    model = randomize(TinyModel(), 3)
    first, second = fleet.source(model), fleet.source(model)
    first.publish()
    second.publish()
    died = []

    def die_once(plan):
        if not died:
            died.append(plan)
            raise TransferFailed("peer went away")

    report = fleet.load(during=die_once)
    first.withdraw()
    second.withdraw()

    assert [each.outcome for each in report.attempts] == ["failed", "loaded"]
    assert snapshot(report.model) == snapshot(model)


def test_a_flipped_bit_in_the_sources_memory_is_found(fleet):
    model = randomize(TinyModel(), 3)
    with fleet.source(model):
        model.head.weight.detach().view(torch.uint8)[3, 5] ^= 16
        with pytest.raises(LoadFailed, match=r"VerificationFailed: tensor embedding\.weight, head\.weight"):
            fleet.load()
        report = fleet.load(verify="off")

    assert snapshot(report.model) == snapshot(model)


def test_a_source_without_checksums_cannot_be_verified(fleet):
    with fleet.source(TinyModel(), checksums=False):
        with pytest.raises(LoadFailed, match="0 checksums"):
            fleet.load()
        fleet.load(verify="off")


def test_bytes_of_a_generation_that_ended_during_the_read_are_not_accepted(fleet):
    """The source updates while it is read: what was moved may be a mixture."""
    model = randomize(TinyModel(), 3)
    source = fleet.source(model)
    source.publish()
    updated = threading.Event()

    def update(plan):
        if not updated.is_set():
            updated.set()
            with closing(fleet.open_registry()) as registry:
                registry.withdraw(source.record)

    with pytest.raises(LoadFailed, match="changed or withdrew generation 1 while it was read"):
        fleet.load(during=update)
    source.withdraw()


def test_updating_publishes_the_new_bytes_under_their_new_name_only(fleet):
    model = randomize(TinyModel(), 3)
    with fleet.source(model) as source:
        with source.updating("r2"):
            randomize(model, 4)
            assert not source.published
        report = fleet.load(config=replace(CONFIG, revision="r2"))

        assert (source.record.generation, source.record.label) == (2, "tiny@r2")
        with pytest.raises(LoadFailed, match="no source in the registry for revision r1"):
            fleet.load()
        for used in ("r1", "r2", ""):
            with pytest.raises(ConfigError, match="names other weights"), source.updating(used):
                pass
    assert snapshot(report.model) == snapshot(randomize(TinyModel(), 4))


def test_updates_may_nest_and_run_side_by_side_and_the_last_one_publishes(fleet):
    """A set of weights that is only half updated is never found, with good checksums or without."""
    with fleet.source(randomize(TinyModel(), 3)) as source:
        side = ExitStack()
        with source.updating("r2"):
            thread = threading.Thread(target=side.enter_context, args=(source.updating("r3"),))
            thread.start()
            thread.join()
            with source.updating("r4"):
                pass
            assert not source.published
        assert not source.published  # the thread's block has not ended
        side.close()
        assert source.record.label == "tiny@r3"


def test_what_is_not_published_cannot_be_updated(fleet):
    source = fleet.source(TinyModel())

    with pytest.raises(ModelExpressError, match="is not published"), source.updating("r2"):
        pass


def test_withdrawing_inside_an_update_is_final(fleet):
    with fleet.source(TinyModel()) as source:
        with source.updating("r2"):
            source.withdraw()

        assert not source.published


def test_an_update_that_fails_leaves_the_source_withdrawn(fleet):
    source = fleet.source(TinyModel())
    source.publish()

    with pytest.raises(KeyError), source.updating("r2"):
        raise KeyError

    assert not source.published


def test_withdraw_waits_for_a_reader_that_is_at_it_and_its_bytes_are_good(fleet):
    """A rolling restart costs no reader its read: nobody new finds the source, and who reads it may finish."""
    model = randomize(TinyModel(), 3)
    source = fleet.source(model)
    source.publish()
    withdrawing = []

    def start_withdraw(plan):
        if not withdrawing:
            withdrawing.append(threading.Thread(target=source.withdraw))
            withdrawing[0].start()
            withdrawing[0].join(0.3)
            assert withdrawing[0].is_alive()
            with pytest.raises(LoadFailed, match="no source in the registry"):
                fleet.load()

    report = fleet.load(during=start_withdraw)
    withdrawing[0].join(5)

    assert not withdrawing[0].is_alive()
    assert snapshot(report.model) == snapshot(model)


def test_derived_tensors_travel_with_a_layout(fleet):
    """A15: weights in a dict, a tuple and a non-persistent buffer come over as the source has them."""

    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, 3))
            self.register_buffer("w1", torch.zeros(3, 3), persistent=False)
            self.derive()

        def derive(self):
            self.cache = {"k": self.w.detach() * 2}
            self.turned = (self.w.detach().t(),)
            self.w1 = self.w.detach() + 1

        def forward(self, x):
            return x @ self.w + x @ self.cache["k"] + x @ self.turned[0] + x @ self.w1

    model = randomize(Derived(), 3)
    model.derive()
    x = torch.ones(2, 3)
    with fleet.source(model):
        report = fleet.load(Derived)

    assert bytes_of(report.model(x)) == bytes_of(model(x))


def test_a_python_float_that_differs_refuses_the_fast_path(fleet):
    model = TinyModel()
    model.k_scale = 0.37
    with fleet.source(model), pytest.raises(LoadFailed, match=r"k_scale: target absent, source 0\.37"):
        fleet.load()


@pytest.mark.parametrize("where", ["source", "target", "both"])
def test_strided_parameters_come_out_right_or_are_refused(fleet, where):
    """A24: a one-sided read knows addresses and lengths only."""

    class Strided(nn.Module):
        def __init__(self, strided):
            super().__init__()
            self.turned = nn.Parameter(torch.zeros(3, 5).t() if strided else torch.zeros(5, 3))

    model = randomize(Strided(where != "target"), 3)
    with fleet.source(model):
        if where != "both":
            with pytest.raises(LoadFailed, match="stride differs"):
                fleet.load(lambda: Strided(where == "target"))
            return
        report = fleet.load(lambda: Strided(strided=True))

    assert snapshot(report.model) == snapshot(model)


def test_columns_of_a_base_are_left_to_the_disk(fleet):
    """What lies between their elements may belong to another model."""

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.column = nn.Parameter(torch.zeros(4, 8)[:, 2:5])

    with fleet.source(randomize(Columns(), 3)), pytest.raises(LoadFailed, match=r"strided with gaps.*\(column\)"):
        fleet.load(Columns)


def test_zero_elements_and_scalars_travel(fleet):
    """A06: dividing, slicing or registering by size must not meet them."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in {"s": (), "e": (0,), "e0": (0, 8), "e8": (8, 0), "n": (3,)}.items():
                self.register_buffer(name, torch.zeros(shape, dtype=torch.bfloat16))

    model = randomize(Odd(), 3)
    with fleet.source(model):
        report = fleet.load(Odd)

    assert snapshot(report.model) == snapshot(model)


def test_a_forked_child_does_not_withdraw_its_parents_source(fleet):
    with fleet.source(randomize(TinyModel(), 3)) as source:
        child = os.fork()
        if child == 0:
            source.withdraw()
            os._exit(0)
        os.waitpid(child, 0)

        assert fleet.load().strategy == "rdma"
