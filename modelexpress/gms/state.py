"""Who may stage, read or must wait, for one key. Pure: a table over frozen states, and no clock.

A *generation* is one complete set of weights. A key has at most one generation being staged, at most one
committed, and any number superseded, which live until their last reader lets go.

    what a session asks for    nothing committed          committed
    RW                         stage                      stage, while readers keep what they have
    RO                         wait for the commit        read
    RW_OR_RO                   stage, or wait             read

RW and RW_OR_RO wait while another session stages. When the writer commits, those who wait to read are granted;
when it goes away without a commit, the first who may write is. A session that is gone is in no state at all,
so that nothing is ever granted to the dead.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from modelexpress.errors import GmsError

Request = Literal["RW", "RO", "RW_OR_RO"]
Phase = Literal["nothing", "staged", "committed", "committed, staged"]


class Waiter(msgspec.Struct, frozen=True):
    """A session that asked and was not granted yet."""

    session: int
    request: Request


class Readers(msgspec.Struct, frozen=True):
    """One generation and the sessions that read it."""

    generation: int
    sessions: frozenset[int] = frozenset()


class KeyState(msgspec.Struct, frozen=True):
    """Everything about one key.

    Attributes:
        last: the number of the newest generation that was ever staged; never reused.
        writer: the session that stages generation `last`.
        committed: what new readers get.
        superseded: replaced or dropped generations that somebody still reads.
        waiters: in the order they came.
    """

    last: int = 0
    writer: int | None = None
    committed: Readers | None = None
    superseded: tuple[Readers, ...] = ()
    waiters: tuple[Waiter, ...] = ()

    @property
    def phase(self) -> Phase:
        """The state in a word, for people."""
        if self.committed is None:
            return "nothing" if self.writer is None else "staged"
        return "committed" if self.writer is None else "committed, staged"

    @property
    def generations(self) -> frozenset[int]:
        """Every generation whose memory must be kept."""
        live = {each.generation for each in self.superseded}
        if self.committed is not None:
            live.add(self.committed.generation)
        if self.writer is not None:
            live.add(self.last)
        return frozenset(live)

    @property
    def sessions(self) -> frozenset[int]:
        """Every session that has or wants something of this key."""
        held = {waiter.session for waiter in self.waiters} | ({self.writer} - {None})
        for each in (*self.superseded, *((self.committed,) if self.committed is not None else ())):
            held |= each.sessions
        return frozenset(session for session in held if session is not None)


class Grant(msgspec.Struct, frozen=True):
    """What a session got: it stages or reads this generation."""

    session: int
    mode: Literal["stage", "read"]
    generation: int


class Step(msgspec.Struct, frozen=True):
    """The state after an event, and who was granted what by it, in order."""

    state: KeyState
    grants: tuple[Grant, ...] = ()


def ask(state: KeyState, session: int, request: Request) -> Step:
    """A session asks. It is granted at once, or waits.

    Raises:
        GmsError: it has or wants something of this key already.
    """
    if session in state.sessions:
        raise GmsError(f"session {session} asked twice for one key; close the first request before the next")
    waiters = (*state.waiters, Waiter(session, request))
    return _settle(msgspec.structs.replace(state, waiters=waiters))


def commit(state: KeyState, session: int) -> Step:
    """The writer's generation becomes the committed one; the writer reads it from now on.

    Raises:
        GmsError: the session stages nothing.
    """
    if state.writer != session:
        raise GmsError(f"session {session} stages nothing, so it has nothing to commit")
    committed = Readers(state.last, frozenset((session,)))
    superseded = _superseded(state)
    return _settle(msgspec.structs.replace(state, writer=None, committed=committed, superseded=superseded))


def leave(state: KeyState, session: int) -> Step:
    """A session lets go of all it has and wants: it closed, aborted or died. No error when that is nothing."""
    return _settle(
        msgspec.structs.replace(
            state,
            writer=None if state.writer == session else state.writer,
            committed=None if state.committed is None else _without(state.committed, session),
            superseded=tuple(left for each in state.superseded if (left := _without(each, session)).sessions),
            waiters=tuple(waiter for waiter in state.waiters if waiter.session != session),
        )
    )


def drop(state: KeyState) -> Step:
    """Nobody new gets the committed generation; those who read it keep it."""
    return _settle(msgspec.structs.replace(state, committed=None, superseded=_superseded(state)))


def _superseded(state: KeyState) -> tuple[Readers, ...]:
    if state.committed is None or not state.committed.sessions:
        return state.superseded
    return (*state.superseded, state.committed)


def _without(readers: Readers, session: int) -> Readers:
    return msgspec.structs.replace(readers, sessions=readers.sessions - {session})


def _settle(state: KeyState) -> Step:
    """Grant whoever can be granted now, in the order they came: the table at the top of this module."""
    grants: list[Grant] = []
    for waiter in state.waiters:
        if waiter.request != "RW" and state.committed is not None:
            generation = state.committed.generation
            readers = Readers(generation, state.committed.sessions | {waiter.session})
            state = msgspec.structs.replace(state, committed=readers)
            grants.append(Grant(waiter.session, "read", generation))
        elif waiter.request != "RO" and state.writer is None:
            state = msgspec.structs.replace(state, writer=waiter.session, last=state.last + 1)
            grants.append(Grant(waiter.session, "stage", state.last))
    granted = {grant.session for grant in grants}
    left = tuple(waiter for waiter in state.waiters if waiter.session not in granted)
    return Step(msgspec.structs.replace(state, waiters=left), tuple(grants))
