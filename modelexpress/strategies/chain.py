"""LoadStrategyChain: the one loop that tries every source of every strategy on one root."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from modelexpress.errors import (
    LoadFailed,
    NotAvailable,
    RecoveryFailed,
    describe,
    in_flight,
    raise_interrupt,
    release_frames,
)
from modelexpress.strategies.base import (
    Attempt,
    LoadReport,
    LoadSource,
    LoadStrategy,
    LoadTarget,
    NothingYet,
    Outcome,
    TransferStats,
)
from modelexpress.stripe import Lost

logger = logging.getLogger(__name__)


class LoadStrategyChain:
    """Tries strategies in order, and the sources of each, until one has filled the root.

    Args:
        strategies: what can work on this machine; whoever builds the chain leaves out the rest.
        strict: stop at the first attempt that does not deliver.
        refused: what was left out, with the reason. It stands first in the report, and a strict chain
            stops at it, unless it is "off".
    """

    def __init__(
        self, strategies: Sequence[LoadStrategy], *, strict: bool = False, refused: Sequence[Attempt] = ()
    ) -> None:
        self.strategies = tuple(strategies)
        self.strict = strict
        self.refused = tuple(refused)

    def run(self, target: LoadTarget) -> LoadReport:
        """Load `target`.

        Any exception of an attempt becomes an Attempt with its text, and the next attempt starts on a
        clean root. KeyboardInterrupt, SystemExit and MemoryError go straight up.

        Raises:
            ConfigError: another thread is loading the same module.
            LoadFailed: nothing worked, or the first attempt did not and the chain is strict.
            RecoveryFailed: the root could not be rebuilt between two attempts, or its memory is not safe.
        """
        with target.root.loading():
            return self._run(target)

    def _run(self, target: LoadTarget) -> LoadReport:
        started = time.monotonic()
        attempts = list(self.refused)
        for strategy in self.strategies:
            if self._ended(attempts):
                break
            self._try_sources(strategy, target, attempts)
        delivered = attempts[-1] if attempts and attempts[-1].outcome == "loaded" else None
        report = LoadReport(
            model=target.root.accept() if delivered else None,
            strategy=delivered.strategy if delivered else None,
            source=delivered.source if delivered else None,
            nbytes=delivered.nbytes if delivered else 0,
            seconds=time.monotonic() - started,
            attempts=tuple(attempts),
        )
        if delivered is None:
            raise LoadFailed(_summary(report), report)
        return report

    def _ended(self, attempts: Sequence[Attempt]) -> bool:
        tried = [each for each in attempts if each.outcome != "off"]
        return bool(tried) and (self.strict or tried[-1].outcome == "loaded")

    def _try_sources(self, strategy: LoadStrategy, target: LoadTarget, attempts: list[Attempt]) -> None:
        """Append the attempts of one strategy, the last of which may have delivered."""
        sources: list[LoadSource] = []
        looked = _attempt(strategy.name, None, lambda: sources.extend(_sources(strategy, target)))
        if not sources:
            attempts += looked
        for source in sources:
            if target.root.dirt > source.tolerates:
                _reset(target, attempts)
            attempts += _attempt(strategy.name, source.name, partial(source.load, target))
            if attempts[-1].outcome == "loaded" or self.strict:
                return


def _sources(strategy: LoadStrategy, target: LoadTarget) -> Sequence[LoadSource]:
    sources = strategy.sources(target)
    if not sources:
        raise NotAvailable("it knows no source for these weights")
    return sources


def _attempt(strategy: str, source: str | None, run: Callable[[], TransferStats | None]) -> list[Attempt]:
    """Run one try to its end. When this returns, no exception is in flight and none is kept.

    The last attempt is this one. Those before it are sources that were lost while others delivered.
    """
    started = time.monotonic()
    outer = in_flight()
    stats: TransferStats | None = None
    error = None
    outcome: Outcome = "loaded"
    try:
        stats = run()
    except (MemoryError, RecoveryFailed):
        raise
    except Exception as exc:  # noqa: BLE001 - the outermost line of an attempt: the next source is tried
        raise_interrupt(exc, outer=outer)
        error = describe(exc)
        outcome = _outcome(type(exc))
        release_frames(exc, outer=outer)
    seconds = time.monotonic() - started
    shares = stats.shares if stats is not None else ()
    attempts = [_lost_attempt(strategy, lost) for lost in (stats.lost if stats is not None else ())]
    attempts.append(
        Attempt(
            strategy=strategy,
            source=shares[0].source if shares else source,
            outcome=outcome,
            error=error,
            nbytes=stats.nbytes if stats is not None else 0,
            seconds=seconds,
            shares=tuple((share.source, share.transport, share.nbytes) for share in shares),
        )
    )
    if source is not None or error is not None:
        for attempt in attempts:
            _log(attempt)
    return attempts


def _lost_attempt(strategy: str, lost: Lost) -> Attempt:
    return Attempt(
        strategy=strategy,
        source=lost.source,
        outcome=_outcome(lost.kind),
        error=f"{lost.kind.__name__}: {lost.text}",
        nbytes=lost.nbytes,
        seconds=lost.seconds,
    )


def _outcome(kind: type[Exception]) -> Outcome:
    if issubclass(kind, NothingYet):
        return "off"
    return "unavailable" if issubclass(kind, NotAvailable) else "failed"


def _reset(target: LoadTarget, attempts: Sequence[Attempt]) -> None:
    try:
        target.root.reset(target.adapter.initialize)
    except RecoveryFailed as exc:
        exc.add_note("before that: " + _reasons(attempts))
        raise


def _log(attempt: Attempt) -> None:
    where = f"{attempt.strategy} from {attempt.source}" if attempt.source else attempt.strategy
    if attempt.error is None:
        gb_per_s = attempt.nbytes / attempt.seconds / 1e9 if attempt.seconds > 0 else 0.0
        logger.info("%s: loaded %d bytes in %.3f s, %.2f GB/s", where, attempt.nbytes, attempt.seconds, gb_per_s)
    else:
        logger.info("%s: %s after %.3f s: %s", where, attempt.outcome, attempt.seconds, attempt.error)


def _summary(report: LoadReport) -> str:
    return f"no strategy could load the model (attempts: {len(report.attempts)}): {_reasons(report.attempts)}"


def _reasons(attempts: Sequence[Attempt]) -> str:
    numbered = (
        f"[{number}] {attempt.strategy}{f' from {attempt.source}' if attempt.source else ''}: {attempt.error}"
        for number, attempt in enumerate(attempts, start=1)
    )
    return " ".join(numbered) or "no strategy is configured that can work here; see `modelexpress doctor`"
