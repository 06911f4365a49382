"""What a memory service holds: keys, their generations, and the segments of each. Safe for many threads.

Who may do what is decided in `state`; this module keeps the memory of every generation that a state names, and
lets go of every other. Descriptors are closed, and segments reserved, while the lock is free: for 100 GB either
takes seconds, in which every other session goes on.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import msgspec

from modelexpress.errors import GmsError
from modelexpress.gms import state as states
from modelexpress.gms.memory import MemoryBackend
from modelexpress.gms.protocol import MAX_SEGMENTS, KeyStatus, StatusReply
from modelexpress.gms.state import Grant, KeyState, Request, Step

logger = logging.getLogger(__name__)


# What no quota counts, because it lies in the service itself. A manifest takes about 100 bytes a tensor.
MAX_KEYS = 10_000
MAX_BODIES_NBYTES = 1024 * 1024 * 1024


class Refusal(GmsError):
    """What was asked for cannot be had. The session may go on; `kind` is that of the `Refused` it gets."""

    def __init__(self, kind: Literal["busy", "missing", "memory", "protocol"], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Session(Protocol):
    """A connected client, as the store needs it. No id is used twice. Methods are called under the store's lock."""

    @property
    def id(self) -> int: ...

    @property
    def pid(self) -> int: ...

    def is_gone(self) -> bool:
        """Whether the client hung up. Never waits."""

    def wake(self) -> None:
        """There is a grant for it now. Never waits, never fails."""


class Name(msgspec.Struct, frozen=True):
    """Which weights: a key within a namespace."""

    namespace: str
    key: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.key}"


class Segment(msgspec.Struct, frozen=True):
    """Memory of the store; readers get a copy of the descriptor. `charged_nbytes` is what it takes from the quota."""

    fd: int
    nbytes: int
    charged_nbytes: int


class Generation(msgspec.Struct, frozen=True):
    """One complete set of weights, or what is there of it yet."""

    segments: tuple[Segment, ...] = ()
    label: str = ""
    body: bytes = b""

    @property
    def nbytes(self) -> int:
        """Memory of all segments."""
        return sum(segment.charged_nbytes for segment in self.segments)


class Granted(msgspec.Struct, frozen=True):
    """A grant, and when it was given: `time.monotonic()`."""

    grant: Grant
    since: float


class Store:
    """Every key of one service.

    Args:
        quota_nbytes: the most that all segments of all generations may have together; None: what the machine has.
    """

    def __init__(self, backend: MemoryBackend, *, quota_nbytes: int | None) -> None:
        self.instance = secrets.token_hex(8)
        self.device = backend.device
        self._backend = backend
        self._quota_nbytes = quota_nbytes
        self._lock = threading.Condition()
        self._allocating = threading.Lock()
        self._states: dict[Name, KeyState] = {}
        self._kept: dict[tuple[Name, int], Generation] = {}
        self._sessions: dict[int, tuple[Session, Name]] = {}
        self._granted: dict[int, Granted] = {}
        self._used_nbytes = 0
        self._freeing = 0  # generations whose descriptors are being closed
        self._last_forgotten = 0  # no key that is forgotten and comes back repeats a number

    def ask(self, session: Session, name: Name, request: Request) -> None:
        """Queue for a key, once in a session's life; `granted` says when it is this session's turn.

        Raises:
            Refusal: there are too many keys already.
        """
        with self._lock:
            if name not in self._states and len(self._states) >= MAX_KEYS:
                raise Refusal("memory", f"the service has {len(self._states):,} keys, the most it takes; drop some")
            self._sessions[session.id] = session, name
        self._change(name, lambda state: states.ask(state, session.id, request))

    def granted(self, session: Session) -> Grant | None:
        """What the session holds now, if anything."""
        with self._lock:
            found = self._granted.get(session.id)
        return None if found is None else found.grant

    def give_up(self, session: Session, *, waited_s: float) -> Grant:
        """Wait no longer. A grant that came at the last moment is returned.

        Raises:
            Refusal: there is none; the session has left, and the reason says who is in the way.
        """
        with self._lock:
            if session.id in self._granted:
                return self._granted[session.id].grant
            _, name = self._sessions[session.id]
            refusal = self._why_not(name, waited_s)
        self.leave(session)
        raise refusal

    def leave(self, session: Session) -> None:
        """The session is over: all that it holds and wants is given back. No error when that is nothing."""
        with self._lock:
            found = self._sessions.get(session.id)
        if found is not None:
            self._change(found[1], lambda state: states.leave(state, session.id), leaving=session)

    def allocate(self, session: Session, nbytes: int) -> Segment:
        """A new segment of the generation that the session stages.

        Raises:
            Refusal: quota or memory is short; states need and free. Nothing was changed.
        """
        if nbytes <= 0:
            raise Refusal("protocol", f"a segment of {nbytes:,} bytes; it needs at least 1")
        # One at a time: two that each fit in what is free need not fit together.
        with self._allocating:
            charged_nbytes = -(-nbytes // self._backend.granularity) * self._backend.granularity
            place = self._reserve(session, nbytes, charged_nbytes)
            try:
                segment = Segment(self._backend.allocate(nbytes), nbytes, charged_nbytes)
            except BaseException as exc:
                with self._lock:
                    self._used_nbytes -= charged_nbytes
                if isinstance(exc, GmsError):
                    raise Refusal("memory", str(exc)) from exc
                raise
        with self._lock:
            staged = self._kept[place]
            self._kept[place] = msgspec.structs.replace(staged, segments=(*staged.segments, segment))
        return segment

    def release(self, session: Session, at: int) -> None:
        """Give back a segment of the generation that the session stages; `at` is its place among them.

        Raises:
            Refusal: there is no such segment.
        """
        with self._lock:
            place = self._staged_by(session)
            staged = self._kept[place]
            if not 0 <= at < len(staged.segments):
                raise Refusal("protocol", f"segment {at} of {len(staged.segments)} cannot be released")
            kept = staged.segments[:at] + staged.segments[at + 1 :]
            self._kept[place] = msgspec.structs.replace(staged, segments=kept)
            self._freeing += 1
        self._free([Generation(staged.segments[at : at + 1])])

    def commit(self, session: Session, label: str, body: bytes) -> int:
        """Seal what the session staged, and make it what new readers get. Returns the generation.

        Raises:
            Refusal: a segment cannot be sealed, or there is no room for the body; the generation stays staged.
        """
        with self._lock:
            name, number = place = self._staged_by(session)
            staged = self._kept[place]
            bodies_nbytes = len(body) + sum(len(each.body) for each in self._kept.values())
            if bodies_nbytes > MAX_BODIES_NBYTES:
                raise Refusal(
                    "memory",
                    f"the descriptions of all generations would take {bodies_nbytes:,} bytes, and at most "
                    f"{MAX_BODIES_NBYTES:,} are kept; drop a key",
                )
        try:
            for segment in staged.segments:
                self._backend.seal(segment.fd, segment.nbytes)
        except GmsError as exc:
            raise Refusal("memory", str(exc)) from exc
        with self._lock:
            self._kept[place] = msgspec.structs.replace(staged, label=label, body=body)
        self._change(name, lambda state: states.commit(state, session.id))
        with self._lock:
            self._granted[session.id] = Granted(Grant(session.id, "read", number), time.monotonic())
        logger.info(
            "%s: pid %d committed generation %d (%s), %d segments, %.3f GB",
            name, session.pid, number, label, len(staged.segments), staged.nbytes / 1e9,
        )  # fmt: skip
        return number

    def read_by(self, session: Session) -> Generation:
        """The generation that the session reads; its descriptors stay open until the session leaves."""
        with self._lock:
            _, name = self._sessions[session.id]
            return self._kept[name, self._granted[session.id].grant.generation]

    def drop(self, name: Name) -> None:
        """Nobody new finds the committed generation.

        Raises:
            Refusal: there is none.
        """

        def dropped(state: KeyState) -> Step:
            if state.committed is None:
                raise Refusal("missing", f"nothing is committed for {name}")
            return states.drop(state)

        self._change(name, dropped)
        logger.info("%s: dropped", name)

    def status(self, *, sessions: int) -> StatusReply:
        """What there is, for people."""
        with self._lock:
            return StatusReply(
                pid=os.getpid(),
                device=self.device,
                quota_nbytes=self._quota_nbytes or 0,
                used_nbytes=self._used_nbytes,
                sessions=sessions,
                keys=tuple(self._key_status(name, state) for name, state in self._states.items()),
            )

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing is granted or given back meanwhile."""
        with self._lock:
            yield

    def close(self) -> None:
        """Free everything. No session may use the store any more."""
        with self._lock:
            generations = [self._kept.pop(place) for place in list(self._kept)]
            self._states.clear()
            self._freeing += len(generations)
        self._free(generations)

    def _change(self, name: Name, event: Callable[[KeyState], Step], *, leaving: Session | None = None) -> None:
        """The one way from a state to the next: the dead out, the event, grants told, memory freed."""
        with self._lock:
            state = self._states.get(name) or KeyState(last=self._last_forgotten)
            for waiter in state.waiters:
                if self._sessions[waiter.session][0].is_gone():
                    state = states.leave(state, waiter.session).state
            step = event(state)
            freed = self._adopt(name, step)
            if leaving is not None:
                del self._sessions[leaving.id]
                self._granted.pop(leaving.id, None)
            self._freeing += len(freed)
        self._free([generation for _, generation in freed])
        for number, generation in freed:
            logger.info("%s: freed generation %d, %.3f GB", name, number, generation.nbytes / 1e9)

    def _adopt(self, name: Name, step: Step) -> list[tuple[int, Generation]]:
        """Make this the state of a key; returns the generations that nothing needs any more."""
        for grant in step.grants:
            if grant.mode == "stage":
                self._kept[name, grant.generation] = Generation()
            self._granted[grant.session] = Granted(grant, time.monotonic())
            self._sessions[grant.session][0].wake()
        self._states[name] = step.state
        needed = step.state.generations
        if not needed and not step.state.sessions:
            self._last_forgotten = max(self._last_forgotten, step.state.last)
            del self._states[name]
        unneeded = [place for place in self._kept if place[0] == name and place[1] not in needed]
        return [(place[1], self._kept.pop(place)) for place in unneeded]

    def _free(self, generations: list[Generation]) -> None:
        for generation in generations:
            for segment in generation.segments:
                os.close(segment.fd)
            with self._lock:
                self._used_nbytes -= generation.nbytes
                self._freeing -= 1
                self._lock.notify_all()

    def _reserve(self, session: Session, nbytes: int, need: int) -> tuple[Name, int]:
        """Count a segment before it is there; returns which generation it is for."""
        with self._lock:
            place = self._staged_by(session)
            # The memory of the writer before this one may be on its way back.
            self._lock.wait_for(lambda: not self._freeing)
            if len(self._kept[place].segments) >= MAX_SEGMENTS:
                raise Refusal("protocol", f"a generation has at most {MAX_SEGMENTS:,} segments; make them larger")
            if self._quota_nbytes is not None and self._used_nbytes + need > self._quota_nbytes:
                free = self._quota_nbytes - self._used_nbytes
                raise Refusal(
                    "memory",
                    f"a segment of {nbytes:,} bytes does not fit: {free:,} of the quota of "
                    f"{self._quota_nbytes:,} bytes are free; drop a key, or raise the quota",
                )
            self._used_nbytes += need
            return place

    def _staged_by(self, session: Session) -> tuple[Name, int]:
        granted = self._granted.get(session.id)
        if granted is None or granted.grant.mode != "stage":
            raise Refusal("protocol", "this session stages nothing")
        return self._sessions[session.id][1], granted.grant.generation

    def _why_not(self, name: Name, waited_s: float) -> Refusal:
        writer = self._states.get(name, KeyState()).writer
        waited = f"after {waited_s:.1f} s" if waited_s else "and the request does not wait"
        if writer is None:
            return Refusal("missing", f"nothing is committed for {name}, and nobody stages it, {waited}")
        since = time.monotonic() - self._granted[writer].since
        holder = self._sessions[writer][0].pid
        return Refusal("busy", f"{name} is being staged by pid {holder}, for {since:.1f} s now, {waited}")

    def _key_status(self, name: Name, state: KeyState) -> KeyStatus:
        kept = {number: each for (owner, number), each in self._kept.items() if owner == name}
        committed = state.committed
        shown = Generation() if committed is None else kept[committed.generation]
        return KeyStatus(
            namespace=name.namespace,
            key=name.key,
            label=shown.label,
            phase=state.phase,
            generation=None if committed is None else committed.generation,
            nbytes=sum(each.nbytes for each in kept.values()),
            segments=len(shown.segments),
            readers=0 if committed is None else len(committed.sessions),
            waiting=len(state.waiters),
            superseded=len(state.superseded),
        )
