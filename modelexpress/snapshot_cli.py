"""The commands around a capture: modelexpress snapshot warm-up | quiesce | check | dump | restore | resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelexpress.errors import ConfigError, SnapshotError
from modelexpress.terminal import add_row, console, log_to_stderr, print_json, table_of

if TYPE_CHECKING:
    from modelexpress.engines.sglang.control import EngineControl

app = typer.Typer(
    name="snapshot",
    help="Capture an SGLang server with CRIU. Make it fit for that, and let it serve again after the restore.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)

UrlOpt = Annotated[str, typer.Option(help="The server, on this host and in this container.")]
ReadyOpt = Annotated[
    Path, typer.Option(help="Says that the server may be captured, and how it was then.", metavar="PATH")
]
ApiKeyOpt = Annotated[
    str | None,
    typer.Option(envvar="MX_API_KEY", help="The server's admin key, else its key. Better given as MX_API_KEY."),
]
PidOpt = Annotated[int | None, typer.Option(help="The server's main process. Default: who listens on the port.")]
ImagesOpt = Annotated[Path, typer.Option(help="CRIU's folder of images.", metavar="DIR")]
DirectOpt = Annotated[
    bool, typer.Option("--direct-io", help="Images past the page cache: CRIU's --image-io-mode direct.")
]
StreamOpt = Annotated[bool, typer.Option("--stream", help="Images through criu-image-streamer: CRIU's --stream.")]
MoreArg = Annotated[
    list[str] | None, typer.Argument(help="Behind `--`: options that go to CRIU as they are.", metavar="[-- OPTIONS]")
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]

_URL = "http://127.0.0.1:30000"


@app.command("warm-up")
def warm_up(url: UrlOpt = _URL, api_key: ApiKeyOpt = None, pid: PidOpt = None) -> None:
    """Let every data-parallel rank generate up to eight tokens. Fails after SGLANG_WARMUP_TIMEOUT, else 600 s."""
    from modelexpress.engines.sglang import snapshot

    typer.echo(str(snapshot.warm_up(_server(url, api_key, pid))))


@app.command()
def quiesce(
    ready_file: ReadyOpt,
    url: UrlOpt = _URL,
    tags: Annotated[str, typer.Option(help="What SGLang releases.")] = "kv_cache,weights",
    idle_timeout_s: Annotated[float, typer.Option(help="Seconds for running requests to end.")] = 60.0,
    api_key: ApiKeyOpt = None,
    pid: PidOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Make a server fit for capture. Warm up, let go of everything, look for what is left, write the ready file.

    The server answers no request from then on, until `resume`. When something fails or is left, it serves again,
    and there is no file.
    """
    log_to_stderr(False)
    from modelexpress.engines.sglang import snapshot

    if idle_timeout_s < 0:
        raise ConfigError(f"idle-timeout-s is {idle_timeout_s:g}; give 0 or more seconds")
    chosen = [each.strip() for each in tags.split(",") if each.strip()]
    control = _server(url, api_key, pid)
    ready = snapshot.quiesce(control, ready_file, tags=chosen, idle_timeout_s=idle_timeout_s)
    if as_json:
        print_json(ready)
    else:
        typer.echo(f"{ready.warm_up}\nready {ready_file}: process {ready.pid}, {len(ready.processes)} in all")


@app.command()
def check(url: UrlOpt = _URL, api_key: ApiKeyOpt = None, pid: PidOpt = None, as_json: JsonOpt = False) -> None:
    """List what of modelexpress is in the server. Threads, sockets, mappings, files of its processes; exit 1 if any."""
    from modelexpress.engines.sglang import snapshot

    found = snapshot.left_behind(_server(url, api_key, pid))
    if as_json:
        print_json({"left": found})
    elif found:
        table = table_of("pid", "process", "kind", "what")
        for each in found:
            add_row(table, str(each.pid), each.process, each.kind, each.what)
        console().print(table)
    else:
        typer.echo("nothing of modelexpress is left")
    if found:
        raise typer.Exit(1)


@app.command()
def dump(
    ready_file: ReadyOpt,
    images_dir: ImagesOpt,
    direct_io: DirectOpt = False,
    stream: StreamOpt = False,
    more: MoreArg = None,
) -> None:
    """Capture the server of a ready file. With CRIU, which must be installed; its processes end, as CRIU has it."""
    from modelexpress import criu
    from modelexpress.engines.sglang import snapshot

    ready = snapshot.read_ready(ready_file)
    if ready.state != "quiesced":
        raise SnapshotError(f"the server of {ready_file} was resumed since; quiesce it again")
    criu.run(criu.dump_command(ready.pid, criu.ImageStorage(images_dir, direct_io, stream), more or ()))
    typer.echo(f"captured process {ready.pid} in {images_dir}")


@app.command()
def restore(
    images_dir: ImagesOpt, direct_io: DirectOpt = False, stream: StreamOpt = False, more: MoreArg = None
) -> None:
    """Bring a captured server back with CRIU. It serves after `resume`."""
    from modelexpress import criu

    criu.run(criu.restore_command(criu.ImageStorage(images_dir, direct_io, stream), more or ()))
    typer.echo(f"restored from {images_dir}; now run `modelexpress snapshot resume`")


@app.command()
def resume(ready_file: ReadyOpt, url: UrlOpt = _URL, api_key: ApiKeyOpt = None, pid: PidOpt = None) -> None:
    """Let a restored server serve. Compare the devices, take memory back, publish, generate once, remove the file."""
    log_to_stderr(False)
    from modelexpress.engines.sglang import snapshot

    typer.echo(f"serves: {snapshot.resume(_server(url, api_key, pid), ready_file)}")


def _server(url: str, api_key: str | None, pid: int | None) -> EngineControl:
    from modelexpress.engines.sglang.control import ServerControl

    return ServerControl(url, api_key=api_key, pid=pid)
