"""What the commands show people and machines: tables, progress bars, JSON, logs; and how they hear signals."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from modelexpress.errors import printable

if TYPE_CHECKING:
    from types import FrameType

_PIPE_WIDTH = 10_000


class ProgressBar:
    """Bytes and rate on a terminal; nothing when stdout or stderr is not one."""

    def __init__(self, what: str) -> None:
        from rich.progress import DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

        shown = _is_terminal(sys.stderr) and _is_terminal(sys.stdout)
        columns = (TextColumn(what), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._task = self._progress.add_task(what, total=None)
        self._progress.start()

    def advance(self, nbytes: int) -> None:
        """So many bytes more."""
        self._progress.advance(self._task, nbytes)

    def close(self) -> None:
        """Take it off the screen."""
        self._progress.stop()


def on_stop_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Let SIGTERM and SIGINT call `handler`."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, handler)


def table_of(*columns: str) -> Table:
    """An empty table; cells that do not fit are folded, never cut."""
    table = Table()
    for each in columns:
        table.add_column(each, overflow="fold")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add cells that are shown as they are."""
    # As text, not as rich's markup: names come from files and from other people's sources.
    table.add_row(*(Text(printable(each)) for each in cells))


def console() -> Console:
    """Standard output for tables."""
    # A pipe has no width: nothing is folded there, so that a row stays a line.
    return Console() if _is_terminal(sys.stdout) else Console(width=_PIPE_WIDTH)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()  # None: the shell closed it


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    import msgspec  # here, since --help should not wait for it

    typer.echo(msgspec.json.encode(value).decode())


def log_to_stderr(verbose: bool) -> None:
    """Warnings, and with `verbose` each attempt."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
