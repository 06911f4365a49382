"""What docs/security.md says about secrets and other users, tried on whole processes."""

import ast
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

import modelexpress
from modelexpress.errors import LoadFailed, NotAvailable, RegistryError
from modelexpress.gms.client import require_service
from modelexpress.registry.open import open_registry
from tests.gms.service import serving
from tests.support.redis_server import RedisServer, free_port
from tests.support.safetensors_writer import raw, write_file

PACKAGE = Path(modelexpress.__file__).parent
NOBODY = 65534
SECRETS = ("hush-key", "hush-word", "hush%2Fword", "hush/word")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def checkpoint(tmp_path):
    return write_file(tmp_path / "model" / "model.safetensors", {"w": raw("F32", 8, 4)})


def shown_by(*arguments, registry, seconds=60):
    """Everything that a command prints, with its settings in the environment, as a service manager gives them."""
    environment = {**os.environ, "MX_REGISTRY": registry, "MX_SIGNING_KEY": "hush-key", "MX_CONNECT_TIMEOUT_S": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "modelexpress", *map(str, arguments)],
        capture_output=True, text=True, timeout=seconds, env=environment,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def assert_no_secret(shown):
    assert not [secret for secret in SECRETS if secret in shown], shown


COMMANDS = {
    "load": ("load", "CHECKPOINT", "--verbose", "--json"),
    "load, peers alone": ("load", "CHECKPOINT", "--verbose", "--strategies", "rdma", "--revision", "r"),
    "serve": ("serve", "CHECKPOINT", "--verbose"),
    "sources": ("sources",),
    "doctor": ("doctor",),
}


@pytest.mark.redis
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_shows_a_secret_when_its_registry_refuses_it(checkpoint, tmp_path, command):
    """A server that wants another password, and one that is not there."""
    arguments = [checkpoint if each == "CHECKPOINT" else each for each in command]
    with RedisServer(tmp_path, password="another") as server:
        refused = shown_by(*arguments, registry=f"redis://:hush%2Fword@127.0.0.1:{server.port}/0")
    away = shown_by(*arguments, registry=f"rediss://user:hush-word@127.0.0.1:{free_port()}/0")

    for code, shown in (refused, away):
        assert_no_secret(shown)
        assert "127.0.0.1" in shown  # it says which registry
        assert code == (0 if command[0] == "load" and "rdma" not in command else 1)


@pytest.mark.parametrize(
    "registry", ["redis://:hush-word@host:port/0", "redis://:a?hush-word@host/0", "http://user:hush-word@host/"]
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(checkpoint, registry):
    code, shown = shown_by("load", checkpoint, registry=registry)

    assert code == 2
    assert "registry URL" in shown
    assert_no_secret(shown)


def test_nothing_that_a_load_leaves_behind_holds_a_secret(checkpoint, caplog):
    """Every library's log at its most talkative, the exception with its causes, and the report."""
    caplog.set_level(logging.DEBUG)
    registry = f"redis://user:hush-word@127.0.0.1:{free_port()}/0"
    options = {"registry": registry, "signing_key": "hush-key", "connect_timeout_s": 1.0, "revision": "r"}

    report = modelexpress.load_checkpoint(checkpoint, **options)
    with pytest.raises(LoadFailed) as caught:
        modelexpress.load_checkpoint(checkpoint, strategies="rdma", **options)

    error, shown = caught.value, [caplog.text, repr(report), report.to_json(), caught.value.report.to_json()]
    while error is not None:
        shown.append(repr(error))
        error = error.__cause__ or error.__context__
    assert_no_secret("\n".join(shown))
    assert "user:***@127.0.0.1" in report.to_json()


def test_a_serving_process_has_no_secret_on_its_command_line(checkpoint, tmp_path):
    """Every user of a machine can read command lines; the environment only its owner and root can."""
    environment = {**os.environ, "MX_SIGNING_KEY": "hush-key", "MX_REGISTRY": f"file://{tmp_path}/registry"}
    command = [sys.executable, "-m", "modelexpress", "serve", str(checkpoint)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("ready")
            lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_below(path, process.pid)]
        finally:
            process.terminate()

    assert any(b"serve" in line for line in lines)
    assert not any(secret.encode() in line for line in lines for secret in SECRETS)


def _is_below(path, ancestor):
    pid = int(path.parent.name)
    try:
        while pid > 1 and pid != ancestor:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it ended meanwhile
        return False
    return pid == ancestor


def _imported(node):
    """The first parts of what an import statement names."""
    names = [*(each.name for each in node.names), getattr(node, "module", None) or ""]
    return {name.split(".")[0] for name in names}


STARTING = {"subprocess", "multiprocessing", "pty", "popen", "system", "posix_spawn", "posix_spawnp", "execv", "execve",
            "execvp", "spawnv", "spawnl", "execl"}  # fmt: skip


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_snapshots_start_other_programs(path):
    """CRIU, and what lists GPUs, with paths and numbers; so no secret comes on a command line through us."""
    if path.name in ("criu.py", "devices.py"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = _imported(node)
        else:
            names = {node.attr} if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "os" else set()
        assert not names & STARTING


@pytest.mark.parametrize("name", ["criu.py", "devices.py"])
def test_who_starts_other_programs_knows_no_setting(name):
    imported = {part for node in ast.walk(ast.parse((PACKAGE / name).read_text()))
                if isinstance(node, ast.ImportFrom) for part in (node.module or "").split(".")}  # fmt: skip

    assert "subprocess" in (PACKAGE / name).read_text()
    assert not imported & {"config", "registry", "source", "api"}


PICKLES = {"pickle", "cPickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_reads_pickles_or_runs_text(path):
    """Nothing that comes from a file, a registry, a peer or a service is code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not _imported(node) & PICKLES
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            assert called not in ("eval", "exec", "compile", "__import__")
            assert not (isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "torch.load")


# Other users of this host


@pytest.fixture
def open_folder():
    """A folder that every user can enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@as_root
def test_a_registry_of_another_user_is_not_used_without_a_key(tmp_path):
    folder = tmp_path / "registry"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)

    with pytest.raises(RegistryError, match=f"belongs to user {NOBODY}"):
        open_registry(f"file://{folder}", signing_key=None, timeout_s=1, lease_ttl_s=5)
    with closing(open_registry(f"file://{folder}", signing_key=b"key", timeout_s=1, lease_ttl_s=5)) as registry:
        assert registry.find(None) == []


@as_root
def test_another_user_reads_neither_registry_nor_service(open_folder):
    folder = open_folder / "registry"
    (open_folder / "run").mkdir(mode=0o700)
    with (
        closing(open_registry(f"file://{folder}", signing_key=None, timeout_s=1, lease_ttl_s=5)),
        serving(open_folder / "run" / "gms.sock") as socket,
    ):
        assert as_nobody(lambda: os.listdir(folder)) == "PermissionError"
        assert as_nobody(lambda: require_service(socket)) == "NotAvailable"


@as_root
def test_a_service_of_another_user_is_not_believed(open_folder):
    """Weights come from a process of our own or of root; another user could give anything."""
    folder = open_folder / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    path = folder / "gms.sock"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        import socket

        os.setresuid(NOBODY, NOBODY, NOBODY)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        os.write(writing, b"x")
        listener.accept()
        os._exit(0)
    os.read(reading, 1)
    try:
        with pytest.raises(NotAvailable, match=f"runs as user {NOBODY}; weights are taken from our own or root"):
            require_service(str(path))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def as_nobody(call):
    """The name of what `call` raises in a child that runs as nobody; "done" when it raises nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "done"
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            call()
        except Exception as exc:
            said = type(exc).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as told:
        return told.read()
