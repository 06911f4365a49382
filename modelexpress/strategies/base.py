"""The ways in: LoadStrategy, what it is given (LoadTarget), and what is known afterwards (Attempt, LoadReport)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from torch import nn

from modelexpress.adapter import EngineAdapter
from modelexpress.checkpoint.base import CheckpointTensors
from modelexpress.errors import NotAvailable
from modelexpress.gms.client import Imported
from modelexpress.model_root import Dirt, ModelRoot
from modelexpress.stripe import Lost, Share

Outcome = Literal["loaded", "failed", "unavailable", "off"]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """What is to be loaded: an engine's adapter and the root it fills.

    `progress` is called with the bytes that just arrived in place, from any thread.
    """

    adapter: EngineAdapter
    root: ModelRoot
    progress: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one successful attempt moved or bound.

    Attributes:
        nbytes: each counted once.
        shares: who delivered them, the largest share first, where several may have.
        lost: sources that were given up on the way, in that order.
    """

    nbytes: int
    shares: tuple[Share, ...] = ()
    lost: tuple[Lost, ...] = ()


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try. Outcome "off" is a way that nobody set up here, or filled yet, and no failure.

    Attributes:
        source: the one that delivered most, where several did.
        error: text, never an exception: those keep frames, and frames keep parameters.
        shares: (source, transport, bytes) of each peer that delivered, the largest first.
    """

    strategy: str
    source: str | None
    outcome: Outcome
    error: str | None
    nbytes: int
    seconds: float
    shares: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The truth about one load.

    Attributes:
        model: the loaded root; None when nothing worked.
        strategy: the one that delivered, None when nothing worked.
        source: which peer or folder delivered.
        nbytes: bytes it moved, each counted once.
        seconds: of the whole load, failed attempts included.
        attempts: every try in order, the last one delivered.
        publication: the running source when the load was asked to publish in a registry; `withdraw()` it
            before the weights change.
        imported: the generation of a memory service that lies under the parameters, if one does; it can be
            paused and resumed.
        preloaded_nbytes: memory of `imported` that the service held when this load began. Who measured free memory
            before the load saw it in use already. 0 when the weights were allocated by this process.
    """

    model: nn.Module | None = field(repr=False)
    strategy: str | None
    source: str | None
    nbytes: int
    seconds: float
    attempts: tuple[Attempt, ...]
    publication: object | None = field(default=None, repr=False)
    imported: Imported | None = field(default=None, repr=False)
    preloaded_nbytes: int = 0

    @property
    def gb_per_s(self) -> float:
        """Of the attempt that delivered, in 1e9 bytes a second; 0 when none did."""
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.outcome != "loaded" or last.seconds <= 0:
            return 0.0
        return last.nbytes / last.seconds / 1e9

    def to_json(self) -> str:
        """One JSON object: strategy, source, nbytes, seconds, gb_per_s and attempts."""
        return msgspec.json.encode(
            {
                "strategy": self.strategy,
                "source": self.source,
                "nbytes": self.nbytes,
                "seconds": round(self.seconds, 6),
                "gb_per_s": round(self.gb_per_s, 6),
                "attempts": self.attempts,
            }
        ).decode()


class NothingYet(NotAvailable):
    """Nobody can have these weights here before this process has loaded them: its turn, and no failure."""


class LoadSource(ABC):
    """One place that a strategy can load from. `tolerates`: the most dirt it can start on."""

    name: str
    tolerates: Dirt = Dirt.NONE

    @abstractmethod
    def load(self, target: LoadTarget) -> TransferStats:
        """Fill the root from here.

        Writes only inside `target.root.writing()`. Whatever it opens is closed when it returns or raises.

        Raises:
            StrategyError, CheckpointError, RegistryError: this source did not work.
            RecoveryFailed: and nothing else may be tried, because the memory is not safe to use.
        """


class LoadStrategy(ABC):
    """One way of loading. It gets its services in its constructor and never builds a model."""

    name: str

    @abstractmethod
    def sources(self, target: LoadTarget) -> Sequence[LoadSource]:
        """Where to load from, best first; asked once a load, before anything is written.

        Raises:
            NotAvailable, CheckpointError, RegistryError: nowhere, with the reason.
        """


def raw_tolerance(adapter: EngineAdapter) -> Dirt:
    """The most dirt from which raw checkpoint tensors still make the right model."""
    return Dirt.CHECKPOINT_BYTES if adapter.repeatable else Dirt.NONE


def load_raw(target: LoadTarget, tensors: CheckpointTensors, *, confirm: Callable[[], None]) -> TransferStats:
    """Fill the root from raw checkpoint tensors, whoever holds them.

    `confirm` is called when all bytes are in place, and raises where they must not be used after all.
    """
    dirt = Dirt.CHECKPOINT_BYTES if target.adapter.repeatable else Dirt.ANYTHING
    with target.root.writing(dirt) as module:
        nbytes = target.adapter.load_checkpoint(module, tensors)
    confirm()
    with target.root.writing() as module:
        target.adapter.finalize(module, from_checkpoint=True)
    return TransferStats(nbytes)
