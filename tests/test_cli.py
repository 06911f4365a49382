"""The command line as a user types it: exit codes, what is on stdout, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.peer_process import PeerProcess
from modelexpress.registry.directory import DirectoryRegistry
from tests.support.safetensors_writer import raw, write_file, write_sharded
from tests.support.takeover_process import wanting

COMMANDS = ("load", "serve", "sources", "inspect", "doctor")


def modelexpress(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "modelexpress", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.fixture
def checkpoint(tmp_path):
    return write_file(tmp_path / "model.safetensors", {"w": raw("F32", 8, 4), "b": raw("BF16", 8)})


@pytest.fixture
def registry(tmp_path):
    return f"file://{tmp_path}/registry"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_describes_every_command_and_does_not_import_torch(command):
    program = (
        "import sys; from modelexpress.cli import app; app(%r, standalone_mode=False); print('torch' in sys.modules)"
    )
    arguments = [command, "--help"] if command else ["--help"]

    done = subprocess.run([sys.executable, "-c", program % arguments], capture_output=True, text=True, timeout=60)

    assert done.stdout.endswith("False\n"), done.stderr
    assert all(each in done.stdout for each in (COMMANDS if not command else ()))


def test_load_by_disk_prints_a_table_and_exits_0(checkpoint):
    done = modelexpress("load", checkpoint)

    assert (done.returncode, done.stderr) == (0, "")
    assert "loaded 0.000 GB by disk" in done.stdout


def test_json_is_one_object_on_stdout_and_nothing_else(checkpoint):
    done = modelexpress("load", checkpoint, "--json")

    report = json.loads(done.stdout)
    assert set(report) == {"strategy", "source", "nbytes", "seconds", "gb_per_s", "attempts"}
    assert (report["strategy"], report["nbytes"]) == ("disk", 144)


@pytest.mark.nixl
def test_serve_load_sources_and_sigterm(checkpoint, registry):
    with PeerProcess.serve(checkpoint, registry, "--revision", "r1", "--model-name", "org/m") as peer:
        listed = json.loads(modelexpress("sources", "--registry", registry, "--json").stdout)["sources"]
        done = modelexpress("load", checkpoint, "--registry", registry, "--strategies", "rdma", "--json")
        os.kill(peer.pid, signal.SIGTERM)
        code = peer.wait()
        after = json.loads(modelexpress("sources", "--registry", registry, "--json").stdout)["sources"]

    assert [(each["label"], each["kind"], each["tensors"]) for each in listed] == [("org/m@r1", "checkpoint", 2)]
    assert json.loads(done.stdout)["strategy"] == "rdma"
    assert (code, after) == (0, [])


@pytest.mark.nixl
def test_serve_stopped_while_it_reads_exits_0_and_was_never_found(tmp_path, registry):
    big = tmp_path / "big.safetensors"
    header = b'{"w":{"dtype":"U8","shape":[6000000000],"data_offsets":[0,6000000000]}}'
    with big.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + 6_000_000_000)
    command = [sys.executable, "-m", "modelexpress", "serve", str(big), "--registry", registry]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)

    assert (process.returncode, out) == (0, b"")
    if Path(registry.removeprefix("file://")).exists():
        with closing(DirectoryRegistry(Path(registry.removeprefix("file://")), signing_key=None)) as opened:
            assert opened.find(None) == []


def test_a_failed_load_exits_1_with_the_reasons(tmp_path):
    done = modelexpress("load", tmp_path / "missing", "--json")

    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["strategy"] is None
    assert "missing" in report["attempts"][-1]["error"]


@pytest.mark.nixl
def test_the_ways_to_a_peer_are_chosen_by_options(checkpoint, registry):
    chosen = ("--revision", "r", "--transports", "tcp")
    with PeerProcess.serve(checkpoint, registry, *chosen, "--listen", "127.0.0.1"):
        by_tcp, by_host = (
            modelexpress("load", checkpoint, "--registry", registry, "--strategies", "rdma", "--json", *given)
            for given in (chosen, ("--revision", "r", "--transports", "host"))
        )

    assert json.loads(by_tcp.stdout)["attempts"][-1]["shares"][0][1] == "tcp"
    assert by_host.returncode == 1
    assert "the source is reached by tcp, and we have host" in by_host.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--strategies", "rmda"), "unknown strategy 'rmda'"),
        (("--verify", "maybe"), "on, off or sampled"),
        (("--transfer-timeout-s", "-1"), "positive number of seconds"),
        (("--registry", "http://host"), "no known scheme"),
        (("--transports", "smoke"), "some of host,nixl,tcp"),
        (("--direct-reads", "maybe"), "auto, on or off"),
        (("--strategies", "rdma"), "registry is not set"),
    ],
)
def test_a_wrong_call_exits_2_and_says_what_is_accepted(checkpoint, arguments, reason):
    done = modelexpress("load", checkpoint, *arguments)

    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_come_from_the_environment(checkpoint):
    done = modelexpress("load", checkpoint, MX_TRANSFER_TIMEOUT_S="5m")

    assert done.returncode == 2
    assert "environment variable MX_TRANSFER_TIMEOUT_S is '5m'; give a positive number of seconds" in done.stderr


def test_strict_fails_where_the_chain_would_go_on(checkpoint, registry):
    Path(registry.removeprefix("file://")).mkdir(mode=0o700)

    done = modelexpress("load", checkpoint, "--registry", registry, "--strict")

    assert done.returncode == 1
    assert "no source in the registry" in " ".join(done.stdout.replace("│", " ").split())


def test_inspect_lists_tensors_and_exits_1_with_file_tensor_and_reason(tmp_path, checkpoint):
    good = modelexpress("inspect", checkpoint, "--json", "--digest")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(checkpoint.read_bytes()[:-1])
    bad = modelexpress("inspect", cut)

    assert [each["name"] for each in json.loads(good.stdout)["tensors"]] == ["b", "w"]
    assert json.loads(good.stdout)["digest"].startswith("sha256:")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert "cut.safetensors" in bad.stderr


def test_recorded_checksums_find_a_flipped_bit_in_a_file(tmp_path):
    """A37 on disk: sizes and headers are right, one weight is not."""
    folder = write_sharded(tmp_path / "m", {"model.safetensors": {"w": raw("F32", 8, 4), "b": raw("BF16", 8)}})
    assert modelexpress("inspect", folder, "--record-checksums").returncode == 0
    assert modelexpress("inspect", folder, "--check-checksums").returncode == 0
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    checked = modelexpress("inspect", folder, "--check-checksums")
    loaded = modelexpress("load", folder, "--json")
    unverified = modelexpress("load", folder, "--verify", "off", "--json")

    assert checked.returncode == loaded.returncode == 1
    assert "tensor b" in checked.stderr
    assert "VerificationFailed: tensor b" in json.loads(loaded.stdout)["attempts"][-1]["error"]
    assert unverified.returncode == 0


def test_doctor_exits_1_when_the_registry_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()

    assert modelexpress("doctor", "--registry", f"file://{tmp_path}/file").returncode == 1
    assert modelexpress("doctor", "--gms", tmp_path / "none.sock").returncode == 1


def test_doctor_says_who_has_the_takeover_lock(tmp_path):
    def found(path):
        done = modelexpress("doctor", "--gms", tmp_path / "none.sock", "--takeover-lock", path, "--json")
        findings = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
        return findings["takeover lock"]["state"], findings["takeover lock"]["detail"]

    path = tmp_path / "m.lock"
    assert found(path) == ("works", "nobody has it")
    with wanting("take", path) as owner:
        state, detail = found(path)
        assert (state, f"/{owner.pid} serves m at http://here since " in detail) == ("works", True)
    state, detail = found(path)
    assert (state, f"the last was {os.uname().nodename}/{owner.pid}" in detail) == ("works", True)
    assert found(tmp_path)[0] == "fails"


def test_version():
    assert modelexpress("--version").stdout == "0.1.0\n"


def test_names_from_files_are_text_and_not_markup(tmp_path):
    file = write_file(tmp_path / "[odd].safetensors", {"a[/b]": raw("F32", 1), "esc\x1b[31m": raw("F32", 1)})

    done = modelexpress("inspect", file)

    assert done.returncode == 0, done.stderr
    assert "a[/b]" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("redirection", [">&-", "2>&-"])
def test_a_closed_stream_does_not_fail_the_load(checkpoint, redirection):
    line = f"{sys.executable} -m modelexpress load {checkpoint} {redirection}"

    assert subprocess.run(line, shell=True, capture_output=True, timeout=60).returncode == 0


def test_a_full_disk_behind_stdout_is_an_error_and_no_traceback(checkpoint):
    line = f"{sys.executable} -m modelexpress load {checkpoint} --json > /dev/full"

    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_json_errors_are_json(checkpoint):
    done = modelexpress("load", checkpoint, "--verify", "maybe", "--json")

    assert done.returncode == 2
    assert "on, off or sampled" in json.loads(done.stdout)["error"]


def test_a_checkpoint_larger_than_the_memory_is_an_error_and_no_traceback(tmp_path):
    size = 4 << 40
    header = f'{{"w":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    file = tmp_path / "huge.safetensors"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + size)

    done = modelexpress("load", file)

    assert done.returncode == 1
    assert "no memory for tensor 'w'" in done.stderr


def test_doctor_says_what_works(registry):
    done = modelexpress("doctor", "--registry", registry, "--json", MX_SIGNING_KEY="hush-hush")

    states = {each["what"]: each["state"] for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    assert states["disk"] == "works"
    assert states["rdma: nixl"] == "works"
    assert states["registry"] == "works"
    assert "hush" not in done.stdout + done.stderr
