"""The chain: one loop, one reset, true reports, and never a second parameter set."""

import gc
import weakref

import pytest
import torch
from torch import nn

from modelexpress.adapter import ModuleAdapter
from modelexpress.errors import LoadFailed, NotAvailable, RecoveryFailed, TransferFailed
from modelexpress.model_root import Dirt, ModelRoot
from modelexpress.strategies.base import LoadSource, LoadStrategy, LoadTarget, TransferStats
from modelexpress.strategies.chain import LoadStrategyChain
from tests.support.tensors import TinyModel, randomize, snapshot

EXPECTED = snapshot(randomize(TinyModel(), seed=7))


class Engine:
    """Builds TinyModels and counts what is alive when it does."""

    def __init__(self, fails_from=None):
        self.alive_at_initialize = []
        self.built = []
        self._fails_from = fails_from

    def initialize(self):
        self.alive_at_initialize.append(sum(ref() is not None for ref in self.built))
        if self._fails_from is not None and len(self.alive_at_initialize) > self._fails_from:
            raise ValueError("engine cannot start")
        model = TinyModel()
        self.built = [weakref.ref(each) for each in model.parameters()]
        return model

    def target(self):
        adapter = ModuleAdapter(self.initialize, lambda: None)
        return LoadTarget(adapter, ModelRoot(adapter.initialize()))


class Scripted(LoadSource):
    """Does to the root what the test says."""

    def __init__(self, name, act, tolerates=Dirt.NONE):
        self.name = name
        self.tolerates = tolerates
        self._act = act

    def load(self, target):
        self._act(target)
        return TransferStats(100)


class ScriptedStrategy(LoadStrategy):
    def __init__(self, name, *sources):
        self.name = name
        self._sources = sources

    def sources(self, target):
        if self._sources and isinstance(self._sources[0], Exception):
            raise self._sources[0]
        return self._sources


def fills(target):
    with target.root.writing() as module:
        randomize(module, seed=7)


def refuses(target):
    raise NotAvailable("nothing here")


def breaks_off(target):
    """Writes half, then fails with a chain of exceptions whose frames hold parameters."""
    with target.root.writing() as module:
        held = list(module.parameters())
        with torch.no_grad():
            held[0].fill_(0.5)
        try:
            _deep(held)
        except KeyError as exc:
            group = ExceptionGroup("lanes", [exc, ValueError("second lane")])
            raise TransferFailed("went away") from group


def _deep(held):
    copies = [each * 2 for each in held]
    raise KeyError(len(copies))


def writes_bytes(dirt):
    def act(target):
        with target.root.writing(dirt) as module:
            with torch.no_grad():
                module.head.weight.fill_(9)
            raise TransferFailed("stopped")

    return act


def test_first_success_ends_the_chain():
    engine = Engine()
    chain = LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", fills), Scripted("b", refuses))])

    report = chain.run(engine.target())

    assert (report.strategy, report.source, report.nbytes) == ("rdma", "a", 100)
    assert [each.outcome for each in report.attempts] == ["loaded"]
    assert snapshot(report.model) == EXPECTED


def test_two_dirty_failures_cost_two_resets_and_never_a_second_parameter_set():
    """The root survives, and nothing of the failed attempts is alive when the next model is built."""
    engine = Engine()
    target = engine.target()
    root = target.root.module
    root.engine_tag = "kept"
    sources = (Scripted("a", breaks_off), Scripted("b", breaks_off))
    chain = LoadStrategyChain([ScriptedStrategy("rdma", *sources), ScriptedStrategy("disk", Scripted("dir", fills))])

    report = chain.run(target)

    assert engine.alive_at_initialize == [0, 0, 0]
    assert report.model is root
    assert root.engine_tag == "kept"
    assert snapshot(root) == EXPECTED
    assert [(a.strategy, a.source, a.outcome) for a in report.attempts] == [
        ("rdma", "a", "failed"),
        ("rdma", "b", "failed"),
        ("disk", "dir", "loaded"),
    ]
    assert report.attempts[0].error == "TransferFailed: went away"


def test_a_clean_failure_costs_no_reset():
    engine = Engine()
    chain = LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", refuses), Scripted("b", fills))])

    report = chain.run(engine.target())

    assert engine.alive_at_initialize == [0]
    assert report.attempts[0].outcome == "unavailable"


@pytest.mark.parametrize(
    ("written", "tolerated", "resets"),
    [
        (Dirt.LAYOUT_BYTES, Dirt.LAYOUT_BYTES, 0),
        (Dirt.CHECKPOINT_BYTES, Dirt.LAYOUT_BYTES, 0),
        (Dirt.LAYOUT_BYTES, Dirt.CHECKPOINT_BYTES, 1),
        (Dirt.ANYTHING, Dirt.LAYOUT_BYTES, 1),
        (Dirt.CHECKPOINT_BYTES, Dirt.NONE, 1),
    ],
)
def test_bytes_that_the_next_source_overwrites_cost_no_reset(written, tolerated, resets):
    target = Engine().target()
    sources = (Scripted("a", writes_bytes(written)), Scripted("b", fills, tolerates=tolerated))

    LoadStrategyChain([ScriptedStrategy("rdma", *sources)]).run(target)

    assert target.root.resets == resets


def test_the_last_dirty_failure_is_not_followed_by_a_reset():
    target = Engine().target()

    with pytest.raises(LoadFailed) as caught:
        LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", breaks_off))]).run(target)

    assert target.root.resets == 0
    assert caught.value.report.model is None


def test_all_reasons_are_in_the_one_error():
    """A36: six different causes must not become one 'falling back'."""
    chain = LoadStrategyChain(
        [
            ScriptedStrategy("rdma", NotAvailable("registry is empty")),
            ScriptedStrategy("gms"),
            ScriptedStrategy("disk", Scripted("dir", lambda target: {}["shard-2"])),
        ]
    )

    with pytest.raises(LoadFailed) as caught:
        chain.run(Engine().target())

    assert "[1] rdma: NotAvailable: registry is empty" in str(caught.value)
    assert "[2] gms: NotAvailable: it knows no source" in str(caught.value)
    assert "[3] disk from dir: builtins.KeyError: 'shard-2'" in str(caught.value)
    assert [each.outcome for each in caught.value.report.attempts] == ["unavailable", "unavailable", "failed"]


def test_strict_stops_at_the_first_failure():
    chain = LoadStrategyChain(
        [ScriptedStrategy("rdma", Scripted("a", refuses), Scripted("b", fills))],
        strict=True,
    )

    with pytest.raises(LoadFailed, match=r"attempts: 1.*nothing here"):
        chain.run(Engine().target())


@pytest.mark.parametrize("fatal", [KeyboardInterrupt, SystemExit, MemoryError, RecoveryFailed])
def test_what_must_not_be_retried_goes_straight_up(fatal):
    def act(target):
        raise fatal("now")

    chain = LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", act), Scripted("b", fills))])

    with pytest.raises(fatal):
        chain.run(Engine().target())


@pytest.mark.parametrize("fatal", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_that_another_exception_replaced_still_ends_the_load(fatal):
    """What `Condition.wait` does when it is interrupted while it takes its lock back."""
    later = []

    def act(target):
        try:
            raise fatal("now")
        finally:
            raise RuntimeError("cannot release un-acquired lock")

    chain = LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", act), Scripted("b", later.append))])

    with pytest.raises(fatal, match="now"):
        chain.run(Engine().target())

    assert later == []


def test_an_interrupt_that_somebody_dealt_with_is_an_error_like_any_other():
    def act(target):
        try:
            raise SystemExit("what a parser of arguments does")
        except SystemExit as exc:
            raise ValueError("bad arguments") from exc

    chain = LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", act), Scripted("b", fills))])

    assert [each.outcome for each in chain.run(Engine().target()).attempts] == ["failed", "loaded"]


def test_an_interrupt_behind_an_error_that_was_translated_ends_the_load():
    def act(target):
        try:
            try:
                raise KeyboardInterrupt("now")
            finally:
                raise RuntimeError("cannot release un-acquired lock")
        except RuntimeError as exc:
            raise TransferFailed("translated") from exc

    with pytest.raises(KeyboardInterrupt, match="now"):
        LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", act))]).run(Engine().target())


def test_an_interrupt_of_the_caller_is_not_one_of_the_load():
    chain = LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", breaks_off), Scripted("b", fills))])

    try:
        raise KeyboardInterrupt("the caller handles this one")
    except KeyboardInterrupt:
        report = chain.run(Engine().target())

    assert [each.outcome for each in report.attempts] == ["failed", "loaded"]


def test_a_model_that_cannot_be_rebuilt_ends_the_load():
    engine = Engine(fails_from=1)
    later = []
    chain = LoadStrategyChain(
        [ScriptedStrategy("rdma", Scripted("a", breaks_off)), ScriptedStrategy("disk", Scripted("dir", later.append))]
    )

    with pytest.raises(RecoveryFailed, match="engine cannot start") as caught:
        chain.run(engine.target())

    assert type(caught.value.__cause__) is ValueError
    assert "went away" in caught.value.__notes__[0]
    assert later == []
    gc.collect()
    assert all(ref() is None for ref in engine.built)


def test_a_half_finished_transfer_leaves_no_byte_behind():
    """A25: half of the tensors are 0xAA when the peer fails; the next source does not touch every buffer."""

    def half_then_raise(target):
        with target.root.writing() as module:
            tensors = [*module.parameters(), *module.buffers()]
            for each in tensors[::2]:
                each.detach().flatten().view(torch.uint8).fill_(0xAA)
            raise TransferFailed("half")

    def checkpoint_load(target):
        with target.root.writing() as module, torch.no_grad():
            for seed, each in enumerate(module.parameters()):
                each.copy_(torch.full_like(each, seed))

    dirty, clean = Engine().target(), Engine().target()
    sources = (Scripted("a", half_then_raise), Scripted("b", checkpoint_load))
    LoadStrategyChain([ScriptedStrategy("rdma", *sources)]).run(dirty)
    LoadStrategyChain([ScriptedStrategy("rdma", sources[1])]).run(clean)

    assert snapshot(dirty.root.module) == snapshot(clean.root.module)


def test_the_callers_own_exception_keeps_its_frames():
    """A load inside an except block: the caller's traceback is not ours to clear."""

    def callers():
        precious = [1, 2, 3]
        raise ValueError(len(precious))

    try:
        callers()
    except ValueError as exc:
        sources = (Scripted("a", breaks_off), Scripted("b", fills))
        LoadStrategyChain([ScriptedStrategy("rdma", *sources)]).run(Engine().target())
        frame = exc.__traceback__.tb_next.tb_frame
        assert frame.f_locals["precious"] == [1, 2, 3]


def test_report_is_one_json_object():
    report = LoadStrategyChain([ScriptedStrategy("rdma", Scripted("a", refuses), Scripted("b", fills))]).run(
        Engine().target()
    )

    decoded = __import__("json").loads(report.to_json())

    assert decoded["strategy"] == "rdma"
    assert decoded["source"] == "b"
    assert decoded["nbytes"] == 100
    assert [set(each) for each in decoded["attempts"]] == [
        {"strategy", "source", "outcome", "error", "nbytes", "seconds"}
    ] * 2
    assert decoded["gb_per_s"] == pytest.approx(100 / report.attempts[1].seconds / 1e9, rel=0.01, abs=1e-6)


def test_a_bare_module_that_cannot_be_rebuilt_says_what_to_pass():
    target = LoadTarget(ModuleAdapter(None, lambda: None), ModelRoot(nn.Linear(1, 1)))
    chain = LoadStrategyChain([ScriptedStrategy("x", Scripted("a", _taints), Scripted("b", fills))])

    with pytest.raises(RecoveryFailed, match="pass a function that builds it"):
        chain.run(target)


def _taints(target):
    with target.root.writing():
        raise TransferFailed("stopped")
