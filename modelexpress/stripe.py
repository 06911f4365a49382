"""Stripe: sources of the same bytes, read side by side as if they were one.

Every source has a thread, which connects and then takes chunks while there are any: the faster source moves more, a
slow one costs its share only. Who goes away gives back what it had not finished, and the others move that; nothing
that has arrived is moved again. The record of what arrived belongs to one `read`, and is gone with it.

Which chunks count:

| what happened to their source | its chunks of this read |
|---|---|
| its generation still stands when all chunks are there; one source's must | count |
| it died, stalled or closed while it was read | those that were announced count: each was proven after it was copied, or its checksum was right |
| it sent a wrong byte, or its generation does not stand any more | are moved again from the others |

Same bytes: the same key in the registry, the same layout, and the same checksums. Sources without checksums cannot
show that they are alike, and are read alone.
"""  # noqa: E501 - a table

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Literal, Self

import msgspec

from modelexpress.errors import (
    ModelExpressError,
    RecoveryFailed,
    RegistryError,
    StrategyError,
    TransferFailed,
    VerificationFailed,
)
from modelexpress.lanes import GRACE_S, left
from modelexpress.manifest import Manifest
from modelexpress.offer import Offer
from modelexpress.plan import Chunk, TransferPlan
from modelexpress.thread_name import name_this_thread
from modelexpress.transport import Arrived, Connection, Moved, Work

# When nothing else is left, a source may take this long for a chunk, or four times as long as the slowest chunk so
# far. 16 MiB in a second is less than any network worth reading from moves.
_STRAGGLER_S = 1.0
_STRAGGLER_TIMES = 4.0

# How long a source that has nothing left to move may take to say that its registration is still open.
_LAST_WORD_S = 0.5

_CLOSING_S = 2.0  # for threads to leave: an agent is destroyed in 0.2 s, and who is only connecting writes nothing
_LOOK_S = 0.05  # between two looks for stragglers


@dataclass(frozen=True, slots=True)
class Session:
    """One source, connected and with its lease held. `confirm` raises when its generation does not stand any more."""

    offer: Offer
    connection: Connection
    confirm: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Lost:
    """Why and when a source was given up. Kind and text, never the exception: those keep frames.

    `nbytes` is what it delivered that counts, `seconds` from the beginning of the stripe.
    """

    source: str
    kind: type[ModelExpressError]
    text: str
    nbytes: int
    seconds: float

    def again(self, source: str) -> ModelExpressError:
        """What to raise where `source` is being tried."""
        return self.kind(self.text if source == self.source else f"{self.source}: {self.text}")


@dataclass(frozen=True, slots=True)
class Share:
    """What one source delivered, and by which transport."""

    source: str
    transport: str
    nbytes: int


@dataclass(slots=True, eq=False)
class _Member:
    """One source, as its thread and the reader see it. Changes only under the stripe's lock."""

    name: str
    state: Literal["spare", "connecting", "serving", "over"] = "spare"
    since: float = 0.0  # of connecting
    stop: threading.Event = field(default_factory=threading.Event)
    session: Session | None = None
    work: Work | None = None  # while it reads
    cut_off: bool = False
    nbytes: int = 0
    transport: str = ""


class Stripe:
    """Connects to every source while the block runs, and reads from those that serve the same bytes.

    Used by one thread.

    Args:
        sources: names, the preferred one first.
        connect: holds a session with a source; gives up soon when the event is set.
        deadline: a `time.monotonic()` moment.
        width: how many to connect to at once; all by default. The others are spare: each takes the place of one that
            is lost or holds everybody up.
    """

    def __init__(
        self,
        sources: Sequence[str],
        connect: Callable[[str, threading.Event], AbstractContextManager[Session]],
        *,
        deadline: float,
        width: int | None = None,
    ) -> None:
        self._connect = connect
        self._deadline = deadline
        self._width = len(sources) if width is None else width
        self._started = time.monotonic()
        self._lock = threading.RLock()  # taken by itself: an interrupt inside Condition.__enter__ would leave it taken
        self._changed = threading.Condition(self._lock)
        self._members = tuple(_Member(each) for each in sources)
        self._threads: list[threading.Thread] = []
        self._offer: Offer | None = None
        self._first: _Member | None = None
        self._lost: list[tuple[_Member, Lost]] = []
        self._read: _Read | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def first(self) -> str | None:
        """The source that said which bytes are read."""
        return self._first.name if self._first is not None else None

    @property
    def lost(self) -> tuple[Lost, ...]:
        """The sources that were given up so far, in that order."""
        with self._lock:
            return tuple(dataclasses.replace(lost, nbytes=member.nbytes) for member, lost in self._lost)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Who delivered how much of what was read, the largest first."""
        shares = [Share(each.name, each.transport, each.nbytes) for each in self._members if each.transport]
        return tuple(sorted(shares, key=lambda share: -share.nbytes))

    def offer(self) -> Offer:
        """What the first source that could be reached offers, and every other one that is read with it.

        Raises: what the preferred source raised, when none could be reached.
        """
        with self._lock:
            while self._offer is None:
                self._raise_failure()
                if all(each.state == "over" for each in self._members):
                    raise self._nobody_left()
                connecting = [each.since for each in self._members if each.state == "connecting"]
                if connecting and time.monotonic() - max(connecting) > _STRAGGLER_S:
                    self._start_spare()
                self._changed.wait(_LOOK_S if self._spare is not None else None)
            return self._offer

    def read(self, plan: TransferPlan, *, arrived: Arrived | None = None, moved: Moved | None = None) -> None:
        """Fill the plan's target memory; `plan.source` is the manifest of `offer`, or some tensors of it.

        `arrived` and `moved` as in Connection.read; a chunk that is moved again is announced again. A
        StrategyError that they raise ends the read of its source, anything else goes up. When this returns,
        every source has confirmed its generation or was lost, and one at least has confirmed. When it returns
        or raises, nothing will write to the target memory any more.

        Raises:
            StrategyError, RegistryError: no source is left; what ended the preferred one.
            RecoveryFailed: a source cannot prove that its read is over, so the memory must not be used.
        """
        read = _Read(plan, arrived, moved)
        with self._lock:
            self._read = read
            self._changed.notify_all()
        try:
            self._wait_for(read)
            while self._doubt(read):
                self._wait_for(read)
        finally:
            self._end(read)

    def stop(self) -> None:
        """Tell every thread that it is over, without waiting for them. Safe to call twice, from any thread."""
        with self._lock:
            self._closed = True
            for member in self._members:
                member.stop.set()
            self._changed.notify_all()

    def close(self) -> None:
        """End what still runs. Safe to call twice.

        Raises:
            RecoveryFailed: a source's connection could not be closed.
        """
        self.stop()
        until = time.monotonic() + _CLOSING_S
        while self._threads:
            self._threads.pop().join(left(until))
        with self._lock:
            self._raise_failure()

    def __enter__(self) -> Self:
        with self._lock:
            for _ in range(self._width):
                self._start_spare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # In the reader's thread

    def _wait_for(self, read: _Read) -> None:
        """Until every chunk is there and nobody is reading."""
        with self._lock:
            while True:
                self._raise_failure()
                reading = [each for each in self._members if each.work is not None]
                if read.complete and not reading:
                    return
                if not reading and all(each.state == "over" for each in self._members):
                    raise self._nobody_left()
                if not reading and time.monotonic() > self._deadline:
                    raise TransferFailed(f"deadline passed {read}")
                self._cut_off_stragglers(read)
                self._changed.wait(_LOOK_S)

    def _cut_off_stragglers(self, read: _Read) -> None:
        """Take their last chunks from sources that hold everybody up, as long as there is somebody to move them."""
        now = time.monotonic()
        if read.complete:
            if now > read.complete_at + _LAST_WORD_S:
                for each in self._members:
                    if each.work is not None:
                        each.work.stop()
            return
        busy = read.busy()
        late = max(_STRAGGLER_S, _STRAGGLER_TIMES * read.slowest_s)
        stragglers = [each for each, since in busy.items() if now - since > late and each.work is not None]
        if stragglers and not any(each.state == "connecting" for each in self._members):
            self._start_spare()
        idle = any(each.state == "serving" and not each.cut_off and each not in busy for each in self._members)
        if read.left or not idle:
            return
        for member in stragglers:
            if member.work is not None:
                member.cut_off = True
                member.work.stop()

    def _doubt(self, read: _Read) -> bool:
        """Have every source that serves confirm its generation; one at least must, or nobody vouches for the bytes of
        those that were lost. True when some of the work is to be done again.
        """
        with self._lock:
            serving = [(each, each.session) for each in self._members if each.state == "serving" and each.session]
        confirmed = 0
        for member, session in serving:
            try:
                session.confirm()
                confirmed += 1
            except (StrategyError, RegistryError) as exc:
                self._lose(member, exc, keep=False)
        if not confirmed:
            with self._lock:
                if all(each.state == "over" for each in self._members):
                    raise self._nobody_left()
                self._changed.wait(_LOOK_S)  # for those that are being connected
            return True
        return not read.complete

    def _end(self, read: _Read) -> None:
        """Stop who still reads, and see that they have."""
        with self._lock:
            read.closed = True
            for each in self._members:
                if each.work is not None:
                    each.work.stop()
            until = time.monotonic() + GRACE_S + _CLOSING_S
            while any(each.work is not None for each in self._members) and left(until):
                self._changed.wait(left(until))
            stuck = [each.name for each in self._members if each.work is not None]
            self._read = None
            if stuck:
                raise RecoveryFailed(
                    f"the read of {', '.join(stuck)} did not end {read}; it may still write, so the target memory "
                    "must not be used again"
                )
            for number, member in read.done.items():
                member.nbytes += read.chunks[number].nbytes

    @property
    def _spare(self) -> _Member | None:
        return next((each for each in self._members if each.state == "spare"), None)

    def _start_spare(self) -> None:
        """Begin to connect to one more source, where there is one. Under the lock."""
        member = self._spare
        if member is None or self._closed:
            return
        member.state, member.since = "connecting", time.monotonic()
        thread = threading.Thread(target=self._run, args=(member,), name="mx-source", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _nobody_left(self) -> ModelExpressError:
        preferred = self._members[0].name
        found = [lost for _, lost in self._lost]
        return next((each for each in found if each.source == preferred), found[0]).again(preferred)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # the exception holds this frame

    # In the thread of a source

    def _run(self, member: _Member) -> None:
        name_this_thread("mx-source")
        try:
            with self._connect(member.name, member.stop) as session:
                self._admit(member, session)
                while (read := self._next_read(member)) is not None:
                    self._take_part(member, session, read)
        except (StrategyError, RegistryError) as exc:
            self._lose(member, exc)
        except BaseException as exc:  # noqa: BLE001 - the outermost line of a thread; it goes up in the reader's
            self._fail(exc)
        with self._lock:
            member.state = "over"
            member.session = None
            self._changed.notify_all()

    def _admit(self, member: _Member, session: Session) -> None:
        """The first source says which bytes are read; the others are read, too, where they have the same."""
        with self._lock:
            if self._offer is None:
                self._offer, self._first = session.offer, member
            if self._offer is session.offer or _alike(self._offer, session.offer):
                member.state = "serving"
                member.session = session
                member.transport = session.connection.transport
            else:
                member.state = "over"
                self._start_spare()
            self._changed.notify_all()

    def _next_read(self, member: _Member) -> _Read | None:
        """Wait for chunks to move; None when there will be none for this source."""
        with self._lock:
            while not self._closed and member.state == "serving":
                read = self._read if self._failure is None else None
                if read is not None and read.has_work_for(member):
                    member.work = _Taken(self._lock, read, member)
                    return read
                self._changed.wait(_LOOK_S if read is not None and read.left else None)
            return None

    def _take_part(self, member: _Member, session: Session, read: _Read) -> None:
        try:
            session.connection.read(
                read.plan_from(session.offer.manifest),
                deadline=self._deadline,
                arrived=partial(self._arrived, member, read),
                moved=read.moved,
                work=member.work,
            )
        except StrategyError as exc:
            self._lose(member, exc, keep=not isinstance(exc, VerificationFailed))
        except BaseException as exc:  # noqa: BLE001 - before any chunk is given back: the memory may not be safe
            self._fail(exc)
        if member.cut_off and member.state == "serving":
            self._lose(member, TransferFailed(f"its read ended {read}"))
        with self._lock:
            read.give_back(member)
            member.work = None
            self._changed.notify_all()

    def _arrived(self, member: _Member, read: _Read, chunk: Chunk) -> None:
        if read.arrived is not None:
            read.arrived(chunk)
        with self._lock:
            read.finish(chunk, member)
            if read.complete:
                self._changed.notify_all()

    def _lose(self, member: _Member, exc: ModelExpressError, *, keep: bool = True) -> None:
        """Give a source up; `keep`: what it delivered of the present read stays."""
        with self._lock:
            member.state = "over"
            if self._closed:
                return
            text = str(exc)
            if member.cut_off:
                text = f"was left behind: it held a chunk when the others had moved everything else ({text})"
            self._start_spare()
            seconds = time.monotonic() - self._started
            self._lost.append((member, Lost(member.name, type(exc), text, 0, seconds)))
            if self._read is not None:
                self._read.give_back(member, finished=not keep)
            self._changed.notify_all()

    def _fail(self, exc: BaseException) -> None:
        with self._lock:
            if self._failure is None or isinstance(exc, RecoveryFailed):
                self._failure = exc
            if self._read is not None:
                self._read.closed = True
            self._changed.notify_all()


class _Read:
    """One read of the stripe: which chunks are left, taken, done, and by whom. Used under the stripe's lock."""

    def __init__(self, plan: TransferPlan, arrived: Arrived | None, moved: Moved | None) -> None:
        self.arrived = arrived
        self.moved = moved
        self.closed = False
        self.chunks = {_number(chunk): chunk for chunk in plan.chunks}
        self.left = deque(self.chunks)
        self.done: dict[int, _Member] = {}
        self.slowest_s = 0.0
        self.complete_at = time.monotonic()
        self._plan = plan
        self._taken: dict[int, tuple[_Member, float]] = {}
        self._paces: dict[_Member, _Pace] = {}

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.chunks)

    def plan_from(self, source: Manifest) -> TransferPlan:
        """The plan with the addresses of another source of the same layout."""
        here = msgspec.structs.replace(self._plan.source, storages=source.storages)
        return msgspec.structs.replace(self._plan, source=here)

    def has_work_for(self, member: _Member) -> bool:
        """Whether a chunk is left that the others would not have moved, too, by the time that `member` has.

        Without this a slow source begins a last chunk for which all others wait. The fastest always has work.
        """
        if self.closed or not self.left:
            return False
        others = [pace for other, pace in self._paces.items() if other is not member and other.state == "serving"]
        mine = self._paces.get(member)
        if mine is None or not mine.chunks or not any(pace.chunks for pace in others):
            return True
        now = time.monotonic()
        per_s = sum(pace.chunks / (now - pace.since) for pace in others)
        return mine.chunk_s <= len(self.left) / per_s + min(pace.chunk_s for pace in others if pace.chunks)

    def take(self, member: _Member) -> Chunk | None:
        if not self.has_work_for(member):
            return None
        number = self.left.popleft()
        now = time.monotonic()
        self._taken[number] = (member, now)
        self._paces.setdefault(member, _Pace(now))
        return self.chunks[number]

    def finish(self, chunk: Chunk, member: _Member) -> None:
        _, since = self._taken.pop(_number(chunk))
        self.done[_number(chunk)] = member
        self.complete_at = time.monotonic()
        self.slowest_s = max(self.slowest_s, self.complete_at - since)
        self._paces[member].count(self.complete_at - since)

    def give_back(self, member: _Member, *, finished: bool = False) -> None:
        """What `member` has taken and not finished is left again; with `finished`, what it finished, too."""
        lost = [number for number, (taker, _) in self._taken.items() if taker is member]
        lost += [number for number, deliverer in self.done.items() if finished and deliverer is member]
        for number in lost:
            self._taken.pop(number, None)
            self.done.pop(number, None)
        self.left.extendleft(sorted(lost, reverse=True))

    def busy(self) -> dict[_Member, float]:
        """Who holds chunks, and since when it holds the oldest."""
        oldest: dict[_Member, float] = {}
        for member, since in self._taken.values():
            oldest[member] = min(since, oldest.get(member, since))
        return oldest

    def __str__(self) -> str:
        return f"after {len(self.done)} of {len(self.chunks)} chunks"


@dataclass(slots=True)
class _Pace:
    """How fast a source is: chunks since its first was taken, and the mean time that one takes."""

    since: float
    chunks: int = 0
    chunk_s: float = 0.0

    def count(self, seconds: float) -> None:
        self.chunks += 1
        self.chunk_s += (seconds - self.chunk_s) / self.chunks


class _Taken(Work):
    """The chunks of a read, as one source takes them."""

    def __init__(self, lock: threading.RLock, read: _Read, member: _Member) -> None:
        super().__init__(())
        self._lock = lock
        self._read = read
        self._member = member

    def take(self) -> Chunk | None:
        with self._lock:
            return None if self.stopped else self._read.take(self._member)


def _number(chunk: Chunk) -> int:
    """What tells a chunk from the others of its plan: the first checksum under it."""
    return chunk.pieces[0][0]


def _alike(one: Offer, other: Offer) -> bool:
    """Whether two sources of one key serve the same bytes in one layout."""
    return bool(one.checksums) and one.checksums == other.checksums and _layout(one.manifest) == _layout(other.manifest)


def _layout(manifest: Manifest) -> tuple[object, ...]:
    return [each.nbytes for each in manifest.storages], manifest.tensors, manifest.scalars
