"""NixlTransport between real processes, which are killed, stopped and starved. All traffic stays on this host."""

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing

import numpy as np
import psutil
import pytest

from modelexpress import lanes
from modelexpress.errors import NotAvailable, RecoveryFailed, TransferFailed
from modelexpress.manifest import PIECE_NBYTES, Manifest, StorageSpec
from modelexpress.plan import plan_transfer
from tests.support.nixl_peer import ROOT, Peer, manifest_over, pattern

nixl = pytest.importorskip("nixl")
from modelexpress import nixl_transport  # noqa: E402 - after importorskip
from modelexpress.nixl_transport import ERROR_MEANINGS, NixlTransport  # noqa: E402 - after importorskip

pytestmark = pytest.mark.nixl

TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
WIRES = {"default": {"UCX_NET_DEVICES": "lo"}, "tcp": TCP}
CHUNKS = [PIECE_NBYTES] * 4


@pytest.fixture
def transport():
    with closing(NixlTransport(lanes=1, connect_timeout_s=5)) as made:
        yield made


@pytest.fixture(params=WIRES)
def wire(request, monkeypatch):
    """The environment of one way between processes, also set for this process: UCX reads it for each agent."""
    for name, value in WIRES[request.param].items():
        monkeypatch.setenv(name, value)
    return WIRES[request.param]


@pytest.fixture
def tcp(monkeypatch):
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    return TCP


@pytest.fixture(scope="module")
def peer():
    """One that is only read."""
    with Peer(CHUNKS, env=WIRES["default"]) as made:
        yield made


def target_for(peer):
    return [np.zeros(each.nbytes, dtype=np.uint8) for each in peer.manifest.storages]


def plan_into(peer, target):
    return plan_transfer(peer.manifest, manifest_over(target))


def holds(target, seed=1):
    return all(np.array_equal(each, pattern(seed, at, each.nbytes)) for at, each in enumerate(target))


def soon(seconds=20.0):
    return time.monotonic() + seconds


def load(transport, peer, **options):
    target = target_for(peer)
    with closing(transport.connect(peer.endpoint, deadline=soon())) as connection:
        connection.read(plan_into(peer, target), deadline=soon(60), **options)
    return target


# Bytes that arrive


def test_reads_another_process(transport, wire):
    with Peer(CHUNKS, env=wire) as peer:
        assert holds(load(transport, peer))


def test_a_source_that_nobody_reads_takes_no_processor(transport, wire):
    """NIXL's own progress thread takes all of one. Before the first reader and after it."""
    with Peer([PIECE_NBYTES], env=wire) as peer:
        process = psutil.Process(peer.process.pid)

        def takes():
            before = sum(process.cpu_times()[:2])
            time.sleep(1.0)
            return sum(process.cpu_times()[:2]) - before

        assert takes() < 0.5
        assert holds(load(transport, peer))
        assert takes() < 0.5


def test_lanes_share_the_work(peer, monkeypatch):
    monkeypatch.setattr(nixl_transport, "_LANE_NBYTES", PIECE_NBYTES)
    movers, all_there = set(), threading.Barrier(3)

    def arrived(chunk):
        if threading.get_ident() not in movers:  # the fourth chunk is anybody's
            movers.add(threading.get_ident())
            all_there.wait(20)

    with closing(NixlTransport(lanes=3, connect_timeout_s=5)) as transport:
        target = load(transport, peer, arrived=arrived)

    assert holds(target)
    assert len(movers) == 3


def test_20000_small_tensors(transport):
    with Peer([256] * 20_000, env=WIRES["default"]) as peer:
        target = target_for(peer)
        plan = plan_into(peer, target)
        used = time.process_time()
        with closing(transport.connect(peer.endpoint, deadline=soon())) as connection:
            connection.read(plan, deadline=soon())
        used = time.process_time() - used

    assert holds(target)
    assert used < 5  # 0.9 s: the blob 0.4, the READ 0.1, descriptors the rest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_tensor_of_3_gib(transport):
    with Peer([3 << 30], env=WIRES["default"]) as peer:
        target = load(transport, peer)

    assert np.array_equal(target[0][-8:], pattern(1, 0, 3 << 30)[-8:])
    assert holds(target)


def test_memory_beyond_the_target_is_small(transport, peer):
    load(transport, peer)
    target = target_for(peer)
    for each in target:
        each[:] = 1  # touched
    process = psutil.Process()
    before, most = process.memory_info().rss, []

    with closing(transport.connect(peer.endpoint, deadline=soon())) as connection:
        connection.read(
            plan_into(peer, target), deadline=soon(), arrived=lambda chunk: most.append(process.memory_info().rss)
        )

    assert holds(target)
    assert max(most) - before < 2 * PIECE_NBYTES


# Sources that go away


def test_a_killed_source_is_not_available_and_the_next_one_is_read(transport, wire):
    with Peer(CHUNKS, env=wire) as first:
        assert holds(load(transport, first))
        first.kill()
        with pytest.raises(NotAvailable, match=r"cannot reach the source|does not answer"):
            transport.connect(first.endpoint, deadline=soon())

    with Peer(CHUNKS, seed=2, env=wire) as second:
        assert holds(load(transport, second), seed=2)


def test_a_source_killed_between_connecting_and_reading(transport, wire):
    with Peer(CHUNKS, env=wire) as peer, closing(transport.connect(peer.endpoint, deadline=soon())) as connection:
        peer.kill()
        with pytest.raises(TransferFailed, match=r"after 0 of 4 chunks \(0.00 of 0.07 GB\)"):
            connection.read(plan_into(peer, target_for(peer)), deadline=soon())


def test_a_source_killed_while_it_is_read(wire, monkeypatch):
    monkeypatch.setattr(nixl_transport, "_LANE_NBYTES", PIECE_NBYTES)
    started = None

    def kill(chunk):
        nonlocal started
        started = started or time.monotonic()
        peer.signal(signal.SIGKILL)

    with Peer([PIECE_NBYTES] * 16, env=wire) as peer, closing(NixlTransport(lanes=2, connect_timeout_s=5)) as transport:
        target = target_for(peer)
        connection = transport.connect(peer.endpoint, deadline=soon())
        # In a READ, or in the one that proves the source again after it.
        said = r"went away.*after \d+ of 16 chunks|cannot be trusted after \d+ of 16 chunks.*: the source went away"
        with pytest.raises(TransferFailed, match=said):
            connection.read(plan_into(peer, target), deadline=soon(), arrived=kill)
        assert time.monotonic() - started < 5

        assert_nothing_arrives(target)


def test_closing_the_registration_spares_the_source(tcp, monkeypatch):
    """Over TCP, memory freed under a living agent kills the source. Here one of two lanes is in a READ."""
    monkeypatch.setattr(nixl_transport, "_LANE_NBYTES", PIECE_NBYTES)
    freed = []
    with Peer([PIECE_NBYTES] * 16, env=tcp) as peer, closing(NixlTransport(lanes=2, connect_timeout_s=5)) as transport:

        def free(chunk):
            if not freed:
                freed.append((peer.tell("close"), peer.tell("free")))

        with pytest.raises(TransferFailed):
            load(transport, peer, arrived=free)

        assert peer.tell("still here") == "still here"


def test_a_registration_closed_during_the_last_chunk_fails_the_read(transport):
    """On CMA the bytes still arrive, and may have been changed on the way."""
    arrivals = []

    def close_at_the_last(chunk):
        arrivals.append(chunk)
        if len(arrivals) == len(CHUNKS):
            peer.tell("close")

    with Peer(CHUNKS, env=WIRES["default"]) as peer, pytest.raises(TransferFailed, match="after 4 of 4 chunks"):
        load(transport, peer, arrived=close_at_the_last)


# Sources that stop


def test_a_stopped_source_is_not_available(tcp):
    with Peer(CHUNKS, env=tcp) as peer, closing(NixlTransport(lanes=1, connect_timeout_s=0.5)) as transport:
        peer.signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(NotAvailable, match="does not answer"):
            transport.connect(peer.endpoint, deadline=soon())
        assert time.monotonic() - started < 4

        peer.signal(signal.SIGCONT)
        assert holds(load(transport, peer))


@pytest.mark.parametrize("progress_thread", [False, True], ids=["", "moved-by-others"])
def test_nothing_arrives_from_a_stopped_source_that_goes_on_after_the_deadline(
    transport, tcp, monkeypatch, progress_thread
):
    """The late write. A progress thread moves bytes without being asked, as a network card would: only the end
    of the agent stops it. When `_Agent.destroy` just tidies up, 11-16 MiB arrive here."""
    if progress_thread:
        real = nixl_transport._Agent.__init__
        monkeypatch.setattr(nixl_transport._Agent, "__init__", lambda self, **_: real(self, progress_thread=True))
    with Peer([PIECE_NBYTES] * 16, env=tcp) as peer:
        target = target_for(peer)
        connection = transport.connect(peer.endpoint, deadline=soon())
        deadline = soon(0.8)
        with pytest.raises(TransferFailed, match=r"deadline passed after \d+ of 16 chunks"):
            connection.read(plan_into(peer, target), deadline=deadline, arrived=stop_soon(peer))
        assert time.monotonic() < deadline + 5
        before = [each.copy() for each in target]
        assert not holds(target)

        peer.signal(signal.SIGCONT)
        time.sleep(1.5)

        assert all(np.array_equal(old, new) for old, new in zip(before, target, strict=True))


def test_a_lane_that_never_comes_back_makes_the_memory_unusable(transport, peer, monkeypatch):
    woken = threading.Event()
    monkeypatch.setattr(lanes, "GRACE_S", 0.5)
    connection = transport.connect(peer.endpoint, deadline=soon())
    monkeypatch.setattr(nixl_transport._Agent, "read", lambda *_: woken.wait(60))
    deadline = soon(0.2)

    with pytest.raises(RecoveryFailed, match=r"1 of 1 lanes did not come back.*must not be used again"):
        connection.read(plan_into(peer, target_for(peer)), deadline=deadline)

    assert time.monotonic() < deadline + 5
    woken.set()


def test_an_agent_that_somebody_holds_is_not_called_destroyed(transport, peer):
    connection = transport.connect(peer.endpoint, deadline=soon())
    held = connection._lanes[0]._agent.nixl.agent

    with pytest.raises(RecoveryFailed, match="still referenced"):
        connection.close()
    del held


def stop_soon(peer):
    """Stop a process a moment after the first chunk, while the next is on its way."""

    def arrived(chunk):
        if not timers:
            timers.append(threading.Timer(0.005, peer.signal, [signal.SIGSTOP]))
            timers[0].start()
        time.sleep(0.002)

    timers = []
    return arrived


def assert_nothing_arrives(target):
    before = [each.copy() for each in target]
    time.sleep(0.5)
    assert all(np.array_equal(old, new) for old, new in zip(before, target, strict=True))


# What comes from outside


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("at", [0, 7, 9, 13, 30, 60, 200, -20, -1])
def test_one_wrong_bit_in_the_endpoint_never_reaches_nixl(transport, peer, monkeypatch, at):
    monkeypatch.setattr(nixl_transport, "_Agent", None)

    with pytest.raises(NotAvailable, match="endpoint"):
        transport.connect(flip(peer.endpoint, at % len(peer.endpoint)), deadline=soon())


def test_a_well_framed_endpoint_with_a_bad_blob(transport, peer):
    endpoint = nixl_transport._decode_endpoint(peer.endpoint)
    cut = nixl_transport._Endpoint(endpoint.blob[:-10], endpoint.proof, endpoint.proof_address)

    with pytest.raises(NotAvailable, match="cannot reach the source"):
        transport.connect(nixl_transport._encode_endpoint(cut), deadline=soon())

    assert holds(load(transport, peer))


def test_another_process_at_the_same_place_is_not_the_source(transport, peer):
    endpoint = nixl_transport._decode_endpoint(peer.endpoint)
    forged = nixl_transport._Endpoint(endpoint.blob, bytes(16), endpoint.proof_address)

    with pytest.raises(NotAvailable, match="another process"):
        transport.connect(nixl_transport._encode_endpoint(forged), deadline=soon())


@pytest.mark.parametrize("wrong", [{"address": 4096}, {"device": "cuda:0"}, {"device": "xpu:0"}])
def test_a_manifest_that_names_memory_the_source_never_registered(transport, peer, wrong):
    first = peer.manifest.storages[0]
    fields = {"nbytes": first.nbytes, "address": first.address, "device": first.device} | wrong
    lying = Manifest((StorageSpec(**fields), *peer.manifest.storages[1:]), peer.manifest.tensors)
    target = target_for(peer)

    with closing(transport.connect(peer.endpoint, deadline=soon())) as connection:
        with pytest.raises(TransferFailed, match="after 0 of 4 chunks"):
            connection.read(plan_transfer(lying, manifest_over(target)), deadline=soon())
        assert not any(each.any() for each in target)

        connection.read(plan_into(peer, target), deadline=soon())
    assert holds(target)


def test_an_endpoint_is_a_capability_to_read_and_to_write(wire):
    """docs/security.md says so. If this fails, NIXL has learned to tell the two apart: say that there."""
    with Peer([PIECE_NBYTES], env=wire) as source, closing(NixlTransport(lanes=1, connect_timeout_s=5)) as transport:
        connection = transport.connect(source.endpoint, deadline=soon())
        agent, there = connection._lanes[0]._agent, [(source.manifest.storages[0].address, 64, 0)]
        ours = np.full(64, 0xEE, dtype=np.uint8)
        agent.register([(ours.ctypes.data, ours.nbytes, "cpu")])
        descriptors = [np.array(rows, dtype=np.uint64) for rows in ([(ours.ctypes.data, 64, 0)], there)]
        here, remote = (agent.nixl.get_xfer_descs(each, "DRAM") for each in descriptors)
        agent._handles.append(agent.nixl.initialize_xfer("WRITE", here, remote, agent._remote))
        state, give_up = agent.nixl.transfer(agent._handles[-1]), soon()
        while state == "PROC" and time.monotonic() < give_up:
            state = agent.nixl.check_xfer_state(agent._handles[-1])
        del here, remote
        target = target_for(source)
        with closing(connection):
            connection.read(plan_into(source, target), deadline=soon())

    assert state == "DONE"
    assert target[0][:64].tolist() == [0xEE] * 64
    assert np.array_equal(target[0][64:], pattern(1, 0, PIECE_NBYTES)[64:])


def test_memory_of_an_unknown_device_is_not_registered(transport):
    with pytest.raises(NotAvailable, match="'xpu:0'"):
        transport.register(Manifest((StorageSpec(8, 4096, "xpu:0"),), ()))


def test_every_nixl_error_is_known():
    """A NIXL that brings a new error fails here, and not in a load."""
    errors = {each for each in vars(nixl._bindings).values() if isinstance(each, type) and issubclass(each, Exception)}

    assert errors == set(ERROR_MEANINGS)


def test_ranges_merge_where_they_touch_and_never_across_a_gap():
    places = [(30, 5, "cpu"), (0, 10, "cpu"), (10, 5, "cpu"), (12, 2, "cpu"), (16, 4, "cpu"), (20, 1, "cuda:0")]

    assert nixl_transport._merged(places) == [(0, 15, "cpu"), (16, 4, "cpu"), (30, 5, "cpu"), (20, 1, "cuda:0")]


# What stays behind


def test_nothing_is_left_after_close(peer, monkeypatch):
    monkeypatch.setattr(nixl_transport, "_LANE_NBYTES", PIECE_NBYTES)

    def rounds(count):
        for _ in range(count):
            with closing(NixlTransport(lanes=2, connect_timeout_s=5)) as transport:
                transport.register(manifest_over([np.ones(100, dtype=np.uint8)]))
                load(transport, peer)
                with pytest.raises(KeyError):
                    load(transport, peer, arrived=raise_key_error)
        gc.collect()
        return held()

    rounds(1)  # UCX keeps some things for good

    assert rounds(3) == rounds(3)


def raise_key_error(chunk):
    raise KeyError(chunk.nbytes)


def held():
    deadline = soon(2)
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# Environments


PROGRAM = """
    import time
    import numpy as np
    from modelexpress.errors import NotAvailable
    from modelexpress.nixl_transport import NixlTransport
    from modelexpress.plan import plan_transfer
    from tests.support.nixl_peer import manifest_over, pattern

    source, target = pattern(1, 0, 1 << 20), np.zeros(1 << 20, dtype=np.uint8)
    transport = NixlTransport(lanes=2, connect_timeout_s=3)
    registration = transport.register(manifest_over([source]))
    plan = plan_transfer(manifest_over([source]), manifest_over([target]))
    transport.connect(registration.endpoint, deadline=time.monotonic() + 5).read(plan, deadline=time.monotonic() + 5)
    registration.close()
    try:
        transport.connect(registration.endpoint, deadline=time.monotonic() + 5)
    except NotAvailable:
        transport.close()
        raise SystemExit(0 if np.array_equal(source, target) else "wrong bytes")
    raise SystemExit("a closed registration was reached")
"""


def run(program, env):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))} | env,
    )


@pytest.mark.parametrize("env", WIRES.values(), ids=WIRES)
def test_works_and_keeps_off_standard_output(env):
    done = run(PROGRAM, env)

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert not re.search("INFO|WARN", done.stderr), done.stderr


REGISTER = """
    from modelexpress.errors import NotAvailable
    from modelexpress.manifest import Manifest
    from modelexpress.nixl_transport import NixlTransport

    try:
        NixlTransport(lanes=1, connect_timeout_s=3).register(Manifest((), ())).close()
    except NotAvailable as exc:
        print(exc)
"""


@pytest.mark.parametrize("env", [{"UCX_TLS": "self"}, {"UCX_NET_DEVICES": "none0"}, {"UCX_TLS": "no_such"}], ids=str)
def test_an_environment_that_leaves_no_way_is_not_available(env):
    done = run(REGISTER, env)

    [(name, value)] = env.items()
    assert done.returncode == 0, done.stderr
    assert "NIXL cannot make an agent: UCX failed" in done.stdout
    assert f"{name}={value}" in done.stdout


def test_the_reader_too_survives_such_an_environment(transport, peer, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "self")

    with pytest.raises(NotAvailable, match="UCX_TLS=self"):
        transport.connect(peer.endpoint, deadline=soon())


def test_segment_sizes_that_the_user_sets_stay(monkeypatch):
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "16k")

    assert nixl_transport._ucx_parameters()["engine_config"] == "TCP_RX_SEG_SIZE=64k"


def test_importing_changes_no_environment_and_prints_nothing():
    done = run("import os; a = dict(os.environ); import modelexpress.nixl_transport; assert a == dict(os.environ)", {})

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
