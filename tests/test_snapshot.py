"""Warm-up, quiesce and resume against a process that answers like a server and holds real things of ours."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request

import msgspec
import pytest

from modelexpress.devices import Device
from modelexpress.engines.sglang import snapshot
from modelexpress.engines.sglang.control import EngineFacts, ServerControl, control_of
from modelexpress.errors import SnapshotError
from tests.support.engine_process import engine, far_ends

FACTS = EngineFacts(
    version="0.5.23",
    is_generation=True,
    skip_server_warmup=False,
    has_tokenizer=True,
    dp_size=1,
    nnodes=1,
    disaggregation_mode="null",
    settings={},
)
READY = snapshot.Ready(
    modelexpress="0.1.0",
    sglang="0.5.23",
    created="2026-01-01T00:00:00+00:00",
    pid=1,
    processes=(1, 2),
    tags=("weights",),
    devices=(Device(0, "GPU-1"),),
    visible=(Device(0, "GPU-1"),),
    warm_up="no warm-up: it was a test",
)
CHANGES = ("/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/continue_generation")


def calls(process, *paths):
    """What was asked of these pages, in order; of all by default."""
    with urllib.request.urlopen(f"{process.url}/calls", timeout=10) as answer:
        found = json.load(answer)
    return [each for each in found if not paths or each[0] in paths]


def changes(process):
    return [path for path, *_ in calls(process, *CHANGES)]


def facts(**changed):
    return dataclasses.replace(FACTS, **changed)


@pytest.mark.parametrize(
    ("mode", "value", "seconds"),
    [
        ("null", None, 600),
        ("prefill", None, 1800),
        ("decode", "", 1800),
        ("null", "-1", 600),
        ("null", "0", 600),
        ("prefill", "0.0", 1800),
        ("null", "nan", 600),
        ("null", "12.5", 12.5),
        ("decode", " 3000 ", 3000),
    ],
)
def test_the_deadline_is_sglang_s(mode, value, seconds):
    environ = {} if value is None else {"SGLANG_WARMUP_TIMEOUT": value}

    assert snapshot.warm_up_timeout_s(mode, environ) == seconds


def test_a_deadline_that_is_no_number_is_refused():
    with pytest.raises(SnapshotError, match="SGLANG_WARMUP_TIMEOUT is 'soon'; give a number"):
        snapshot.warm_up_timeout_s("null", {"SGLANG_WARMUP_TIMEOUT": "soon"})


def test_one_request_of_text():
    (request,) = snapshot.warm_up_requests(FACTS)

    assert request == {"text": "One, two, three,", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}


def test_ids_without_a_tokenizer_and_a_rank_each():
    first, second = snapshot.warm_up_requests(facts(has_tokenizer=False, dp_size=2))

    assert (first["input_ids"], first["routed_dp_rank"]) == ([10, 11, 12], 0)
    assert (second["input_ids"], second["routed_dp_rank"]) == ([10, 11, 12], 1)
    assert "text" not in first
    assert "bootstrap_host" not in first


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_disaggregated_ranks_have_a_room_each_and_no_peer(mode):
    requests = snapshot.warm_up_requests(facts(disaggregation_mode=mode, dp_size=3))

    assert [each["bootstrap_room"] for each in requests] == [0, 1, 2]
    assert {each["bootstrap_host"] for each in requests} == {"2.2.2.2"}
    assert all(each["sampling_params"]["ignore_eos"] for each in requests)
    assert all(each["input_ids"] == [10, 11, 12] for each in requests)


def test_every_rank_is_warmed_up():
    with engine(dp_size=3) as process:
        done = snapshot.warm_up(process.url, environ={})

        assert (done.ranks, done.tokens, done.skipped) == (3, 24, None)
        assert [body["routed_dp_rank"] for _, body, _ in calls(process, "/generate")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("told", "why"),
    [({"skip_server_warmup": True}, "--skip-server-warmup"), ({"is_generation": False}, "not generate")],
)
def test_a_warm_up_that_is_skipped_asks_nothing(told, why):
    with engine(**told) as process:
        done = snapshot.warm_up(process.url, environ={})

        assert why in done.skipped
        assert calls(process, "/generate") == []


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("500", "rank 1 of 2 did not generate: .* answered 500"),
        ("abort", "rank 1 of 2 did not generate: the request was broken off: was told to stop"),
        ("empty", "rank 1 of 2 did not generate: the answer has no token"),
        ("late", "rank 1 of 2 did not generate: .* did not answer within"),
    ],
)
def test_a_failed_warm_up_fails_the_snapshot(word, why, tmp_path):
    with engine(dp_size=2, answers=["ok", word]) as process:
        with pytest.raises(SnapshotError, match=why):
            snapshot.quiesce(process.url, tmp_path / "ready", environ={"SGLANG_WARMUP_TIMEOUT": "2"})

        assert changes(process) == []
    assert list(tmp_path.iterdir()) == []


def test_quiesce_and_resume(tmp_path):
    with far_ends(tmp_path) as where:
        told = where["file"] | where["session"]
        with engine(holds=["thread", "mapping", "session", "file"], **told) as process:
            before = snapshot.left_behind(process.url)

            ready = snapshot.quiesce(process.url, tmp_path / "ready", environ={})

            assert {each.kind for each in before} == {"thread", "mapping", "descriptor", "socket"}
            assert snapshot.left_behind(process.url) == ()
            assert snapshot.read_ready(tmp_path / "ready") == ready
            assert (ready.pid, ready.processes, ready.tags) == (process.pid, (process.pid,), ("kv_cache", "weights"))
            assert (ready.devices, ready.visible, ready.sglang) == ((), (), "0.5.23")
            assert changes(process) == ["/pause_generation", "/release_memory_occupation"]

            assert snapshot.resume(process.url, tmp_path / "ready", environ={}).tokens == 8

            assert changes(process) == list(CHANGES)
            assert calls(process)[-1][1]["input_ids"] == [10, 11, 12]
            assert not (tmp_path / "ready").exists()


@pytest.mark.parametrize("kind", ["thread", "mapping", "session", "file", "connection"])
def test_what_is_left_is_named_and_the_engine_serves_again(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_SETTLE_S", 0.0)
    with far_ends(tmp_path) as where, engine(holds=[kind], keeps=[kind], **where.get(kind, {})) as process:
        with pytest.raises(SnapshotError, match=f"are left after release: .* in process {process.pid} "):
            snapshot.quiesce(process.url, tmp_path / "ready", environ={})

        assert changes(process) == list(CHANGES)
    assert not [each for each in tmp_path.iterdir() if "ready" in each.name]


def test_requests_that_do_not_end_are_waited_for_and_then_refused(tmp_path):
    with engine(busy=[2, 1, 0]) as process:
        snapshot.quiesce(process.url, tmp_path / "ready", environ={})
        assert len(calls(process, "/v1/loads")) == 3
    with engine(busy=[2]) as process:
        with pytest.raises(SnapshotError, match="2 requests still run or wait after 0 s"):
            snapshot.quiesce(process.url, tmp_path / "other", idle_timeout_s=0, environ={})
        assert changes(process) == []


def test_nothing_is_asked_where_the_file_cannot_be(tmp_path):
    (tmp_path / "taken").write_text("{}")
    with engine() as process:
        with pytest.raises(SnapshotError, match="taken is there already; resume that engine, or remove it"):
            snapshot.quiesce(process.url, tmp_path / "taken")
        with pytest.raises(SnapshotError, match=r"folder .*/missing is not there"):
            snapshot.quiesce(process.url, tmp_path / "missing" / "ready")
        with pytest.raises(SnapshotError, match="tags are kv_cache; without weights"):
            snapshot.quiesce(process.url, tmp_path / "ready", tags=["kv_cache"])
        assert calls(process) == []


def test_an_engine_of_several_nodes_is_refused(tmp_path):
    with engine(nnodes=2) as process:
        with pytest.raises(SnapshotError, match="runs on 2 nodes"):
            snapshot.quiesce(process.url, tmp_path / "ready")
        assert changes(process) == []


def test_a_resume_that_failed_is_repeated_without_a_second_release(tmp_path):
    """SGLang ends when it is told to resume what it resumed already."""
    with engine(answers=["ok", "500", "ok"]) as process:
        snapshot.quiesce(process.url, tmp_path / "ready", environ={})
        with pytest.raises(SnapshotError, match="did not generate"):
            snapshot.resume(process.url, tmp_path / "ready", environ={})
        assert snapshot.read_ready(tmp_path / "ready").state == "resumed"

        snapshot.resume(process.url, tmp_path / "ready", environ={})

        assert changes(process).count("/resume_memory_occupation") == 1
        assert not (tmp_path / "ready").exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"devices": (Device(0, "GPU-1"),)}, "the devices are others: recorded 0: GPU-1; found none"),
        ({"visible": (Device(0, "GPU-1"),)}, "devices that the engine sees are others"),
        ({"pid": 1}, "is of process 1, and the engine is process"),
    ],
)
def test_another_machine_or_process_is_refused_untouched(changed, why, tmp_path):
    with engine() as process:
        ready = snapshot.quiesce(process.url, tmp_path / "ready", environ={})
        (tmp_path / "ready").write_bytes(msgspec.json.encode(msgspec.structs.replace(ready, **changed)))
        with pytest.raises(SnapshotError, match=why):
            snapshot.resume(process.url, tmp_path / "ready", environ={})

        assert "/resume_memory_occupation" not in changes(process)
    assert (tmp_path / "ready").exists()


def test_a_permutation_of_what_the_engine_sees_is_found():
    one, two = Device(0, "GPU-1"), Device(1, "GPU-2")
    ready = msgspec.structs.replace(READY, devices=(one, two), visible=(one, two))

    snapshot.require_as_recorded(ready, (one, two), "0,1")
    with pytest.raises(SnapshotError, match="devices that the engine sees are the same in another order"):
        snapshot.require_as_recorded(ready, (one, two), "1,0")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no ready file of this version"),
        ('{"version": 1}', "missing required field"),
        (msgspec.json.encode(msgspec.structs.replace(READY, version=9)).decode(), "has version 9"),
        (msgspec.json.encode(READY).decode().replace("quiesced", "asleep"), "no ready file of this version"),
    ],
)
def test_a_file_that_is_none(text, why, tmp_path):
    (tmp_path / "ready").write_text(text)
    with pytest.raises(SnapshotError, match=why):
        snapshot.read_ready(tmp_path / "ready")
    with pytest.raises(SnapshotError, match="there is no ready file"):
        snapshot.read_ready(tmp_path / "missing")


def test_the_file_is_never_seen_in_part(tmp_path):
    """A reader that looks all the time sees no file, or a whole one; and nothing else is left in the folder."""
    path = tmp_path / "ready"
    ended = threading.Event()
    seen = []

    def look():
        while not ended.is_set():
            if path.exists():
                seen.append(snapshot.read_ready(path))

    watcher = threading.Thread(target=look)
    watcher.start()
    snapshot.write_ready(path, READY)
    for each in range(100):
        snapshot._replace(path, msgspec.structs.replace(READY, pid=each))
    ended.set()
    watcher.join()

    assert seen
    assert os.listdir(tmp_path) == ["ready"]
    with pytest.raises(SnapshotError, match="is there already"):
        snapshot.write_ready(path, READY)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://", "http://127.0.0.1:1/v1"])
def test_what_is_no_url_of_a_server(url):
    with pytest.raises(SnapshotError, match="no URL of a server"):
        control_of(url)


def test_what_is_no_engine():
    with pytest.raises(SnapshotError, match="a float is no engine"):
        control_of(1.5)


def test_errors_of_http_name_the_page():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    with pytest.raises(SnapshotError, match=r"/server_info gave no answer: .*refused; is the server there\?"):
        ServerControl(f"http://127.0.0.1:{closed}").facts()
    with engine() as process:
        control = ServerControl(process.url)
        with pytest.raises(SnapshotError, match=r"/nothing answered 404: .*no such page"):
            control._get("/nothing")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        control = ServerControl(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(SnapshotError, match=r"/generate did not answer within 0\.2 s"):
            control.generate({}, timeout_s=0.2)


def test_the_key_is_sent_and_not_shown(tmp_path):
    with engine() as process:
        snapshot.warm_up(process.url, api_key="secret-1", environ={})

        assert {key for _, _, key in calls(process, "/generate")} == {"Bearer secret-1"}


def command(*words, **environ):
    argv = [sys.executable, "-m", "modelexpress", "snapshot", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, env=os.environ | environ, timeout=60, check=False)


def test_the_commands(tmp_path):
    ready = tmp_path / "ready"
    with engine(holds=["mapping"]) as process:
        url = ("--url", process.url)
        assert "warmed up: 8 tokens on 1" in command("warm-up", *url).stdout
        held = command("check", *url)
        assert (held.returncode, "memfd:modelexpress" in held.stdout) == (1, True)

        done = command("quiesce", *url, "--ready-file", ready, MX_API_KEY="k")
        clean = command("check", *url, "--json")
        again = command("quiesce", *url, "--ready-file", ready)
        nowhere = command("dump", "--ready-file", ready, "--images-dir", tmp_path / "images")
        back = command("resume", *url, "--ready-file", ready)

        assert (done.returncode, f"ready {ready}: process {process.pid}, 1 in all" in done.stdout) == (0, True)
        assert (clean.returncode, json.loads(clean.stdout)) == (0, {"left": []})
        assert (again.returncode, "is there already" in again.stderr) == (1, True)
        assert nowhere.returncode == 1
        assert re.search(r"criu is not installed|folder for the images, .*/images, is not there", nowhere.stderr)
        assert (back.returncode, "serves: warmed up: 8 tokens" in back.stdout) == (0, True)
        assert calls(process, "/pause_generation")[0][2] == "Bearer k"
    ready.write_bytes(msgspec.json.encode(msgspec.structs.replace(READY, state="resumed")))
    awake = command("dump", "--ready-file", ready, "--images-dir", tmp_path)
    assert (awake.returncode, "was resumed since; quiesce it again" in awake.stderr) == (1, True)
    gone = command("warm-up", *url)
    assert (gone.returncode, "gave no answer" in gone.stderr) == (1, True)
