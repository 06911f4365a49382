"""The commands of the memory service: modelexpress gms serve | status | publish | drop | check | save | restore."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelexpress.errors import ConfigError, GmsError, NotAvailable
from modelexpress.terminal import ProgressBar, add_row, console, log_to_stderr, on_stop_signals, print_json, table_of

if TYPE_CHECKING:
    from modelexpress.gms.client import Where
    from modelexpress.gms.memory import MemoryBackend
    from modelexpress.gms.protocol import KeyStatus

app = typer.Typer(
    name="gms",
    help="Keep weights in a process that outlives engines. They are imported without a copy.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)

SocketOpt = Annotated[
    str, typer.Option(envvar="MX_GMS", help="The service's Unix socket, at most 107 bytes.", show_default=False)
]
NamespaceOpt = Annotated[str, typer.Option(help="Generations of one key in different namespaces do not meet.")]
DeviceOpt = Annotated[str, typer.Option(help="What memory the service owns: host, or cuda:N (not run on a GPU yet).")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
KeyArg = Annotated[str, typer.Argument(help="A key, or the first characters of one.", metavar="KEY")]


@app.command()
def serve(
    socket: SocketOpt,
    quota: Annotated[
        int | None, typer.Option(help="Most bytes to hold, staged and superseded generations included.")
    ] = None,
    device: DeviceOpt = "host",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log commits and what is freed.")] = False,
) -> None:
    """Own memory for engines on this host. At SIGTERM or SIGINT frees everything and exits 0.

    Prints one line that starts with "ready" when engines can connect. Only processes of the same user, and root,
    are let in. The socket of a killed service is replaced, a running one is never stolen.
    """
    log_to_stderr(verbose)
    # One descriptor for each segment that is held.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    from modelexpress.gms.server import GmsServer

    with GmsServer(socket, _backend(device), quota_nbytes=quota) as server:
        on_stop_signals(lambda *_: server.stop())
        typer.echo(f"ready {server.path}: {device} memory")
        server.serve_forever()


@app.command()
def status(socket: SocketOpt, as_json: JsonOpt = False) -> None:
    """List what the service holds, and who reads, stages or waits."""
    from modelexpress.gms import client

    found = client.status(socket)
    if as_json:
        print_json(found)
        return
    table = table_of("key", "namespace", "weights", "state", "generation", "GB", "segments", "readers", "waiting")
    for each in found.keys:
        generation = "" if each.generation is None else str(each.generation)
        counts = (str(each.segments), str(each.readers), str(each.waiting))
        add_row(table, each.key[:16], each.namespace, each.label, each.phase, generation, _gb(each.nbytes), *counts)
    console().print(table if found.keys else "nothing is held")
    quota = f" of {_gb(found.quota_nbytes)}" if found.quota_nbytes else ""
    typer.echo(
        f"pid {found.pid}: {_gb(found.used_nbytes)}{quota} GB of {found.device} memory, {found.sessions} sessions"
    )


@app.command()
def publish(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder or file of safetensors.", metavar="CHECKPOINT", readable=False)
    ],
    socket: SocketOpt,
    revision: Annotated[str | None, typer.Option(help="Name of the checkpoint's content, like a commit hash.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Goes with --revision.")] = None,
    threads: Annotated[int | None, typer.Option(help="Parallel readers.")] = None,
) -> None:
    """Fill the service with a checkpoint's tensors. Needs no engine.

    A model that is filled by name imports them. It is found by its content digest, or by --revision when given.
    """
    log_to_stderr(False)
    from modelexpress import api

    bar = ProgressBar("reading")
    try:
        generation, nbytes = api.keep_checkpoint(
            checkpoint,
            progress=bar.advance,
            gms=socket,
            revision=revision,
            model_name=model_name,
            threads=threads,
        )
    finally:
        bar.close()
    typer.echo(f"committed generation {generation}: {_gb(nbytes)} GB")


@app.command()
def drop(key: KeyArg, socket: SocketOpt) -> None:
    """Let nobody new import a generation. Who reads it keeps it, and then its memory is free."""
    from modelexpress.gms import client

    where = _find(key, socket)
    client.drop(where)
    typer.echo(f"dropped {where.key[:16]} in {where.namespace}")


@app.command()
def check(key: KeyArg, socket: SocketOpt) -> None:
    """Compare a generation with its writer's checksums. Reads every byte; exit 1 and name what is wrong."""
    from modelexpress.gms.client import Imported, open_session
    from modelexpress.gms.memory import HostMemory
    from modelexpress.gms.weights import check_checksums

    granted = open_session(_find(key, socket), "RO", HostMemory(), wait_s=0.0)
    if not isinstance(granted, Imported):
        granted.close()
        raise GmsError(f"the memory service at {socket} let a session stage that asked to read")
    typer.echo(f"generation {granted.generation}: {_gb(check_checksums(granted))} GB are as they were committed")


@app.command()
def save(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.", metavar="DIR", readable=False)],
    socket: SocketOpt,
    threads: Annotated[int, typer.Option(help="Parallel writers.")] = 4,
) -> None:
    """Write every committed generation to disk. With checksums; the folder appears whole or not at all."""
    from modelexpress.gms import archive
    from modelexpress.gms.memory import HostMemory

    archive.save(socket, folder, backend=HostMemory(), threads=threads)
    typer.echo(f"saved to {folder}")


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="What `gms save` wrote.", metavar="DIR", readable=False)],
    socket: SocketOpt,
    threads: Annotated[int, typer.Option(help="Parallel readers.")] = 4,
) -> None:
    """Commit every generation of a saved folder. Refuses, and names it, when anything is missing or changed."""
    from modelexpress.gms import archive
    from modelexpress.gms.memory import HostMemory

    archive.restore(socket, folder, backend=HostMemory(), threads=threads)
    typer.echo(f"restored from {folder}")


def _backend(device: str) -> MemoryBackend:
    from modelexpress.gms.backend import memory_backend

    try:
        return memory_backend("cpu" if device == "host" else device)
    except NotAvailable as exc:
        raise ConfigError(f"device is {device!r}; give host or cuda:N") from exc


def _find(key: str, socket: str) -> Where:
    """The one committed key that begins like this."""
    from modelexpress.gms import client

    found: list[KeyStatus] = [each for each in client.status(socket).keys if each.key.startswith(key)]
    if len(found) != 1:
        raise NotAvailable(
            f"{len(found)} keys at {socket} begin with {key!r}; `modelexpress gms status --json` lists all"
        )
    return client.Where(socket, found[0].key, found[0].namespace)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f}"
