"""What one run came to, and the time that everything in it was given."""

from __future__ import annotations

import msgspec

from tests.faults.actors import Message
from tests.faults.scenario import Scenario

TRANSFER_S = 3.0
CONNECT_S = 2.0
LEASE_S = 1.5


class Outcome(msgspec.Struct, kw_only=True):
    """What one run came to. `judge` says whether that is as promised.

    Attributes:
        impossible: why the fault cannot be made on this machine; nothing else is set then.
        happened: whether the moment came, and the fault with it.
        result: what the target said: report, error, seconds, held_s, peak, digests; None where it died.
        target_code: its exit code.
        replica: the same of a second target, which loads after the first one died.
        again: digests once more, when everybody that was stopped goes on and is idle.
        before, after, outside: what the target held before and after, as it says, and as /proc says from outside.
        wanted, other: digests of the weights, and of those that a restarted source has.
        paused_s: how long the target itself was stopped.
        codes: exit codes of the others.
        left: what was left behind.
        service: what is wrong with the memory service afterwards.
        work: what was raised where somebody wrote to a full disk.
    """

    scenario: Scenario
    impossible: str | None = None
    happened: bool = False
    result: Message | None = None
    target_code: int | None = None
    replica: Message | None = None
    again: dict[str, str] | None = None
    before: dict[str, list[str]] = msgspec.field(default_factory=dict)
    after: dict[str, list[str]] = msgspec.field(default_factory=dict)
    outside: dict[str, list[str]] = msgspec.field(default_factory=dict)
    wanted: dict[str, str] = msgspec.field(default_factory=dict)
    other: dict[str, str] = msgspec.field(default_factory=dict)
    nbytes: int = 0
    paused_s: float = 0.0
    codes: dict[str, int | None] = msgspec.field(default_factory=dict)
    sources: list[str] = msgspec.field(default_factory=list)
    struck: list[str] = msgspec.field(default_factory=list)
    left: list[str] = msgspec.field(default_factory=list)
    service: str | None = None
    work: Message | None = None
    seconds: float = 0.0
