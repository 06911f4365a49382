"""Several sources read as one: over a wire in this process that is disturbed, and from real processes, killed."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from modelexpress import api, manifest, plan, stripe
from modelexpress.config import Config
from modelexpress.errors import ConfigError, LoadFailed, TransferFailed
from modelexpress.model_root import ModelRoot
from modelexpress.strategies import turn
from modelexpress.strategies.base import LoadTarget
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.rdma import RdmaFromPeer
from modelexpress.transport import Connection, LocalTransport
from tests.support.tensors import randomize, snapshot
from tests.test_peer_loading import Fleet

ROOT = Path(__file__).parent.parent
PIECE = 256
CHUNKS = 64


class Rows(nn.Module):
    """A model of CHUNKS chunks."""

    def __init__(self):
        super().__init__()
        for at in range(CHUNKS):
            self.register_parameter(f"row{at:03}", nn.Parameter(torch.zeros(PIECE // 4), requires_grad=False))


class Wire(LocalTransport):
    """Calls `during` with the plan when a chunk was copied, before anybody hears of it."""

    def __init__(self, open_endpoints, during):
        super().__init__(open_endpoints)
        self._during = during

    def connect(self, endpoint, *, deadline, stop=None):
        return _Disturbed(super().connect(endpoint, deadline=deadline), self._during)


class _Disturbed(Connection):
    transport = "local"

    def __init__(self, inner, during):
        self._inner = inner
        self._during = during

    def read(self, plan, *, deadline, arrived=None, moved=None, work=None):
        def disturbed(chunk):
            self._during(plan)
            arrived(chunk)

        self._inner.read(plan, deadline=deadline, arrived=disturbed, work=work)

    def close(self):
        self._inner.close()


class Group:
    """Sources of one model and what is known of them by the place of their memory."""

    def __init__(self, path, count, *, seeds=None, **options):
        self.fleet = Fleet(path / "registry")
        self.models = [randomize(Rows(), seed) for seed in (seeds or [3] * count)]
        self.sources = [self.fleet.source(model, **options) for model in self.models]
        self.arrived = Counter()
        self.moved = Counter()
        for each in self.sources:
            each.publish()
        self._at = {model.row000.data_ptr(): at for at, model in enumerate(self.models)}

    def number(self, plan):
        return self._at[plan.source.storages[0].address]

    def names(self):
        return [each.record.name for each in self.sources]

    def load(self, disturb=None, *, verify="on", strategies=(), progress=None, transfer_timeout_s=20, **options):
        """`disturb(number of the source, chunks it moved)` is called when a chunk of a source is in place."""
        lock = threading.Lock()

        def during(plan):
            with lock:
                number = self.number(plan)
                self.moved[number] += 1
            if disturb is not None:
                disturb(number, self.moved[number])

        adapter = self.fleet.adapter(Rows)
        target = LoadTarget(adapter, ModelRoot(adapter.initialize()), progress)
        with closing(self.fleet.open_registry()) as registry:
            strategy = RdmaFromPeer(
                registry,
                lambda: Wire(self.fleet.endpoints, during),
                verify=verify,
                transfer_timeout_s=transfer_timeout_s,
                max_sources=3,
                max_readers=1,
                **options,
            )
            report = LoadStrategyChain([strategy, *strategies]).run(target)
        assert target.root.resets == 0
        return report

    def close(self):
        for each in self.sources:
            each.withdraw()


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_NBYTES", PIECE)
    monkeypatch.setattr(plan, "PIECE_NBYTES", PIECE)
    made = []

    def make(count=2, **options):
        made.append(Group(tmp_path, count, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Together:
    """Holds the first chunk of each source until all have one, so that all take part."""

    def __init__(self, count):
        self._all = threading.Barrier(count)

    def __call__(self, number, moved):
        if moved == 1:
            self._all.wait(20)


# Sharing the work


def test_two_sources_share_the_work_and_the_report_says_how(group):
    two = group()
    report = two.load(Together(2))

    assert snapshot(report.model) == snapshot(two.models[0])
    assert two.moved[0] + two.moved[1] == CHUNKS
    [attempt] = report.attempts
    assert {source for source, _, _ in attempt.shares} == set(two.names())
    assert sum(nbytes for _, _, nbytes in attempt.shares) == report.nbytes == CHUNKS * PIECE
    assert attempt.source == attempt.shares[0][0]
    assert {transport for _, transport, _ in attempt.shares} == {"local"}


def test_a_slow_source_moves_less(group):
    two = group()
    together = Together(2)

    def slow(number, moved):
        together(number, moved)
        if number == 0:
            time.sleep(0.05)
        else:
            time.sleep(0.001)

    report = two.load(slow)

    assert snapshot(report.model) == snapshot(two.models[0])
    assert two.moved[0] < two.moved[1]


def test_a_slow_source_begins_no_chunk_that_all_others_would_wait_for(monkeypatch):
    """And the fastest never declines, so that all is moved."""
    now = [0.0]
    monkeypatch.setattr(stripe.time, "monotonic", lambda: now[0])
    ranges = [plan.Chunk(1, ((number, plan.Range(0, number, 0, number, 1)),), ()) for number in range(30)]
    read = stripe._Read(
        plan.TransferPlan(manifest.Manifest((), ()), manifest.Manifest((), ()), tuple(ranges)), None, None
    )
    fast, slow = stripe._Member("fast", "serving"), stripe._Member("slow", "serving")

    slow_chunk = read.take(slow)
    for _ in range(10):
        chunk = read.take(fast)
        now[0] += 1
        read.finish(chunk, fast)
    read.finish(slow_chunk, slow)  # it took 10 s, and the others would move what is left in 19 s
    assert read.has_work_for(slow)
    for _ in range(11):
        chunk = read.take(fast)
        now[0] += 1
        read.finish(chunk, fast)

    assert not read.has_work_for(slow)  # 8 are left
    assert read.has_work_for(fast)
    fast.state = "over"
    assert read.has_work_for(slow)


# Waiting for a turn


@contextmanager
def reading(group, number):
    """Another target reads from a source while the block runs."""
    with closing(group.fleet.open_registry()) as registry, registry.reading(group.sources[number].record, lease_s=60):
        yield


def test_a_target_takes_the_source_that_nobody_reads_and_that_alone(group):
    three = group(3)
    with reading(three, 0), reading(three, 1):
        report = three.load()

    assert set(three.moved) == {2}
    assert snapshot(report.model) == snapshot(three.models[2])


def test_a_target_waits_until_its_source_is_free(group):
    one = group(1)
    taken = ExitStack()
    taken.enter_context(reading(one, 0))
    threading.Timer(0.5, taken.close).start()

    report = one.load()

    assert report.seconds >= 0.5
    assert snapshot(report.model) == snapshot(one.models[0])


def test_a_source_that_appears_meanwhile_is_read(group):
    """And one that others read is left alone."""
    two = group(2)
    two.sources[1].withdraw()
    with reading(two, 0):
        threading.Timer(0.5, two.sources[1].publish).start()
        report = two.load()

    assert set(two.moved) == {1}
    assert report.source == two.names()[1]


def test_a_reader_that_hangs_does_not_keep_its_source(group, monkeypatch):
    monkeypatch.setattr(turn, "_SETUP_S", 0.2)
    one = group(1)
    with reading(one, 0):
        report = one.load()

    assert snapshot(report.model) == snapshot(one.models[0])
    assert [each.outcome for each in report.attempts] == ["loaded"]


def test_where_more_hang_than_waiting_allows_the_target_reads_all_the_same(group):
    one = group(1)
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(reading(one, 0))
        report = one.load(transfer_timeout_s=4)

    assert snapshot(report.model) == snapshot(one.models[0])


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_spare_takes_over_from_the_source_that_was_read_alone(group, monkeypatch, end):
    """Nothing that has arrived is moved again."""
    monkeypatch.setattr(stripe, "_STRAGGLER_S", 0.1)
    three = group(3)

    def disturb(number, moved):
        if number == 2 and moved >= CHUNKS // 2:
            if end == "hangs":
                time.sleep(1)
            raise TransferFailed("was stopped")

    with reading(three, 0), reading(three, 1):
        report = three.load(disturb)

    assert snapshot(report.model) == snapshot(three.models[2])
    assert three.moved[0] + three.moved[1] == CHUNKS // 2 + 1
    assert (report.attempts[0].outcome, report.attempts[0].source) == ("failed", three.names()[2])
    assert report.attempts[-1].outcome == "loaded"


def test_max_sources_bounds_how_many_are_read(group):
    four = group(4)
    report = four.load()

    assert len(four.moved) <= 3
    assert snapshot(report.model) == snapshot(four.models[0])


def test_one_after_the_other_when_they_are_not_read_together(group):
    two = group()
    report = two.load(together=False)

    assert len(two.moved) == 1
    assert [each.outcome for each in report.attempts] == ["loaded"]


# Sources that are lost


@pytest.mark.parametrize("verify", ["on", "off", "sampled"])
def test_a_source_that_dies_late_costs_its_unfinished_chunk(group, verify):
    """Resume: what has arrived is not moved again, and nothing is built again."""
    two = group()
    together = Together(2)
    finished = threading.Event()

    def die(number, moved):
        together(number, moved)
        if number == 1:
            finished.wait(20)  # the other moves nearly everything
        if number == 0 and moved == CHUNKS - 6:
            finished.set()
            raise TransferFailed("peer went away")

    report = two.load(die, verify=verify)

    assert snapshot(report.model) == snapshot(two.models[0])
    assert two.moved[0] + two.moved[1] == CHUNKS + 1  # and the one that it was at
    lost, loaded = report.attempts
    assert (lost.outcome, lost.source, lost.error) == ("failed", two.names()[0], "TransferFailed: peer went away")
    assert lost.nbytes == (CHUNKS - 7) * PIECE
    assert loaded.outcome == "loaded"
    assert loaded.nbytes == CHUNKS * PIECE


def test_a_source_that_sends_a_wrong_byte_is_left_and_what_it_sent_is_moved_again(group):
    two = group()
    together = Together(2)
    two.models[0].row040.view(torch.uint8)[7] ^= 1

    def only_the_first(number, moved):
        together(number, moved)
        if number == 1:
            time.sleep(0.02)

    report = two.load(only_the_first)

    assert snapshot(report.model) == snapshot(two.models[1])
    if len(report.attempts) == 2:  # unless the good one moved that very chunk
        assert "VerificationFailed: tensor row040" in report.attempts[0].error
        assert two.moved[1] == CHUNKS
        assert report.attempts[0].nbytes == 0


def test_chunks_of_a_generation_that_ended_are_moved_again(group):
    two = group()
    together = Together(2)

    def withdraw(number, moved):
        together(number, moved)
        if number == 0 and moved == 1:
            with closing(two.fleet.open_registry()) as registry:
                registry.withdraw(two.sources[0].record)

    report = two.load(withdraw, verify="off")

    assert snapshot(report.model) == snapshot(two.models[1])
    assert two.moved[1] == CHUNKS
    assert "changed or withdrew generation 1" in report.attempts[0].error
    assert report.attempts[0].nbytes == 0


def test_a_source_that_hangs_on_its_last_chunk_is_left_behind(group, monkeypatch):
    monkeypatch.setattr(stripe, "_STRAGGLER_S", 0.1)
    two = group()
    together = Together(2)
    hung = threading.Event()

    def hang(number, moved):
        together(number, moved)
        if number == 0:
            hung.wait(1)
            raise TransferFailed("was stopped")

    report = two.load(hang)

    assert snapshot(report.model) == snapshot(two.models[1])
    assert two.moved[1] == CHUNKS
    assert "was left behind" in report.attempts[0].error


def test_all_are_lost_each_with_its_reason_and_nothing_is_built_in_between(group):
    three = group(3)
    together = Together(3)

    def die(number, moved):
        together(number, moved)
        raise TransferFailed(f"peer {number} went away")

    with pytest.raises(LoadFailed) as caught:
        three.load(die)

    attempts = caught.value.report.attempts
    assert {each.source: each.error for each in attempts} == {
        name: f"TransferFailed: peer {number} went away" for number, name in enumerate(three.names())
    }
    assert len(three.moved) == 3
    assert set(three.moved.values()) == {1}


def test_what_the_callers_progress_raises_ends_the_load(group):
    def progress(nbytes):
        raise KeyError("mine")

    with pytest.raises(LoadFailed, match=r"builtins\.KeyError: 'mine'"):
        group().load(progress=progress)


# Sources that are not alike


def test_sources_of_other_bytes_are_never_mixed(group):
    """Both have the right name. Which one is read is chance; half of each would be neither."""
    two = group(seeds=[3, 4])
    report = two.load()

    assert len(two.moved) == 1
    [number] = two.moved
    assert snapshot(report.model) == snapshot(two.models[number])
    assert len(report.attempts) == 1


def test_a_source_of_other_bytes_is_tried_when_the_first_is_lost(group):
    two = group(seeds=[3, 4])
    died = []

    def die_once(number, moved):
        if not died:
            died.append(number)
        if number == died[0] and moved == CHUNKS // 2:
            raise TransferFailed("peer went away")

    report = two.load(die_once)

    [number] = {0, 1} - set(died)
    assert snapshot(report.model) == snapshot(two.models[number])
    assert [each.outcome for each in report.attempts] == ["failed", "loaded"]
    assert two.moved[number] == CHUNKS


def test_sources_without_checksums_are_read_alone(group):
    two = group(checksums=False)
    report = two.load(verify="off")

    assert len(two.moved) == 1
    assert snapshot(report.model) == snapshot(two.models[0])


# What is left behind


def test_threads_end_with_the_load(group):
    two = group()
    two.load(Together(2))

    assert not [each.name for each in threading.enumerate() if each.name in ("mx-source", "mx-host")]


# Real processes


SOURCE = """
    import sys
    import modelexpress
    from tests.test_stripe import build
    with modelexpress.publish(build(7), "/nowhere", registry=sys.argv[1], revision="r", transports=sys.argv[2]):
        print("ready", flush=True)
        sys.stdin.read()
"""


def build(seed=None):
    model = nn.Module()
    for at in range(12):
        model.register_parameter(f"w{at}", nn.Parameter(torch.zeros(4 << 20), requires_grad=False))
    return model if seed is None else randomize(model, seed)


class SourceProcess:
    def __init__(self, registry, transports):
        command = [sys.executable, "-c", textwrap.dedent(SOURCE), registry, transports]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate()


@pytest.mark.parametrize("verify", ["on", "off"])
@pytest.mark.parametrize("transports", ["host", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_a_killed_process_is_taken_over_from_by_another(tmp_path, transports, verify):
    """One of two sources is killed while it is read. What it had delivered stays, and nothing is built again."""
    registry = f"file://{tmp_path}/registry"
    built, arrived = [], []
    with SourceProcess(registry, transports) as first, SourceProcess(registry, transports) as second:

        def progress(nbytes):
            arrived.append(nbytes)
            if len(arrived) == 6:
                first.process.kill()
                first.process.wait()

        def initialize():
            built.append(build())
            return built[-1]

        options = {"registry": registry, "revision": "r", "transports": transports, "verify": verify}
        report = api.load(initialize, "/nowhere", strategies="rdma", progress=progress, **options)

    assert second.process.returncode == 0
    assert snapshot(report.model) == snapshot(build(7))
    assert len(built) == 1
    assert report.attempts[-1].outcome == "loaded"
    assert f"/{second.process.pid}/" in report.source
    assert sum(arrived) <= report.nbytes + 3 * manifest.PIECE_NBYTES
    assert all(f"/{first.process.pid}/" in each.source for each in report.attempts[:-1])


def test_strict_reads_one_source(tmp_path, monkeypatch):
    seen = []
    real = RdmaFromPeer.__init__

    def remember(self, *args, **options):
        seen.append(options["together"])
        real(self, *args, **options)

    monkeypatch.setattr(RdmaFromPeer, "__init__", remember)
    for strict in (False, True):
        config = Config(registry=f"file://{tmp_path}", strict=strict, strategies=("rdma",))
        with api.default_chain(config, Path("/nowhere")):
            pass

    assert seen == [True, False]
    assert os.path.isdir(tmp_path)
    with pytest.raises(ConfigError, match="unknown transport 'ucx'"):
        api.load(build, "/nowhere", transports="ucx")
