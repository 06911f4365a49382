"""Real threads, sockets, files and mappings of ours in other processes are found, and nothing else is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from modelexpress.errors import SnapshotError
from modelexpress.leftovers import Ends, ends_of, leftovers
from modelexpress.processes import listener_on, plain_address, tree_of
from tests.support.engine_process import engine, far_ends


@pytest.fixture
def places(tmp_path):
    """A memory service's socket, a registry's folder and its address, all real and none of them ours."""
    with far_ends(tmp_path) as found:
        yield found


def told(places):
    return places["connection"] | places["session"] | places["file"]


def known(places):
    host, port = places["connection"]["address"]
    return Ends(places["session"]["gms"], places["file"]["folder"], frozenset({(host, port)}))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("thread", "thread mx-renew"),
        ("mapping", "mapping /memfd:modelexpress (deleted): 12,288 bytes in 1 mappings"),
        ("session", "to the memory service at"),
        ("file", "one.record"),
        ("connection", "to the registry at 127.0.0.1:"),
    ],
)
def test_each_thing_is_found_and_named(kind, what, places):
    with engine(holds=[kind], **told(places)) as process:
        found = leftovers([process.pid], known(places))

    assert found
    assert all(each.pid == process.pid and "engine_process" in each.process for each in found)
    assert any(what in str(each) for each in found)


def test_connections_to_others_are_not_ours(places):
    with engine(holds=["session", "file", "connection"], **told(places)) as process:
        assert leftovers([process.pid], Ends("/run/other", "/run/registry", frozenset({("127.0.0.1", 1)}))) == ()


def test_nothing_of_ours_and_nobody(places):
    with engine(**told(places)) as process:
        assert leftovers([process.pid], known(places)) == ()
        pid = process.pid
    assert leftovers([pid], known(places)) == ()


def test_the_tree_has_descendants_and_the_listener_is_found():
    with engine() as process:
        port = int(process.url.rpartition(":")[2])
        assert listener_on(port) == process.pid
        assert tree_of(process.pid) == (process.pid,)
        own = tree_of(os.getpid())
    assert own[0] == os.getpid()
    assert process.pid in own


def test_a_port_without_a_listener():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SnapshotError, match=f"listens on port {port}"):
        listener_on(port)


def test_a_process_of_another_network_namespace_is_refused():
    sleep = ["unshare", "--net", sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    with subprocess.Popen(sleep, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            if not process.stdout.readline():
                pytest.skip("this user may not make a network namespace")
            with pytest.raises(SnapshotError, match="another network namespace"):
                leftovers([process.pid], Ends())
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, Ends()),
        ({"gms": "run/gms", "registry": None}, Ends(gms="/srv/run/gms")),
        ({"gms": "/run/../gms"}, Ends(gms="/gms")),
        ({"registry": "file:///no/such%20folder"}, Ends(registry_folder="/no/such folder")),
        ({"registry": "redis://:s@127.0.0.1/0"}, Ends(registry_addresses=frozenset({("127.0.0.1", 6379)}))),
        ({"registry": "rediss://[::1]:7000"}, Ends(registry_addresses=frozenset({("::1", 7000)}))),
    ],
)
def test_where_connections_of_ours_lead(settings, found):
    assert ends_of(settings, "/srv") == found


def test_a_registry_without_an_address_is_an_error():
    with pytest.raises(SnapshotError, match=r"no\.such\.invalid has no address"):
        ends_of({"registry": "redis://no.such.invalid:1"}, "/")


def test_addresses_are_written_in_one_way():
    assert plain_address("::ffff:10.0.0.7") == "10.0.0.7"
    assert plain_address("fe80::1%eth0") == "fe80::1"


@pytest.mark.nixl
def test_a_nixl_agent_is_found_until_it_is_closed():
    pytest.importorskip("nixl")
    script = (
        "import sys, numpy\n"
        "from modelexpress import nixl_transport as ours\n"
        "agent = ours._Agent(progress_thread=True)\n"
        "memory = numpy.zeros(1 << 20, dtype=numpy.uint8)\n"
        "agent.register([ours._place(memory)])\n"
        "print('open', flush=True); sys.stdin.readline()\n"
        "agent.destroy()\n"
        "print('closed', flush=True); sys.stdin.readline()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        try:
            assert process.stdout.readline() == "open\n"
            assert "async of a NIXL agent" in {each.what for each in leftovers([process.pid], Ends())}
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "closed\n"
            assert leftovers([process.pid], Ends()) == ()
        finally:
            process.kill()
