"""Imported weights in a KV pool's size: once, by each of the ways in which SGLang has sized it."""

import math
from types import SimpleNamespace

import pytest

from modelexpress.config import Config
from modelexpress.engines.sglang import memory
from modelexpress.errors import ConfigError
from tests.engines.sglang_memory import GIB, foreign, install_tree, loaded

SHARED = 3 * GIB // 2
MEASURED = 8.0


class Worker:
    """A TpModelWorker: a runner, and for some drafts several."""

    def __init__(self, *runners):
        self.model_runner = runners[0]
        self.model_runner_list = list(runners)

    @property
    def preloaded_weights_bytes(self):
        return sum(runner.loader.preloaded_weights_bytes for runner in self.model_runner_list)

    def alloc_memory_pool(self):
        for runner in self.model_runner_list:
            runner.alloc_memory_pool()


class BaseLoader:
    preloaded_weights_bytes: int = 0


class BaseRunner:
    def __init__(self, model, baseline=MEASURED, *, draft=False, told=0):
        self.model = model
        self.is_draft_worker = draft
        self.loader = BaseLoader()
        if told:
            self.loader.preloaded_weights_bytes = told
        self.pre_model_load_memory = baseline
        self.pools = []


def loader_kind():
    class Runner(BaseRunner):
        def account_preloaded_weights(self, preloaded_weights_bytes):
            if preloaded_weights_bytes == 0:
                return
            self.pre_model_load_memory += preloaded_weights_bytes / GIB

        def alloc_memory_pool(self):
            self.pools.append(self.pre_model_load_memory)

    class Scheduler(BaseScheduler):
        def init_target_memory_pool(self):
            nbytes = self.tp_worker.preloaded_weights_bytes
            if self.draft_worker is not None:
                nbytes += self.draft_worker.preloaded_weights_bytes
            self.tp_worker.model_runner.account_preloaded_weights(nbytes)
            self.tp_worker.alloc_memory_pool()

    return {"Runner": Runner, "Loader": BaseLoader, "Scheduler": Scheduler}


def runner_kind():
    class Runner(BaseRunner):
        def alloc_memory_pool(self):
            self.pools.append(self.pre_model_load_memory)

    return {"Runner": Runner, "Loader": object, "Scheduler": PoolsOfTarget}


def both_kinds():
    class Mixin:
        def init_memory_pool(self, pre_model_load_memory):
            self.pools.append(pre_model_load_memory)

    class Runner(BaseRunner, Mixin):
        def alloc_memory_pool(self):
            self.init_memory_pool(self.pre_model_load_memory)

    return {"Runner": Runner, "Loader": object, "Scheduler": PoolsOfTarget}


def argument_kind():
    class Mixin:
        def init_memory_pool(self, pre_model_load_memory):
            self.pools.append(pre_model_load_memory)

    class Runner(BaseRunner, Mixin):
        def alloc(self):
            self.init_memory_pool(self.pre_model_load_memory)

    class Scheduler(BaseScheduler):
        def start(self):
            self.tp_worker.model_runner.alloc()

    return {"Runner": Runner, "Loader": object, "Scheduler": Scheduler}


class BaseScheduler:
    def __init__(self, target, *drafts):
        self.tp_worker = Worker(target)
        self.draft_worker = Worker(*drafts) if drafts else None

    def start(self):
        self.init_target_memory_pool()


class PoolsOfTarget(BaseScheduler):
    def init_target_memory_pool(self):
        self.tp_worker.alloc_memory_pool()


KINDS = {"loader": loader_kind, "runner": runner_kind, "both": both_kinds, "argument": argument_kind}
COUNTS_DRAFTS = ("loader", "runner", "both")


@pytest.fixture
def made(monkeypatch):
    """Make a tree of a kind, hook it, and give its classes."""

    def make(kind, **others):
        classes = KINDS[kind]() | others
        install_tree(monkeypatch, **classes)
        memory.install()
        return SimpleNamespace(**classes)

    yield make
    memory.uninstall()


def pool_of(tree, target, *drafts, starts=1):
    """The baseline that the last pool of the target was made with."""
    scheduler = tree.Scheduler(target, *drafts)
    for _ in range(starts):
        scheduler.start()
    return target.pools[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_imported_weights_are_counted_once_whatever_is_retried(kind, made):
    tree = made(kind)
    memory.install()

    for starts in (1, 2, 3):
        assert pool_of(tree, tree.Runner(loaded(SHARED)), starts=starts) == MEASURED + 1.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("baseline", [MEASURED, 0.0, None, math.nan])
def test_with_nothing_imported_the_baseline_is_what_it_was(kind, baseline, made):
    tree = made(kind)

    for model in (loaded(0), foreign(), None):
        assert pool_of(tree, tree.Runner(model, baseline)) is baseline


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("baseline", [None, True, "8.0", math.nan, math.inf, -1.0, [8.0]])
def test_a_baseline_that_is_no_number_ends_the_start(kind, baseline, made):
    tree = made(kind)
    target = tree.Runner(loaded(SHARED), baseline)

    with pytest.raises(ConfigError, match=r"weights were imported that have to be counted.*looked for the GiB") as said:
        pool_of(tree, target)

    assert repr(baseline) in str(said.value)
    assert target.pools == []


@pytest.mark.parametrize("kind", ["loader", "runner", "both"])
def test_a_baseline_that_is_not_there_ends_the_start(kind, made):
    tree = made(kind)
    target = tree.Runner(loaded(SHARED))
    del target.pre_model_load_memory

    with pytest.raises(ConfigError, match=r"ModelRunner\.pre_model_load_memory is None"):
        pool_of(tree, target)


@pytest.mark.parametrize("kind", COUNTS_DRAFTS)
def test_memory_under_target_and_drafts_is_counted_once(kind, made):
    """A draft in its target's checkpoint lies on the same generation; one of its own lies on another."""
    tree = made(kind)

    def draft(generation):
        return tree.Runner(loaded(GIB, generation), draft=True)

    target = loaded(SHARED, generation=1)
    assert pool_of(tree, tree.Runner(target), draft(1)) == MEASURED + 1.5
    assert pool_of(tree, tree.Runner(target), draft(2)) == MEASURED + 2.5
    assert pool_of(tree, tree.Runner(target), draft(2), draft(2), draft(3)) == MEASURED + 3.5
    assert pool_of(tree, tree.Runner(loaded(0)), draft(2), draft(2), starts=2) == MEASURED + 1
    assert pool_of(tree, tree.Runner(foreign()), draft(2)) == MEASURED + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafts_own_baseline_is_left_alone(kind, made):
    tree = made(kind)
    draft = tree.Runner(loaded(SHARED), draft=True)

    (draft.alloc if kind == "argument" else draft.alloc_memory_pool)()

    assert draft.pools == [MEASURED]


def test_what_sglangs_loaders_were_told_is_not_counted_again(made):
    """`--load-format modelexpress` tells its loader; `remote_instance` has one that nobody could tell."""
    tree = made("loader")

    told, untold = tree.Runner(loaded(SHARED), told=SHARED), tree.Runner(loaded(SHARED))

    assert pool_of(tree, told, starts=2) == pool_of(tree, untold, starts=2) == MEASURED + 1.5
    assert told.loader.preloaded_weights_bytes == untold.loader.preloaded_weights_bytes == SHARED


def test_loaders_of_shared_memory_say_together_what_it_is(made):
    tree = made("loader")
    target, draft = (tree.Runner(loaded(SHARED), told=SHARED, draft=draft) for draft in (False, True))

    assert pool_of(tree, target, draft, starts=2) == MEASURED + 1.5
    assert target.loader.preloaded_weights_bytes + draft.loader.preloaded_weights_bytes == SHARED


def test_what_other_loaders_say_stays(made):
    """SGLang's weight cache under the target, and a draft of ours."""
    tree = made("loader")

    target, draft = tree.Runner(foreign(), told=GIB), tree.Runner(loaded(SHARED, 2), told=SHARED, draft=True)

    assert pool_of(tree, target, draft, starts=2) == MEASURED + 2.5
    assert target.loader.preloaded_weights_bytes == GIB


def test_a_runner_that_loads_again_counts_what_it_has_now(made):
    tree = made("runner")
    target = tree.Runner(loaded(SHARED))
    assert pool_of(tree, target) == MEASURED + 1.5

    target.model = loaded(GIB, generation=2)
    assert pool_of(tree, target) == MEASURED + 1
    target.model = loaded(0)
    assert pool_of(tree, target) == MEASURED


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_undone(kind, monkeypatch):
    classes = KINDS[kind]()
    install_tree(monkeypatch, **classes)
    before = [dict(vars(owner)) for cls in classes.values() for owner in cls.__mro__]

    memory.install()
    memory.uninstall()
    memory.uninstall()

    after = [dict(vars(owner)) for cls in classes.values() for owner in cls.__mro__]
    assert after == before
    target = classes["Runner"](loaded(SHARED))
    assert pool_of(SimpleNamespace(**classes), target) == MEASURED
    assert memory.install() == ("runner" if kind == "both" else kind)  # and done again
    memory.uninstall()


def test_the_speculative_workers_of_each_release_are_looked_through(made):
    tree = made("runner")

    def baseline(worker_of):
        target, draft = tree.Runner(loaded(SHARED)), tree.Runner(loaded(GIB, 2), draft=True)
        scheduler = tree.Scheduler(target)
        scheduler.draft_worker = worker_of(target, draft)
        scheduler.start()
        return target.pools[-1]

    with_draft = [
        lambda _, draft: SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=[draft])),
        lambda _, draft: SimpleNamespace(draft_worker=SimpleNamespace(draft_runner_list=[draft])),
        lambda _, draft: SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=draft)),
        lambda _, draft: SimpleNamespace(draft_worker=Worker(draft)),
        lambda _, draft: SimpleNamespace(model_runner=draft),
    ]
    assert [baseline(each) for each in with_draft] == [MEASURED + 2.5] * len(with_draft)
    without = [lambda target, _: SimpleNamespace(draft_worker=None, model_runner=target), lambda *_: SimpleNamespace()]
    assert [baseline(each) for each in without] == [MEASURED + 1.5] * len(without)


# --- at the start


class Nothing:
    """A ModelRunner of a release that sizes its pool in a way of its own."""

    def alloc_memory_pool(self):
        return self.free_memory

    def init_memory_pool(self, budget):
        return budget


def test_an_unknown_release_is_refused_with_what_was_looked_for(monkeypatch):
    install_tree(monkeypatch, "9.9", Runner=Nothing, Loader=BaseLoader, Scheduler=PoolsOfTarget)

    with pytest.raises(ConfigError) as said:
        memory.prepare(Config(gms="/run/gms.sock"), draft=False)

    for name in (
        "SGLang 9.9",
        "BaseModelLoader.preloaded_weights_bytes",
        "ModelRunner.account_preloaded_weights",
        "self.pre_model_load_memory",
        "Scheduler.init_target_memory_pool",
        "init_memory_pool(pre_model_load_memory)",
        "start without gms",
    ):
        assert name in str(said.value)
    assert vars(Nothing)["alloc_memory_pool"].__name__ == "alloc_memory_pool"


def test_an_empty_release_is_refused_too(monkeypatch):
    install_tree(monkeypatch)

    with pytest.raises(ConfigError, match="would not count imported weights"):
        memory.install()


@pytest.mark.parametrize("lacking", ["Loader", "Scheduler"])
def test_half_of_an_api_is_not_taken_for_it(lacking, monkeypatch):
    install_tree(monkeypatch, **loader_kind() | {lacking: object})

    if lacking == "Loader":
        assert memory.install() == "runner"  # what came before it is still there
        memory.uninstall()
    else:
        with pytest.raises(ConfigError, match="init_target_memory_pool"):
            memory.install()


def test_without_a_memory_service_nothing_is_hooked_or_asked(monkeypatch):
    install_tree(monkeypatch, Runner=Nothing)
    before = dict(vars(Nothing))

    memory.prepare(Config(), draft=False)

    assert dict(vars(Nothing)) == before


def test_a_loader_is_told_what_its_model_lies_on():
    for nbytes in (0, SHARED):
        loader = BaseLoader()
        memory.tell(loader, loaded(nbytes).modelexpress.report)
        assert loader.preloaded_weights_bytes == nbytes
