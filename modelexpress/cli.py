"""The command line: modelexpress load | serve | sources | inspect | doctor | gms | snapshot.

Words for people go to a terminal as tables and progress bars; `--json` prints one JSON object on stdout and
nothing else there. Logs and errors go to stderr. Exit code 0 means that what was asked was done, 1 that it
could not be, 2 that the call is wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from modelexpress import __version__, gms_cli, snapshot_cli
from modelexpress.errors import ConfigError, LoadFailed, ModelExpressError, describe, printable
from modelexpress.terminal import ProgressBar, add_row, console, log_to_stderr, on_stop_signals, print_json, table_of

if TYPE_CHECKING:
    from types import FrameType

    from modelexpress.checkpoint.index import CheckpointIndex
    from modelexpress.registry.base import SourceRecord
    from modelexpress.strategies.base import LoadReport

app = typer.Typer(
    name="modelexpress",
    help="Get a model's weights into memory: from a peer that serves them, or from disk. Never wrong bytes.",
    epilog="Every setting of a load can also come from an environment variable: MX_ and its name, like MX_REGISTRY.",
    rich_markup_mode=None,  # half of the time that --help takes
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_SIGNAL_POLL_S = 0.5

app.add_typer(gms_cli.app)
app.add_typer(snapshot_cli.app)

# Not checked to be readable: with a revision and a peer it need not be.
CheckpointArg = Annotated[
    Path, typer.Argument(help="Folder or file of safetensors.", metavar="CHECKPOINT", readable=False)
]
RegistryOpt = Annotated[
    str | None,
    typer.Option(help="Where sources are found: file:///absolute/dir on one host, redis://host:port/db on many."),
]
RevisionOpt = Annotated[
    str | None,
    typer.Option(help="Name of the checkpoint's content, like a commit hash. Never reuse one for other bytes."),
]
ModelNameOpt = Annotated[
    str | None, typer.Option(help="Goes with --revision. Default: the hub's model name, or the folder's name.")
]
SigningKeyOpt = Annotated[
    str | None,
    typer.Option(
        help="Use only records signed with this secret. Better given as MX_SIGNING_KEY: a command line is visible.",
        show_default=False,
    ),
]
TransportsOpt = Annotated[
    str | None,
    typer.Option(help="Ways to a peer, in the order to try them: some of host,nixl,tcp. Default: host,nixl."),
]
DirectReadsOpt = Annotated[
    str | None,
    typer.Option(help="Read files past the page cache where they are not in it: auto, on or off. Default: auto."),
]
ThreadsOpt = Annotated[int | None, typer.Option(help="Parallel lanes. Default: the cores available, at most 8.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
VerboseOpt = Annotated[bool, typer.Option("--verbose", "-v", help="Log each attempt on stderr.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def load(
    checkpoint: CheckpointArg,
    registry: RegistryOpt = None,
    revision: RevisionOpt = None,
    model_name: ModelNameOpt = None,
    gms: Annotated[str | None, typer.Option(help="Socket of a memory service on this host.")] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Ways to load, in the order to try them. Default: rdma,gms,disk.")
    ] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict", help="Fail at the first attempt that does not deliver.")
    ] = None,
    verify: Annotated[
        str | None, typer.Option(help="Check bytes against their source's checksums: on, off or sampled. Default: on.")
    ] = None,
    transfer_timeout_s: Annotated[float | None, typer.Option(help="Seconds for one attempt. Default: 300.")] = None,
    connect_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds to reach a registry or a peer. Default: 10.")
    ] = None,
    max_sources: Annotated[int | None, typer.Option(help="Peers of each kind to try. Default: 3.")] = None,
    max_readers: Annotated[
        int | None, typer.Option(help="Targets that read from a peer at one time; more wait their turn. Default: 1.")
    ] = None,
    transports: TransportsOpt = None,
    direct_reads: DirectReadsOpt = None,
    threads: ThreadsOpt = None,
    signing_key: SigningKeyOpt = None,
    as_json: JsonOpt = False,
    verbose: VerboseOpt = False,
) -> None:
    """Load a checkpoint into memory. Report which way delivered it.

    The tensors are checked and then let go: this shows whether, how and how fast an engine on this machine
    would get them. With --revision and a peer that serves it, the files need not be readable.
    """
    log_to_stderr(verbose)
    from modelexpress import api

    bar = ProgressBar("loading")
    try:
        report = api.load_checkpoint(
            checkpoint,
            progress=bar.advance,
            publish=False,  # this process ends, whatever MX_PUBLISH says
            registry=registry,
            revision=revision,
            model_name=model_name,
            gms=gms,
            strategies=strategies,
            strict=strict,
            verify=verify,
            transfer_timeout_s=transfer_timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_sources=max_sources,
            max_readers=max_readers,
            transports=transports,
            direct_reads=direct_reads,
            threads=threads,
            signing_key=signing_key,
        )
    except LoadFailed as exc:
        report = exc.report
    finally:
        bar.close()
    _show_report(report, as_json=as_json)
    if report.strategy is None:
        raise typer.Exit(1)


@app.command()
def serve(
    checkpoint: CheckpointArg,
    registry: RegistryOpt = None,
    revision: RevisionOpt = None,
    model_name: ModelNameOpt = None,
    verify: Annotated[
        str | None, typer.Option(help="off: publish without checksums, for readers that do not verify. Default: on.")
    ] = None,
    lease_ttl_s: Annotated[
        float | None, typer.Option(help="Seconds until a source that died is not found any more. Default: 15.")
    ] = None,
    connect_timeout_s: Annotated[float | None, typer.Option(help="Seconds to reach the registry. Default: 10.")] = None,
    transports: TransportsOpt = None,
    listen: Annotated[
        str | None, typer.Option(help="IP address of this host where tcp serves readers. Default: 127.0.0.1.")
    ] = None,
    threads: ThreadsOpt = None,
    signing_key: SigningKeyOpt = None,
    verbose: VerboseOpt = False,
) -> None:
    """Read a checkpoint and serve its tensors to peers. Runs until SIGTERM or SIGINT.

    Prints one line that starts with "ready" when it can be found. After a signal nobody new finds it, those who
    read it may finish for up to 20 seconds, and it ends with exit code 0. Holds one copy of the checkpoint.
    """
    log_to_stderr(verbose)
    on_stop_signals(lambda *_: os._exit(0))  # nothing is published or opened yet, and imports swallow exceptions
    from modelexpress import api

    leaving = threading.Event()
    on_stop_signals(partial(_leave, leaving))
    bar = ProgressBar("reading")
    with api.serve_checkpoint(
        checkpoint,
        progress=bar.advance,
        registry=registry,
        revision=revision,
        model_name=model_name,
        verify=verify,
        lease_ttl_s=lease_ttl_s,
        connect_timeout_s=connect_timeout_s,
        transports=transports,
        listen=listen,
        threads=threads,
        signing_key=signing_key,
    ) as source:
        bar.close()
        record = source.record
        if not leaving.is_set():
            size = f"{record.tensors} tensors, {record.nbytes / 1e9:.3f} GB"
            typer.echo(f"ready {record.label}: {size}, source {record.name}")
        while not leaving.wait(_SIGNAL_POLL_S):
            pass


@app.command()
def sources(
    registry: RegistryOpt = None,
    signing_key: SigningKeyOpt = None,
    connect_timeout_s: Annotated[float | None, typer.Option(help="Seconds to reach the registry. Default: 10.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """List the sources in a registry. Each with the targets that read from it at this moment."""
    from modelexpress import api
    from modelexpress.config import resolve_config

    config = resolve_config({"registry": registry, "signing_key": signing_key, "connect_timeout_s": connect_timeout_s})
    with closing(api.registry_of(config)) as opened:
        found = opened.find(None)
    if as_json:
        print_json({"sources": [_source_row(each.record, each.readers) for each in found]})
        return
    table = table_of("source", "kind", "serves", "GB", "tensors", "readers", "generation")
    for each in found:
        record = each.record
        size = f"{record.nbytes / 1e9:.3f}"
        counts = (str(record.tensors), str(each.readers), str(record.generation))
        add_row(table, record.name, record.kind, record.label, size, *counts)
    console().print(table if found else "no sources")


@app.command()
def inspect(
    checkpoint: CheckpointArg,
    digest: Annotated[bool, typer.Option("--digest", help="Also print the content digest (reads samples).")] = False,
    record_checksums: Annotated[
        bool, typer.Option("--record-checksums", help="Read everything and write checksums beside the shards.")
    ] = False,
    check_checksums: Annotated[
        bool, typer.Option("--check-checksums", help="Read everything and compare with the recorded checksums.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Validate a checkpoint and list its tensors. Exit 1 with file, tensor and reason when something is wrong.

    The index, every header, and the size of every file are checked without reading weights. After
    --record-checksums (which writes modelexpress.checksums.json), `load` and `serve` compare what they read
    with it: that finds damage which leaves sizes intact.
    """
    from modelexpress.checkpoint import checksums
    from modelexpress.checkpoint.content_digest import content_digest
    from modelexpress.checkpoint.index import open_index
    from modelexpress.config import resolve_config

    threads = resolve_config({}).threads
    index = open_index(checkpoint)
    facts: dict[str, str] = {}
    if check_checksums:
        checksums.check_checksums(index, threads=threads)
        facts["checksums"] = "every piece of every tensor is as recorded"
    if record_checksums:
        facts["recorded"] = str(checksums.write_checksums(index, threads=threads))
    if digest:
        facts["digest"] = content_digest(index, threads=threads)
    _show_index(index, facts, as_json=as_json)


@app.command()
def doctor(
    registry: RegistryOpt = None,
    gms: Annotated[str | None, typer.Option(help="Socket of a memory service on this host.")] = None,
    takeover_lock: Annotated[str | None, typer.Option(help="File that says which of several replicas serves.")] = None,
    signing_key: SigningKeyOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Say which ways of loading work on this machine. Why the others do not, and who has a takeover lock.

    Exits 1 when a registry, a memory service or a lock was named and cannot be used.
    """
    from modelexpress.config import resolve_config
    from modelexpress.doctor import examine

    given = {"registry": registry, "gms": gms, "takeover_lock": takeover_lock, "signing_key": signing_key}
    findings = examine(resolve_config(given))
    if as_json:
        print_json({"findings": findings})
    else:
        table = table_of("what", "state", "detail")
        for each in findings:
            add_row(table, each.what, each.state, each.detail)
        console().print(table)
    if any(each.what in ("registry", "gms", "takeover lock") and each.state == "fails" for each in findings):
        raise typer.Exit(1)


def main() -> NoReturn:
    """Run the command line; the entry point of the `modelexpress` script."""
    # torch says so at each import where numpy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        app()
    except ConfigError as exc:
        _fail(f"error: {printable(str(exc))}", 2)
    except ModelExpressError as exc:
        _fail(f"error: {describe(exc)}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as exc:
        _drop_output()
        _fail(f"error: {describe(exc)}", 1)
    sys.exit(0)


def _leave(leaving: threading.Event, number: int, frame: FrameType | None) -> NoReturn:
    """First signal: unwind, which withdraws. A second one ends the process at once.

    The event is for the case that the exception is raised in code that cannot pass it on, like a finalizer.
    """
    leaving.set()
    on_stop_signals(signal.SIG_DFL)
    raise SystemExit(0)


def _show_report(report: LoadReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(report.to_json())
        return
    table = table_of("strategy", "source", "outcome", "GB", "seconds", "GB/s", "reason")
    for each in report.attempts:
        rate = f"{each.nbytes / each.seconds / 1e9:.2f}" if each.nbytes and each.seconds else ""
        gigabytes = f"{each.nbytes / 1e9:.3f}" if each.nbytes else ""
        numbers = (gigabytes, f"{each.seconds:.3f}", rate)
        add_row(table, each.strategy, each.source or "", each.outcome, *numbers, each.error or "")
    console().print(table)
    if report.strategy is None:
        typer.echo("nothing was loaded", err=True)
    else:
        typer.echo(f"loaded {report.nbytes / 1e9:.3f} GB by {report.strategy} in {report.seconds:.3f} s")


def _show_index(index: CheckpointIndex, facts: dict[str, str], *, as_json: bool) -> None:
    shards = [shard.name for shard in index.shards]
    tensors = index.manifest.tensors
    if as_json:
        listed = [
            {
                "name": each.name,
                "dtype": each.dtype,
                "shape": each.shape,
                "nbytes": each.nbytes,
                "shard": shards[each.storage] if each.storage >= 0 else None,
            }
            for each in tensors
        ]
        print_json({"shards": shards, "nbytes": index.manifest.nbytes, "tensors": listed, **facts})
        return
    table = table_of("tensor", "dtype", "shape", "bytes", "shard")
    for each in tensors:
        shard = shards[each.storage] if each.storage >= 0 else ""
        add_row(table, each.name, each.dtype, str(list(each.shape)), f"{each.nbytes:,}", shard)
    console().print(table)
    typer.echo(f"valid: {len(tensors)} tensors, {index.manifest.nbytes:,} bytes in {len(shards)} files")
    for name, fact in facts.items():
        typer.echo(f"{name}: {printable(fact)}")


def _source_row(record: SourceRecord, readers: int) -> dict[str, object]:
    return {
        "source": record.name,
        "source_id": record.source_id,
        "generation": record.generation,
        "kind": record.kind,
        "label": record.label,
        "nbytes": record.nbytes,
        "tensors": record.tensors,
        "transport": record.transport,
        "readers": readers,
    }


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    if "--json" in sys.argv[1:]:
        print_json({"error": message.removeprefix("error: ")})
    sys.exit(code)


def _drop_output() -> None:
    """Nobody reads standard output, or it is full: let the exit not try to flush it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
