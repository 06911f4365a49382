"""CRIU's commands and errors; and, where CRIU works, a process that imports weights, captured and restored."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from modelexpress import criu
from modelexpress.criu import ImageStorage, dump_command, restore_command
from modelexpress.errors import SnapshotError
from modelexpress.leftovers import Ends, leftovers
from tests.support.gms_process import committed, running
from tests.support.import_process import wait_for

OLD = "criu old\n  --images-dir DIR\n"
NEW = "criu new\n  --image-io-mode MODE\n  --stream   dump/restore using criu-image-streamer\n"
NOT_HERE = criu.why_not()


def program(folder, help_text, tail="exit 0"):
    """Something that answers `--help`, writes down its arguments, and ends as it is told."""
    path = folder / f"criu-{len(list(folder.iterdir()))}"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --help ] && cat <<END && exit 0\n{help_text}END\necho "$@" > {path}.asked\n{tail}\n'
    )
    path.chmod(0o700)
    return str(path)


def test_the_commands(tmp_path):
    images = ImageStorage(tmp_path)
    path = program(tmp_path, OLD)

    assert dump_command(42, images, ["--leave-running"], program=path) == [
        *(path, "dump", "--images-dir", str(tmp_path), "--tcp-established", "--tree", "42", "--leave-running")
    ]
    assert restore_command(images, program=path) == [
        *(path, "restore", "--images-dir", str(tmp_path), "--tcp-established", "--restore-detached")
    ]


def test_options_of_storage_go_through_where_criu_has_them(tmp_path):
    images = ImageStorage(tmp_path, direct_io=True, stream=True)

    command = dump_command(42, images, program=program(tmp_path, NEW))

    assert command[5:8] == ["--image-io-mode", "direct", "--stream"]
    with pytest.raises(SnapshotError, match="does not know --image-io-mode; leave the option out"):
        dump_command(42, images, program=program(tmp_path, OLD))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(SnapshotError, match="criu-none is not installed"):
        dump_command(42, ImageStorage(tmp_path), program="criu-none")
    with pytest.raises(SnapshotError, match=r"folder for the images, .*/images, is not there"):
        restore_command(ImageStorage(tmp_path / "images"), program=program(tmp_path, OLD))


def test_what_criu_says_is_passed_on(tmp_path):
    path = program(tmp_path, OLD, "echo working; echo 'Error (criu/x.c:1): no such task' >&2; exit 3")

    with pytest.raises(SnapshotError, match=r"criu dump ended with 3: Error \(criu/x.c:1\): no such task$"):
        criu.run(dump_command(42, ImageStorage(tmp_path), program=path))
    assert "--tree 42" in Path(f"{path}.asked").read_text()
    criu.run(dump_command(42, ImageStorage(tmp_path), program=program(tmp_path, OLD)))


@pytest.mark.skipif(shutil.which("criu") is None, reason="criu is not installed")
def test_the_real_criu_takes_the_commands(tmp_path):
    """It knows every option that is always given; where it works it fails for want of the process alone."""
    with pytest.raises(SnapshotError, match="criu dump ended with") as caught:
        criu.run(dump_command(2**22 - 1, ImageStorage(tmp_path)))

    assert "unrecognized option" not in str(caught.value)
    assert NOT_HERE is None or NOT_HERE.split("; ")[0] in str(caught.value)


@pytest.mark.parametrize(
    "capture",
    [False, pytest.param(True, marks=pytest.mark.skipif(NOT_HERE is not None, reason=f"criu check: {NOT_HERE}"))],
)
def test_a_process_that_imports_weights_sleeps_and_wakes(capture, tmp_path):
    """Asleep it has nothing of the service; awake again, captured and restored between or not, the same bytes."""
    contents = [os.urandom(1 << 20), os.urandom(4096)]
    awake = f"awake {hashlib.sha256(b''.join(contents)).hexdigest()}"
    socket, state, images = tmp_path / "gms", tmp_path / "state", tmp_path / "images"
    images.mkdir()
    with running("serve", socket, 1 << 30, 5.0), committed(socket, contents), _importer(socket, state) as process:
        wait_for(state, awake)
        kinds = {each.kind for each in leftovers([process.pid], Ends(gms=str(socket)))}
        os.kill(process.pid, signal.SIGUSR1)
        wait_for(state, "asleep")

        assert kinds == {"mapping", "socket"}
        assert leftovers([process.pid], Ends(gms=str(socket))) == ()
        state.unlink()
        if capture:
            criu.run(dump_command(process.pid, ImageStorage(images)))
            process.wait(20)
            criu.run(restore_command(ImageStorage(images)))

        os.kill(process.pid, signal.SIGUSR2)
        wait_for(state, awake)


@contextmanager
def _importer(socket, state):
    """The process, whoever is its parent by the end; killed then."""
    argv = [sys.executable, "-m", "tests.support.import_process", str(socket), "k", str(state)]
    with open(state.with_name("log"), "wb") as log:
        none = subprocess.DEVNULL
        process = subprocess.Popen(argv, stdin=none, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
