"""What one run does: who serves what to whom, and which fault hits whom at which moment. All of it from one seed.

The plan is fixed by the seed. The interleaving is fixed too where a moment is one at which the target stands still
until the fault has happened (built, bytes, loaded); at "raced" the fault hits a target that runs.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

Kind = Literal[
    "kill", "stop", "drop", "black hole", "full disk", "memory", "cut", "flip", "restart", "flush", "clock jump", "none"
]
Victim = Literal["source", "target", "service", "writer", "redis", "registry", "save", "checksums", "file", "nobody"]
Event = Literal["before", "built", "bytes", "raced", "loaded"]
Transport = Literal["host", "nixl", "nixl-tcp", "tcp"]

# Every kind of fault with everybody it can hit. Seed n draws case n modulo their number, so that one round of seeds
# has all of them.
CASES: tuple[tuple[Kind, Victim], ...] = (
    ("kill", "source"),
    ("stop", "source"),
    ("drop", "source"),
    ("black hole", "source"),
    ("flip", "source"),
    ("restart", "source"),
    ("memory", "source"),
    ("kill", "target"),
    ("stop", "target"),
    ("memory", "target"),
    ("kill", "service"),
    ("stop", "service"),
    ("restart", "service"),
    ("memory", "service"),
    ("kill", "writer"),
    ("stop", "writer"),
    ("kill", "redis"),
    ("stop", "redis"),
    ("restart", "redis"),
    ("flush", "redis"),
    ("drop", "redis"),
    ("black hole", "redis"),
    ("clock jump", "redis"),
    ("clock jump", "registry"),
    ("full disk", "registry"),
    ("full disk", "save"),
    ("full disk", "checksums"),
    ("cut", "file"),
    ("flip", "file"),
)

_WIRED: tuple[Transport, ...] = ("nixl-tcp", "tcp")
_MOVING = ("rdma", "disk")


class Moment(msgspec.Struct, frozen=True):
    """When the fault happens.

    before: everybody is ready and the target has not begun. built: the target has its services open and builds its
    model. bytes: `fraction` of the model's bytes have been announced as in place. raced: `fraction` of a fifth of a
    second after the target began. loaded: `load()` has returned.
    """

    event: Event
    fraction: float = 0.0

    def __str__(self) -> str:
        if self.event == "bytes":
            return "first bytes" if self.fraction < 0.34 else "half-way" if self.fraction < 0.67 else "last bytes"
        return self.event


class Fault(msgspec.Struct, frozen=True):
    """What happens to whom and when.

    Attributes:
        number: which source is hit, where several serve.
        resumes: when what is stopped or cut off goes on: soon after it was hit, or after the target is done.
        size: how hard, from 0 to 1: room that is left on the disk or in memory, where a file is cut, the bit that is
            flipped, which way a clock jumps.
        same_name: a source that is restarted serves other bytes under the very name; else under another revision.
    """

    kind: Kind
    victim: Victim
    moment: Moment
    number: int = 0
    resumes: Literal["soon", "after"] = "after"
    size: float = 0.5
    same_name: bool = False


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        ways: the strategies of the target, in order.
        peers, kind, transport: how many sources, what they hold, and how they are read.
        registry: where sources are found.
        service: a memory service that holds the weights, or one to which a writer is moving them.
        files: the target's checkpoint; the sources have one of their own.
        named: the weights go by a revision; else by the digest of the files.
        recorded: checksums of the target's files were recorded.
    """

    seed: int
    fault: Fault
    ways: tuple[str, ...]
    size_mib: int
    peers: int = 0
    kind: Literal["layout", "checkpoint"] = "layout"
    transport: Transport = "host"
    registry: Literal["none", "directory", "redis"] = "none"
    service: Literal["none", "committed", "staging"] = "none"
    files: Literal["present", "absent", "broken"] = "present"
    verify: Literal["on", "off", "sampled"] = "on"
    named: bool = True
    recorded: bool = False

    @property
    def wired(self) -> bool:
        """Each source has a network of its own, a cable away from the target."""
        return self.peers > 0 and self.transport in _WIRED

    @property
    def same_port(self) -> bool:
        """A source that comes back can have its old port, since it needs no other: not for Redis, nor for UCX."""
        return self.transport == "tcp" and self.registry == "directory"

    def __str__(self) -> str:
        fault = self.fault
        peers = f"{self.peers} {self.kind} by {self.transport} in {self.registry}" if self.peers else "no peers"
        return (
            f"seed {self.seed}: {fault.kind} {fault.victim} {fault.moment}, {','.join(self.ways)}, {peers}, "
            f"service {self.service}, files {self.files}, verify {self.verify}, {self.size_mib} MiB"
        )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    kind, victim = CASES[seed % len(CASES)]
    chance = random.Random(seed)
    if victim in ("service", "writer", "save"):
        return _with_service(seed, kind, victim, chance)
    if victim in ("file", "checksums"):
        return _with_files(seed, kind, victim, chance)
    return _with_peers(seed, kind, victim, chance)


def _with_peers(seed: int, kind: Kind, victim: Victim, chance: random.Random) -> Scenario:
    wired = kind in ("drop", "black hole", "restart") and victim == "source"
    transport = chance.choice(_WIRED if wired else ("host", "nixl", "nixl-tcp", "tcp"))
    peers = chance.choice((1, 1, 2, 3) if transport in ("host", "tcp") else (1, 2))
    files = chance.choice(("present", "present", "absent", "broken"))
    # Without a name of their own the files have to be there, or nobody knows what to ask for.
    named = files != "present" or chance.random() < 0.7
    registry = {"redis": "redis", "registry": "directory"}.get(victim) or chance.choice(("directory", "redis"))
    memory = kind == "memory"
    return Scenario(
        seed=seed,
        fault=Fault(
            kind,
            victim,
            _moment(chance, ("before",) if (kind, victim) == ("clock jump", "registry") else _EVENTS),
            number=chance.randrange(peers),
            resumes=chance.choice(("soon", "after")),
            size=chance.random(),
            same_name=chance.random() < 0.5,
        ),
        ways=("rdma", "disk"),
        # Small, where every read is a race with what happens to it anyway.
        size_mib=chance.choice((24, 48) if memory else (24, 48, 64)),
        peers=peers,
        kind=chance.choice(("layout", "checkpoint")),
        transport=transport,
        registry=registry,
        files=files,
        verify=chance.choice(("on", "on", "on", "sampled", "off")),
        named=named,
    )


def _with_service(seed: int, kind: Kind, victim: Victim, chance: random.Random) -> Scenario:
    staging = victim == "writer" or (kind == "memory" and victim == "service")
    events: tuple[Event, ...] = ("before", "built", "raced", "loaded")
    if victim == "writer":
        events = ("bytes",)
    elif victim == "save" or kind == "memory":
        events = ("before",)
    files = "present" if kind == "memory" else chance.choice(("present", "present", "absent"))
    return Scenario(
        seed=seed,
        fault=Fault(
            kind, victim, _moment(chance, events), resumes=chance.choice(("soon", "after")), size=chance.random()
        ),
        ways=("gms", "disk"),
        size_mib=chance.choice((24, 48)),
        service="staging" if staging else "committed",
        files=files,
        verify=chance.choice(("on", "on", "off")),
    )


def _with_files(seed: int, kind: Kind, victim: Victim, chance: random.Random) -> Scenario:
    recorded = kind == "flip" and chance.random() < 0.8
    peers = chance.choice((0, 0, 1))
    return Scenario(
        seed=seed,
        fault=Fault(
            kind,
            victim,
            _moment(chance, ("before",) if victim == "checksums" else ("before", "built", "bytes", "raced", "loaded")),
            size=chance.random(),
        ),
        ways=("rdma", "disk") if peers and victim == "file" else ("disk",),
        size_mib=chance.choice((24, 48, 64)),
        peers=peers if victim == "file" else 0,
        transport=chance.choice(("host", "tcp")),
        registry="directory" if peers and victim == "file" else "none",
        verify="on" if recorded else chance.choice(("on", "off")),
        recorded=recorded,
    )


_EVENTS: tuple[Event, ...] = ("before", "built", "bytes", "bytes", "bytes", "raced", "loaded")


def _moment(chance: random.Random, events: tuple[Event, ...]) -> Moment:
    event = chance.choice(events)
    return Moment(event, round(chance.uniform(0.02, 1.0), 3) if event in ("bytes", "raced") else 0.0)
