"""Two at the same time: threads, forked children and signals, each of which a load gets right or refuses."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import torch
from torch import nn

import modelexpress
from benchmarks.peer_process import PeerProcess
from modelexpress import api, model_root
from modelexpress.adapter import ModuleAdapter
from modelexpress.config import Config
from modelexpress.errors import ConfigError, ModelExpressError, NotAvailable, RecoveryFailed, TransferFailed
from modelexpress.identity import module_identity
from modelexpress.model_root import Dirt, ModelRoot
from modelexpress.plan import plan_transfer
from modelexpress.registry.directory import DirectoryRegistry
from modelexpress.strategies.base import LoadTarget
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.disk import DiskCheckpoint
from modelexpress.tcp_transport import TcpTransport
from tests.gms.service import serving
from tests.support.forking_process import digest_of, in_child
from tests.support.nixl_peer import Peer, manifest_over, pattern
from tests.support.safetensors_writer import raw, write_file

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # Python 3.12 warns: it is what is tried here
]

TENSORS = {f"t{at:02}": raw("BF16", 64, 500, seed=at) for at in range(12)}
WAIT_S = 30.0


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        for name, each in TENSORS.items():
            self.register_parameter(
                name, nn.Parameter(torch.zeros(each.shape, dtype=torch.bfloat16), requires_grad=False)
            )


@pytest.fixture
def checkpoint(tmp_path):
    return write_file(tmp_path / "model" / "model.safetensors", TENSORS)


@pytest.fixture
def registry(tmp_path):
    return f"file://{tmp_path}/registry"


@pytest.fixture
def expected(checkpoint):
    return digest_of(modelexpress.load(Rows, checkpoint, strategies="disk").model)


def options(registry, **more):
    return {"registry": registry, "revision": "r", "connect_timeout_s": 10.0} | more


def listed(registry):
    return os.listdir(registry.removeprefix("file://"))


# Threads


def test_threads_load_side_by_side_each_in_its_own_way(checkpoint, registry, expected, tmp_path):
    """One source, one service, one folder; none meets a port, a name or an agent of another."""
    ways = [{"strategies": "disk"}, {"strategies": "gms"}, *({"transports": each} for each in ("host", "nixl", "tcp"))]

    def load(number):
        way = ways[number % len(ways)]
        report = modelexpress.load(Rows, checkpoint, **options(registry, gms=socket, **way))
        return report.strategy, report.attempts[-1].shares, digest_of(report.model)

    with serving(tmp_path / "gms.sock") as socket:
        first = modelexpress.load(
            Rows, checkpoint, publish=True, gms=socket, **options(registry, transports="host,nixl,tcp")
        )
        with ThreadPoolExecutor(len(ways)) as pool:
            found = list(pool.map(load, range(3 * len(ways))))
        first.publication.withdraw()

    assert {each[2] for each in found} == {expected}
    assert [each[0] for each in found] == ["disk", "gms", "rdma", "rdma", "rdma"] * 3
    assert {share[1] for each in found for share in each[1]} == {"host", "nixl", "tcp"}


def test_a_module_that_is_being_loaded_is_not_loaded_by_another_thread(checkpoint, expected):
    """A reset in one would free memory that the other still writes to."""
    module, reached, go_on = Rows(), threading.Event(), threading.Event()

    def wait(_):
        reached.set()
        go_on.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(modelexpress.load, module, checkpoint, progress=wait)
        assert reached.wait(WAIT_S)
        with pytest.raises(ConfigError, match="another thread is loading this Rows"):
            modelexpress.load(module, checkpoint)
        go_on.set()
        first.result()

    assert digest_of(module) == expected
    assert digest_of(modelexpress.load(module, checkpoint).model) == expected  # and afterwards it may be


def test_a_module_that_is_being_built_again_is_not_loaded_by_another_thread(checkpoint, expected):
    module, reached, go_on = Rows(), threading.Event(), threading.Event()

    def build():
        reached.set()
        go_on.wait(WAIT_S)
        return Rows()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(load_what_is_dirty, module, build, checkpoint)
        assert reached.wait(WAIT_S)
        with pytest.raises(ConfigError, match="the Rows is empty: a load of it is building it again"):
            modelexpress.load(module, checkpoint)
        go_on.set()
        first.result()

    assert digest_of(module) == expected


def load_what_is_dirty(module, build, checkpoint):
    """A load whose root an attempt has changed in more than its bytes, so that it is built again first."""
    config = Config()
    adapter = ModuleAdapter(build, lambda: module_identity(checkpoint, config))
    root = ModelRoot(module)
    root.dirt = Dirt.ANYTHING
    return LoadStrategyChain([DiskCheckpoint(checkpoint, threads=1, verify="on")]).run(LoadTarget(adapter, root, None))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_a_module_whose_rebuild_was_broken_off_is_refused(checkpoint, raised):
    module = Rows()

    def build():
        raise raised("broken off")

    with pytest.raises((KeyboardInterrupt, RecoveryFailed)):
        load_what_is_dirty(module, build, checkpoint)
    with pytest.raises(ConfigError, match="build a new one and load that"):
        modelexpress.load(module, checkpoint)


def test_a_source_that_comes_and_goes_gives_right_bytes_or_none(checkpoint, registry, expected):
    model = modelexpress.load(Rows, checkpoint).model
    ended, found = threading.Event(), []

    def come_and_go():
        while not ended.is_set():
            with modelexpress.publish(model, checkpoint, **options(registry)):
                time.sleep(0.02)

    with ThreadPoolExecutor(4) as pool:
        source = pool.submit(come_and_go)
        loads = [pool.submit(modelexpress.load, Rows, checkpoint, **options(registry)) for _ in range(30)]
        found = [each.result() for each in loads]
        ended.set()
        source.result()

    assert {digest_of(each.model) for each in found} == {expected}
    assert {each.strategy for each in found} <= {"rdma", "disk"}
    assert listed(registry) == []


def test_one_source_published_and_withdrawn_by_many_threads(checkpoint, registry):
    """Whoever is second is told so; at the end nothing is left."""
    model = modelexpress.load(Rows, checkpoint).model
    config = api.resolve_config(options(registry, transports="host,tcp"))
    adapter = api.ModuleAdapter(None, lambda: api.module_identity(checkpoint, config))
    source = api._layout_source(adapter, model, checkpoint, config)

    def publish_and_withdraw(_):
        try:
            source.publish()
        except ModelExpressError as exc:
            assert "is published already" in str(exc)  # noqa: PT017 - one of many
        source.withdraw()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(publish_and_withdraw, range(30)))

    assert not source.published
    assert listed(registry) == []
    assert not [each for each in threading.enumerate() if each.name.startswith("mx-")]


def test_threads_that_publish_what_they_loaded_are_sources_of_their_own(checkpoint, registry, expected):
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: modelexpress.load(Rows, checkpoint, publish=True, **options(registry)), range(4))
        )
    try:
        assert len({each.publication.record.source_id for each in found}) == 4
        assert {digest_of(each.model) for each in found} == {expected}
    finally:
        for each in found:
            each.publication.withdraw()
    assert listed(registry) == []


# Forked children


@contextmanager
def forking(*arguments, environment=None):
    command = [sys.executable, "-m", "tests.support.forking_process", *map(str, arguments)]
    environment = {**os.environ, "MX_REVISION": "r", **(environment or {})}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.stdin.close()
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()


@pytest.mark.parametrize("transport", ["host", "nixl", "tcp"])
def test_children_of_a_source_leave_it_alone_however_they_end(checkpoint, registry, expected, transport):
    with forking("children", checkpoint, registry, transport) as process:
        pid = json.loads(process.stdout.readline())["served"]
        ended = json.loads(process.stdout.readline())
        with closing(DirectoryRegistry(registry.removeprefix("file://"), signing_key=None)) as opened:
            assert [each.record.pid for each in opened.find(None)] == [pid]
        report = modelexpress.load(Rows, checkpoint, **options(registry, transports=transport, strategies="rdma"))

    assert set(ended.values()) == {"ended"}, ended
    assert digest_of(report.model) == expected
    assert process.returncode == 0
    assert listed(registry) == []


def test_a_child_holds_no_source_and_says_so(checkpoint, registry):
    report = modelexpress.load(Rows, checkpoint, publish=True, **options(registry, transports="host,tcp"))
    source, refused = report.publication, []

    def use():
        assert not source.published
        for what in (source.publish, lambda: source.updating("other").__enter__(), lambda: source.record):
            try:
                what()
            except ModelExpressError as exc:
                refused.append(str(exc))
        os._exit(7 if len(refused) == 3 and "from which this one was forked" in refused[0] else 8)

    pid = os.fork()
    if pid == 0:
        try:
            use()
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert source.published
    source.withdraw()


def test_a_child_that_was_forked_during_a_withdrawal_does_not_wait_for_it(checkpoint, registry):
    """Another thread of the parent held the source's lock, and there is nobody in the child to let go of it."""
    report = modelexpress.load(Rows, checkpoint, publish=True, **options(registry, transports="host"))
    with (
        closing(DirectoryRegistry(registry.removeprefix("file://"), signing_key=None)) as opened,
        ThreadPoolExecutor(1) as pool,
    ):
        [found] = opened.find(None)
        with opened.reading(found.record, lease_s=60):
            withdrawn = pool.submit(report.publication.withdraw)
            while opened.find(found.record.keys[0]):  # until it is retired, and waits for its reader
                time.sleep(0.01)
            ended = in_child(lambda: (report.publication.withdraw(), os._exit(0)))
        withdrawn.result()
    assert ended == "ended"


def forked(run):
    """The exit code of a forked child in which `run` gives it; 99 when it raises."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = run()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_load_in_a_child_that_was_forked_while_a_thread_loads_is_right(checkpoint, registry, expected, transport):
    ended = threading.Event()

    def load():
        report = modelexpress.load(Rows, checkpoint, **options(registry, transports=transport, strategies="rdma"))
        return digest_of(report.model)

    def go_on():
        while not ended.is_set():
            assert load() == expected

    with (
        PeerProcess.serve(checkpoint, registry, "--revision", "r", environment={"MX_TRANSPORTS": "host,tcp"}),
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(go_on)
        found = [forked(lambda: 0 if load() == expected else 1) for _ in range(10)]
        ended.set()
        running.result()

    assert found == [0] * 10


def test_nixl_refuses_in_a_child_of_a_process_that_used_it_and_says_what_to_do(checkpoint, registry, expected):
    """UCX has locks and threads that a fork does not take along: some such children hung."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        refused, fell_back = pool.apply(_forked_after_nixl, (str(checkpoint), registry))

    assert "was forked from process" in refused
    assert "spawn or forkserver" in refused
    assert fell_back == ["disk", expected]


def _forked_after_nixl(checkpoint, registry):
    """What a forked child says whose parent serves by NIXL: the reason of the peer, and how it loaded after all."""
    report = modelexpress.load(Rows, checkpoint, publish=True, **options(registry, transports="nixl"))
    reading, writing = os.pipe()

    def load():
        found = modelexpress.load(Rows, checkpoint, **options(registry, transports="nixl"))
        refused = next(each.error for each in found.attempts if each.source is not None)
        text = json.dumps([refused, [found.strategy, digest_of(found.model)]])
        os.write(writing, text.encode())
        return 0

    assert forked(load) == 0
    report.publication.withdraw()
    return json.loads(os.read(reading, 1 << 16))


def test_a_child_that_lives_on_does_not_hide_the_death_of_its_parent(checkpoint, registry):
    """It had the listening socket and every connection too: readers waited for their deadline."""
    with (
        Peer([1 << 20] * 4, transport="tcp") as peer,
        closing(TcpTransport(lanes=1, connect_timeout_s=20, listen="127.0.0.1")) as transport,
    ):
        connection = transport.connect(peer.endpoint, deadline=time.monotonic() + 20)
        child = peer.tell("fork")
        try:
            peer.kill()
            target = [torch.zeros(each.nbytes, dtype=torch.uint8).numpy() for each in peer.manifest.storages]
            with pytest.raises(TransferFailed, match="the source went away"):
                connection.read(plan_transfer(peer.manifest, manifest_over(target)), deadline=time.monotonic() + 20)
            with pytest.raises(NotAvailable, match="refused"):
                transport.connect(peer.endpoint, deadline=time.monotonic() + 20)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_lives_on_does_not_hide_that_its_parent_has_read(checkpoint):
    """Its copy of the connection kept a thread of the source."""
    source = [pattern(1, 0, 1000)]
    with closing(TcpTransport(lanes=1, connect_timeout_s=5, listen="127.0.0.1")) as transport:
        registration = transport.register(manifest_over(source))
        connection = transport.connect(registration.endpoint, deadline=time.monotonic() + 5)
        child = os.fork()
        if child == 0:
            time.sleep(WAIT_S)
            os._exit(0)
        try:
            connection.close()
            give_up = time.monotonic() + WAIT_S / 2
            while registration._connections and time.monotonic() < give_up:
                time.sleep(0.01)
            assert not registration._connections
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _load_here(checkpoint, registry):
    report = modelexpress.load(Rows, checkpoint, **options(registry))
    return report.strategy, digest_of(report.model)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_loads_in_processes_of_multiprocessing(checkpoint, registry, expected, method):
    with PeerProcess.serve(checkpoint, registry, "--revision", "r"):
        _load_here(checkpoint, registry)
        with multiprocessing.get_context(method).Pool(2) as pool:
            found = pool.starmap(_load_here, [(str(checkpoint), registry)] * 4)

    assert found == [("rdma", expected)] * 4


# Signals


class InterruptAt:
    """A trace function that raises KeyboardInterrupt at the `at`-th step inside one file, counted from 0."""

    def __init__(self, filename, at):
        self.filename, self.left = filename, at

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename == self.filename:
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self


def test_a_claim_on_a_module_that_is_interrupted_at_any_line_does_not_outlive_its_load():
    steps = 0
    while True:
        module = Rows()
        interrupt = InterruptAt(model_root.__file__, steps)
        try:
            sys.settrace(interrupt)
            with ModelRoot(module).loading():
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        with ModelRoot(module).loading():
            pass
        if interrupt.left >= 0:
            break
        steps += 1
    assert steps > 10


@pytest.mark.parametrize("transport", ["host", "nixl", "tcp", "disk"])
def test_a_load_that_is_interrupted_anywhere_leaves_nothing_and_may_be_repeated(checkpoint, registry, transport):
    arguments = (checkpoint, registry, transport if transport != "disk" else "host", 1, 20)
    with PeerProcess.serve(checkpoint, registry, "--revision", "r", environment={"MX_TRANSPORTS": "host,nixl,tcp"}):
        strategies = "disk" if transport == "disk" else "rdma"
        with forking("interrupted", *arguments, environment={"MX_STRATEGIES": strategies}) as process:
            found = json.loads(process.stdout.readline())
        with closing(DirectoryRegistry(registry.removeprefix("file://"), signing_key=None)) as opened:
            assert [each.readers for each in opened.find(None)] == [0]
        assert not [each for each in listed(registry) if each.endswith(".lease")]  # whoever looks removes dead ones

    assert found["said"].pop("right") == 20
    assert found["said"].pop("interrupted") > 0
    assert set(found["said"]) <= {"loaded"}
    assert found["after"]["task"] <= found["before"]["task"]
    # An interrupt between a system call and the name for its result loses a descriptor: Python has no way around.
    assert found["after"]["fd"] <= found["before"]["fd"] + 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_while_it_loads_leaves_nothing_and_harms_no_source(
    checkpoint, registry, expected, number
):
    shared = set(os.listdir("/dev/shm"))
    with PeerProcess.serve(checkpoint, registry, "--revision", "r"):
        with forking("stalled", checkpoint, registry, "nixl") as process:
            assert process.stdout.readline() == "reading\n"
            assert [each for each in listed(registry) if each.endswith(".lease")]
            process.send_signal(number)
            assert process.wait(WAIT_S) == -number
        report = modelexpress.load(Rows, checkpoint, **options(registry, strategies="rdma"))

        assert digest_of(report.model) == expected
        assert not [each for each in listed(registry) if each.endswith(".lease")]
    assert set(os.listdir("/dev/shm")) <= shared
    assert listed(registry) == []
