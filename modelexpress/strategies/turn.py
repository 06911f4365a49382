"""Whose turn it is: which sources a target reads from, and how long it waits for one that is free.

The readers of a source share its link. When many targets start at once and all read the few sources that there are,
all of them are done at the very end. With one reader after the other, the first is done soon and is a source for the
next: each transfer doubles the sources, and n targets take as long as log2(n) transfers. So a source has at most
`max_readers`, and who finds none free looks again, until one is or a new one has come.

Nobody waits for long where nothing moves. A reader that hangs, or died on another host, counts until its lease ends;
when nothing has changed for as long as a slow transfer takes, one more reader is allowed, then two more, then four.

`benchmarks/fleet.py` simulates fleets with the classes of this file.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from modelexpress.registry.base import FoundSource

# One look asks for this many sources: Redis takes 0.2 ms for them, and 0.6 ms for 64. Another look shows others.
SAMPLE = 16

# A target looks for a twentieth of its time: with 4,096 of them waiting, a look at Redis takes 40 ms, and not 1 s.
_PAUSES_PER_LOOK = 20.0
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0

# A transfer slower than this has something wrong with it, or a link that one reader does not fill: 10 Gb/s is 1.25e9.
_SLOW_NBYTES_PER_S = 1e9
_SETUP_S = 2.0


@dataclass(slots=True)
class Turn:
    """The waiting of one target. Times are of any clock that counts seconds."""

    max_readers: int
    chance: random.Random = field(default_factory=random.Random)
    _limit: int = field(init=False)
    _seen: object = field(init=False, default=None)
    _changed_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._limit = self.max_readers

    def limit_of(self, found: Sequence[FoundSource], now: float) -> int:
        """How many readers each of these sources may have, this target included, after a look at `now`.

        With as many, or more, at each: wait `pause_s()`, and look again.
        """
        seen = {each.record.source_id: each.readers for each in found}
        if seen != self._seen:
            self._seen, self._changed_at = seen, now
        elif found and now - self._changed_at > patience_s(min(each.record.nbytes for each in found)):
            self._limit += self._limit
            self._changed_at = now
        return self._limit

    def pause_s(self, look_s: float) -> float:
        """How long to wait after a look that took `look_s`; another time for each, or all would look in step."""
        pause_s = min(max(_SHORTEST_PAUSE_S, _PAUSES_PER_LOOK * look_s), _LONGEST_PAUSE_S)
        return pause_s * self.chance.uniform(0.5, 1.5)


def patience_s(nbytes: int) -> float:
    """How long a transfer of this size may take before its source counts as one that serves nobody."""
    return _SETUP_S + nbytes / _SLOW_NBYTES_PER_S


def is_idle(found: Sequence[FoundSource]) -> bool:
    """Whether nobody reads from any source: then one target may read from several at the same time.

    Where others read, each source that a target reads beside its first is missing to one that waits.
    """
    return not any(each.readers for each in found)
