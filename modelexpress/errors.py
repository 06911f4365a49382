"""Every exception that leaves modelexpress, ordered by what the caller can do next.

ModelExpressError
  ConfigError (ValueError)     the call is wrong: fix it
  CheckpointError              the files are wrong: file, tensor, reason
  StrategyError                this way did not work: the chain tries the next
    NotAvailable               nothing to load from here
      SourceBusy               it has as many readers as it may have: wait, or take another
    ManifestMismatch           the source has other weights
    TransferFailed             bytes were moving
    VerificationFailed         bytes arrived, and they are wrong
  RegistryError                registry unreachable after retries, or a record is unusable
  GmsError                     the memory service: protocol or state violation, no memory, not running
    StaleGeneration            the generation that was read is not there any more
  SnapshotError                the engine cannot be captured, or cannot go on after a restore
  RecoveryFailed               the model could not be rebuilt: do not go on
  LoadFailed                   every attempt failed; carries the LoadReport

A message has the thing, the numbers and the next step. Errors of other libraries are translated once, in
the module that is about that library.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelexpress.strategies.base import LoadReport


_LONGEST = 4000  # characters of one reason


class ModelExpressError(Exception):
    """Base of everything modelexpress raises on purpose."""


class ConfigError(ModelExpressError, ValueError):
    """The call is wrong. Names the setting, the value and the accepted form."""


class CheckpointError(ModelExpressError):
    """The files are wrong, or do not fit the model. Names the file, the tensor and the reason."""


class StrategyError(ModelExpressError):
    """One way of loading did not work; the chain tries the next."""


class NotAvailable(StrategyError):
    """There is nothing to load from here. Nothing was written."""


class SourceBusy(NotAvailable):
    """The source has as many readers as it may have. Another may be free, or this one later."""


class ManifestMismatch(StrategyError):
    """The source has other weights than the target needs. Nothing was written."""


class TransferFailed(StrategyError):
    """Bytes were moving, and stopped. The destination holds a mixture."""


class VerificationFailed(StrategyError):
    """Bytes arrived, and they are not the bytes that were published. Names the tensor."""


class RegistryError(ModelExpressError):
    """The registry did not answer after retries, or what it holds cannot be used."""


class GmsError(ModelExpressError):
    """The memory service cannot be reached, refused, or broke its protocol."""


class StaleGeneration(GmsError):
    """The generation that this process read is not there any more; what replaced it has other bytes."""


class SnapshotError(ModelExpressError):
    """An engine cannot be captured now, or cannot go on after a restore. Says what it was left as."""


class RecoveryFailed(ModelExpressError):
    """The model could not be rebuilt after a failed attempt; its root is empty. The cause says why."""


class LoadFailed(ModelExpressError):
    """Every attempt failed. `report` holds each attempt with its reason, in order."""

    def __init__(self, message: str, report: LoadReport) -> None:
        super().__init__(message)
        self.report = report


def describe(exc: BaseException) -> str:
    """One line for logs and reports: our own messages as they are, foreign ones with their type."""
    try:
        text = printable(" ".join(str(exc).split())) or "no message"
    except Exception:  # noqa: BLE001 - a foreign exception's __str__ must not hide that it was raised
        text = "its message cannot be shown"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... ({len(text):,} characters)"
    if isinstance(exc, ModelExpressError):
        return f"{type(exc).__name__}: {text}"
    return f"{type(exc).__module__}.{type(exc).__qualname__}: {text}"


def printable(text: str) -> str:
    """Text that any terminal, log and JSON file can hold: control characters and broken UTF-8 escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def release_frames(exc: BaseException, *, outer: BaseException | None) -> None:
    """Let go of every local variable that the traceback of `exc` keeps alive.

    A traceback holds its frames, and the frames of a failed load hold parameters. Walks causes,
    contexts and the members of exception groups. Stops at `outer`, the exception that was in flight
    before modelexpress was called: that one belongs to the caller. Line numbers stay readable.
    """
    for each in _chained(exc, outer):
        traceback.clear_frames(each.__traceback__)


def raise_interrupt(exc: BaseException, *, outer: BaseException | None) -> None:
    """Raise the KeyboardInterrupt or SystemExit in whose place `exc` was raised, if there was one.

    An interrupt may come while `Condition.wait` takes its lock back; leaving the `with` then raises
    RuntimeError in its place. Who catches Exception would go on as if nobody had asked to stop. Whoever
    says `raise ... from` an interrupt has dealt with it.
    """
    seen = {id(outer)}
    following: BaseException | None = exc
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        replaced = None if following.__suppress_context__ else following.__context__
        if isinstance(replaced, KeyboardInterrupt | SystemExit) and replaced is not outer:
            raise replaced from None
        following = following.__cause__ or replaced


def in_flight() -> BaseException | None:
    """The exception that the calling code is handling now, if any."""
    return sys.exc_info()[1]


def _chained(exc: BaseException, outer: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set() if outer is None else {id(outer)}
    pending = [exc]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        pending.extend(linked for linked in (each.__cause__, each.__context__) if linked is not None)
        if isinstance(each, BaseExceptionGroup):
            pending.extend(each.exceptions)
