"""What a service holds survives it as files: whole or not at all, and never a byte that was not there."""

import ctypes
import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from modelexpress.errors import ConfigError, GmsError, NotAvailable
from modelexpress.gms import archive, client
from modelexpress.gms.archive import restore, save
from modelexpress.gms.client import Imported, Staging, Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.model_root import ModelRoot
from modelexpress.strategies.base import LoadTarget
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.gms import GmsImport
from tests.gms.service import adapter_of, publish
from tests.support.gms_process import running
from tests.support.tensors import TinyModel, randomize, snapshot

MIB = 1024 * 1024
SEGMENTS = (os.urandom(16 * MIB + 5), os.urandom(1), os.urandom(4096))
OTHER = (os.urandom(70_000),)


@pytest.fixture
def backend():
    before = len(os.listdir("/proc/self/fd"))
    yield HostMemory()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [each for each in threading.enumerate() if each.name.startswith("mx-archive")]


@contextmanager
def service(folder, name="gms.sock", quota_nbytes=0):
    """A service in a process of its own, killed at the end."""
    with running("serve", folder / name, quota_nbytes, 30) as process:
        process.path = str(folder / name)
        yield process


def commit(path, segments, key="k", namespace="default", *, label="a model", body=b"body"):
    with open_session(Where(path, key, namespace), "RW", HostMemory(), wait_s=5) as staging:
        for segment in segments:
            source = ctypes.create_string_buffer(segment, len(segment))
            staging.add(len(segment), [(ctypes.addressof(source), 0, len(segment))])
        staging.commit(label, body).close()


def content(path, key="k", namespace="default"):
    """The body and the bytes of each segment that a new reader gets."""
    with closing(open_session(Where(path, key, namespace), "RO", HostMemory(), wait_s=0)) as imported:
        assert isinstance(imported, Imported)
        taken = imported.take_segments()
        return imported.body, [ctypes.string_at(each.mapping.address, each.mapping.nbytes) for each in taken]


def keys(path):
    return {(each.namespace, each.key, each.label, each.phase) for each in client.status(path).keys}


def sessions_end(path):
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        if client.status(path).sessions == 1:  # the one that asks
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """An archive of two keys, with the service that it came from killed."""
    folder = tmp_path_factory.mktemp("archive")
    with service(folder) as old:
        commit(old.path, SEGMENTS)
        commit(old.path, OTHER, "other", "drafts", label="", body=b"")
        (folder / "in").mkdir()
        save(old.path, folder / "in" / "saved", backend=HostMemory(), threads=3)
    assert os.listdir(folder / "in") == ["saved"]
    return folder / "in" / "saved"


@pytest.fixture
def saved(saved_once, tmp_path):
    """A copy for one test to break."""
    return Path(shutil.copytree(saved_once, tmp_path / "saved"))


@pytest.fixture(scope="module")
def other_service(tmp_path_factory):
    with service(tmp_path_factory.mktemp("service")) as new:
        yield new.path


@pytest.fixture
def fresh(other_service):
    """A service that holds nothing."""
    for each in client.status(other_service).keys:
        client.drop(Where(other_service, each.key, each.namespace))
    assert sessions_end(other_service)
    assert client.status(other_service).keys == ()
    return other_service


def refused(path, folder, backend, message):
    """Restoring says this, commits nothing, and gives all memory and sessions back."""
    with pytest.raises(GmsError, match=message) as caught:
        restore(path, folder, backend=backend, threads=2)
    assert sessions_end(path)
    assert client.status(path).keys == ()
    assert client.status(path).used_nbytes == 0
    return str(caught.value)


def file_of(folder, nbytes):
    """The file of this size."""
    (found,) = (each for each in folder.glob("*.bin") if each.stat().st_size == nbytes)
    return found


# There and back


def test_every_byte_comes_back_in_another_service(saved, fresh, backend):
    restored = restore(fresh, saved, backend=backend, threads=3)

    assert content(fresh) == (b"body", list(SEGMENTS))
    assert content(fresh, "other", "drafts") == (b"", list(OTHER))
    assert keys(fresh) == {("default", "k", "a model", "committed"), ("drafts", "other", "", "committed")}
    assert [(each.where.key, each.nbytes) for each in restored] == [("k", sum(map(len, SEGMENTS))), ("other", 70_000)]
    assert {(each.where.key, each.generation) for each in restored} == {
        (each.key, each.generation) for each in client.status(fresh).keys
    }
    assert sessions_end(fresh)


def test_an_engine_imports_what_was_restored(tmp_path, backend):
    model = randomize(TinyModel(), 3)
    expected = snapshot(model)
    with service(tmp_path, "old.sock") as old:
        publish(old.path, model)
        save(old.path, tmp_path / "saved", backend=backend, threads=2)
    with service(tmp_path, "new.sock") as new:
        restore(new.path, tmp_path / "saved", backend=backend, threads=2)

        adapter = adapter_of(TinyModel)
        strategy = GmsImport(new.path, backend, claims=False, wait_s=5)
        with closing(strategy):
            report = LoadStrategyChain([strategy]).run(LoadTarget(adapter, ModelRoot(adapter.initialize())))

        assert snapshot(report.model) == expected
        del report, model, strategy


def test_the_archive_is_what_its_page_says(saved):
    """Files of the segments' own bytes, for their owner only; the manifest names each."""
    manifest = json.loads((saved / "manifest.json").read_text())["archive"]
    (first, second) = manifest["generations"]
    named = [file["name"] for each in (first, second) for file in each["files"]]

    assert sorted(os.listdir(saved)) == sorted([*named, "manifest.json"])
    assert [(saved / name).read_bytes() for name in named] == [*SEGMENTS, *OTHER]
    assert re.fullmatch(r"[0-9a-f]{16}-00000\.bin", named[0])
    assert manifest["devices"] == ["cpu"]
    assert saved.stat().st_mode & 0o777 == 0o700


def test_only_some_keys(tmp_path, backend, fresh):
    commit(fresh, SEGMENTS)
    commit(fresh, OTHER, "other")
    folder = save(fresh, tmp_path / "saved", backend=backend, threads=1, keys=["other"])
    with service(tmp_path, "third.sock") as third:
        restore(third.path, folder, backend=backend, threads=1)
        assert keys(third.path) == {("default", "other", "a model", "committed")}


def test_a_segment_larger_than_a_file(tmp_path, backend, fresh, monkeypatch):
    monkeypatch.setattr(archive, "_FILE_NBYTES", 10 * MIB)
    commit(fresh, SEGMENTS)
    folder = save(fresh, tmp_path / "saved", backend=backend, threads=2)
    assert len(list(folder.glob("*.bin"))) == 4

    client.drop(Where(fresh, "k"))
    restore(fresh, folder, backend=backend, threads=2)
    assert content(fresh) == (b"body", list(SEGMENTS))


def test_a_generation_without_segments(tmp_path, backend, fresh):
    commit(fresh, [], body=b"nothing but words")
    folder = save(fresh, tmp_path / "saved", backend=backend, threads=2)
    client.drop(Where(fresh, "k"))
    restore(fresh, folder, backend=backend, threads=2)
    assert content(fresh) == (b"nothing but words", [])


def test_restoring_replaces_what_is_committed(saved, fresh, backend):
    commit(fresh, [b"newer"])
    restore(fresh, saved, backend=backend, threads=1)
    assert content(fresh) == (b"body", list(SEGMENTS))


class BoundMemory(HostMemory):
    """Remembers which threads were bound, and refuses to be filled by another."""

    def __init__(self):
        self.bound = set()

    def bind_thread(self):
        self.bound.add(threading.get_ident())

    def fill(self, fd, parts):
        if threading.get_ident() not in self.bound:
            raise GmsError("this thread has no device")
        super().fill(fd, parts)


def test_each_thread_is_bound_before_it_touches_memory(saved, fresh, tmp_path):
    backend = BoundMemory()
    restore(fresh, saved, backend=backend, threads=3)
    assert threading.get_ident() not in backend.bound
    backend.bound.clear()
    save(fresh, tmp_path / "again", backend=backend, threads=1)
    assert len(backend.bound) == 1


# What is wrong with an archive is found before anything is committed


@pytest.mark.parametrize("at", [0, 16 * MIB - 1, 16 * MIB + 4])
def test_a_flipped_bit_is_found_and_its_file_named(saved, fresh, backend, at):
    file = file_of(saved, len(SEGMENTS[0]))
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)

    said = refused(fresh, saved, backend, "the file is damaged")

    assert str(file) in said
    assert f"at offset {at // (16 * MIB) * 16 * MIB:,}" in said


def test_the_last_generation_is_checked_before_the_first_is_committed(saved, fresh, backend):
    file = file_of(saved, 70_000)
    file.write_bytes(bytes(70_000))
    commit(fresh, [b"older"])

    with pytest.raises(GmsError, match="damaged"):
        restore(fresh, saved, backend=backend, threads=2)

    assert content(fresh) == (b"body", [b"older"])


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(saved, fresh, backend):
    path = saved / "manifest.json"
    data = path.read_bytes()
    for at in range(0, len(data), 23):
        broken = bytearray(data)
        broken[at] ^= 1
        path.write_bytes(broken)
        refused(fresh, saved, backend, "manifest.json")


def test_a_file_that_was_cut(saved, fresh, backend):
    file = file_of(saved, 4096)
    os.truncate(file, 4000)
    refused(fresh, saved, backend, f"{file.name} has 4,000 of 4,096 bytes; nothing was committed")


def test_a_file_that_grew(saved, fresh, backend):
    file = file_of(saved, 4096)
    os.truncate(file, 4097)
    refused(fresh, saved, backend, f"{file.name} has 4,097 of 4,096 bytes")


def test_a_file_that_is_missing_and_one_too_many(saved, fresh, backend):
    missing = file_of(saved, 1)
    missing.unlink()
    (saved / "extra.bin").write_bytes(b"x")
    refused(fresh, saved, backend, f"{missing.name} is missing, extra.bin was not saved there")


def test_a_link_in_place_of_a_file(saved, fresh, backend, tmp_path):
    file = file_of(saved, 4096)
    target = file.rename(tmp_path / "elsewhere")
    file.symlink_to(target)
    refused(fresh, saved, backend, file.name)


def test_a_fifo_in_place_of_a_file(saved, fresh, backend):
    file = file_of(saved, 4096)
    file.unlink()
    os.mkfifo(file)
    refused(fresh, saved, backend, file.name)


def rewritten(folder, change):
    """The manifest as another, well-meaning program would have written it: with a right checksum."""
    path = folder / "manifest.json"
    found = json.loads(path.read_bytes())["archive"]
    change(found)
    text = json.dumps(found).encode()
    path.write_bytes(b'{"xxh3_128": "%s", "archive": %s}' % (archive.xxhash.xxh3_128_hexdigest(text).encode(), text))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cuda:0 GPU-1"], "other devices: 'cuda:0 GPU-1' is 'cpu' here"),
        (["cpu", "cuda:1 GPU-2"], "is of 2 devices, and the service has 1"),
        ([], "is of 0 devices"),
    ],
)
def test_an_archive_of_other_devices(saved, fresh, backend, devices, message):
    rewritten(saved, lambda found: found.update(devices=devices))
    refused(fresh, saved, backend, message)


class NumberedMemory(HostMemory):
    """Host memory that says it is one of several devices, as GPUs are."""

    def __init__(self, device_id):
        self._device_id = device_id

    def device_id(self):
        return self._device_id


def test_ordinals_that_were_swapped_are_named(tmp_path, fresh, backend):
    commit(fresh, OTHER)
    folder = save(fresh, tmp_path / "saved", backend=NumberedMemory("cuda:0 GPU-a"), threads=1)
    with pytest.raises(GmsError, match="'cuda:0 GPU-a' is 'cuda:1 GPU-a' here"):
        restore(fresh, folder, backend=NumberedMemory("cuda:1 GPU-a"), threads=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.update(version=2), "format version 2, and this modelexpress reads 1"),
        (lambda found: found.pop("version"), "format version none"),
        (lambda found: found.update(more=1), "cannot be read"),
        (lambda found: found["generations"].append(found["generations"][0]), "lists a key twice"),
        (lambda found: found["generations"][0]["segments"].reverse(), "do not make up the segments of key 'k'"),
        (lambda found: found["generations"][0]["segments"].append(-1), "do not make up"),
        (lambda found: found["generations"][1]["files"].clear(), "do not make up the segments of key 'other'"),
        (lambda found: found["generations"][1]["files"][0].update(name="../x"), "do not make up"),
        (lambda found: found["generations"][1]["files"][0].update(xxh3_64=""), "do not make up"),
    ],
)
def test_a_manifest_that_makes_no_sense(saved, fresh, backend, change, message):
    rewritten(saved, change)
    refused(fresh, saved, backend, message)


def test_no_folder(tmp_path, fresh, backend):
    refused(fresh, tmp_path / "nothing", backend, "no folder")


def test_no_service(saved, tmp_path, backend):
    with pytest.raises(NotAvailable, match="no memory service is running"):
        restore(tmp_path / "nothing.sock", saved, backend=backend, threads=1)
    with pytest.raises(NotAvailable, match="no memory service is running"):
        save(tmp_path / "nothing.sock", tmp_path / "new", backend=backend, threads=1)


def test_a_key_that_somebody_stages_is_not_waited_for(saved, fresh, backend):
    with open_session(Where(fresh, "other", "drafts"), "RW", backend, wait_s=0) as staging:
        assert isinstance(staging, Staging)
        with pytest.raises(NotAvailable, match="drafts/other is being staged by pid"):
            restore(fresh, saved, backend=backend, threads=1)
    assert sessions_end(fresh)
    assert client.status(fresh).used_nbytes == 0


def test_a_service_with_too_little_memory_commits_nothing(saved, tmp_path, backend):
    with service(tmp_path, quota_nbytes=16 * MIB + 20_000) as small:
        refused(small.path, saved, backend, "of the quota of")


# Saving that fails leaves nothing behind


@pytest.fixture
def full(fresh):
    commit(fresh, SEGMENTS)
    return fresh


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_exists_is_not_overwritten(tmp_path, full, backend, make):
    make(tmp_path / "saved")
    before = os.lstat(tmp_path / "saved")

    with pytest.raises(ConfigError, match="saved exists, and is not overwritten"):
        save(full, tmp_path / "saved", backend=backend, threads=1)

    assert os.lstat(tmp_path / "saved").st_ino == before.st_ino


def test_a_parent_that_is_missing(tmp_path, full, backend):
    with pytest.raises(ConfigError, match="is no folder"):
        save(full, tmp_path / "no" / "saved", backend=backend, threads=1)


def test_nothing_to_save(tmp_path, fresh, backend):
    with pytest.raises(NotAvailable, match="nothing committed; there is nothing to save"):
        save(fresh, tmp_path / "saved", backend=backend, threads=1)
    commit(fresh, OTHER)
    with pytest.raises(NotAvailable, match="nothing committed for a, b"):
        save(fresh, tmp_path / "saved", backend=backend, threads=1, keys=["k", "b", "a"])
    assert not (tmp_path / "saved").exists()


@contextmanager
def files_of_at_most(nbytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [100, 10 * MIB])
def test_a_disk_that_fails_half_way(tmp_path, full, backend, limit):
    target = tmp_path / "target"
    target.mkdir()
    with files_of_at_most(limit), pytest.raises(GmsError, match="saved: cannot be written: File too large"):
        save(full, target / "saved", backend=backend, threads=2)
    assert os.listdir(target) == []


FULL_DISK = """
import os, sys
from modelexpress.errors import GmsError
from modelexpress.gms.archive import save
from modelexpress.gms.memory import HostMemory
try:
    save(sys.argv[1], sys.argv[2] + "/saved", backend=HostMemory(), threads=2)
except GmsError as exc:
    print(exc, os.listdir(sys.argv[2]))
"""


def can_mount():
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="only root can mount a small disk")
def test_a_disk_without_room_is_not_written_to(tmp_path, full):
    mounted = f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mounted, "sh", sys.executable, "-c", FULL_DISK, full, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert re.search(r"an archive of 16,781,3\d\d bytes does not fit in 1,048,576 bytes of free disk \[\]", done.stdout)


def test_a_process_killed_half_way_leaves_no_archive(tmp_path, full, backend):
    """What it leaves is under another name, and is refused; the next save goes on."""
    target = tmp_path / "target"
    target.mkdir()
    # It dies before the second of three files.
    code = (
        "import os, signal, sys\nfrom modelexpress.gms import archive\nfrom modelexpress.gms.memory import HostMemory\n"
        "class Dying(HostMemory):\n"
        "    left = 2\n"
        "    def bind_thread(self):\n"
        "        Dying.left -= 1\n"
        "        if not Dying.left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "archive.save(sys.argv[1], sys.argv[2], backend=Dying(), threads=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, full, str(target / "saved")], timeout=60)
    assert done.returncode == -signal.SIGKILL
    (partial,) = os.listdir(target)
    assert partial.startswith(".saved.")
    client.drop(Where(full, "k"))
    refused(full, target / partial, backend, r"manifest\.json: missing, so this archive was never finished")

    commit(full, SEGMENTS)
    save(full, target / "saved", backend=backend, threads=2)
    assert "saved" in os.listdir(target)


def test_a_folder_that_came_meanwhile_is_kept(tmp_path, full):
    """Somebody saves to the same name, and is faster."""
    mine = tmp_path / "target" / "saved"
    mine.parent.mkdir()

    class Racing(HostMemory):
        def bind_thread(self):
            mine.mkdir(exist_ok=True)
            (mine / "theirs").touch()

    with pytest.raises(GmsError, match="saved: cannot be written: Directory not empty"):
        save(full, mine, backend=Racing(), threads=1)
    assert os.listdir(mine.parent) == ["saved"]
    assert os.listdir(mine) == ["theirs"]


def test_a_service_of_other_memory(tmp_path, full):
    class Gpu(HostMemory):
        device = "cuda:0"

    with pytest.raises(GmsError, match="keeps cpu memory, not cuda:0"):
        save(full, tmp_path / "saved", backend=Gpu(), threads=1)


@pytest.mark.parametrize("threads", [0, -1])
def test_there_is_at_least_one_thread(tmp_path, full, backend, threads):
    with pytest.raises(ConfigError, match="threads"):
        save(full, tmp_path / "saved", backend=backend, threads=threads)
