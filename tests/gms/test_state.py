"""The table of who may stage, read or must wait: every state that three sessions can bring about in eight events."""

from itertools import product

import pytest

from modelexpress.errors import GmsError
from modelexpress.gms.state import Grant, KeyState, Waiter, ask, commit, drop, leave

SESSIONS = (1, 2, 3)
REQUESTS = ("RW", "RO", "RW_OR_RO")
DEPTH = 8


def events(state):
    """Every event that can happen: its name, its session, and the step that it makes."""
    for session, request in product(SESSIONS, REQUESTS):
        if session not in state.sessions:
            yield "ask", session, ask(state, session, request)
    for session in SESSIONS:
        yield "leave", session, leave(state, session)
    if state.writer is not None:
        yield "commit", state.writer, commit(state, state.writer)
    yield "drop", None, drop(state)


def all_steps():
    seen = {KeyState()}
    level = [KeyState()]
    for _ in range(DEPTH):
        following = []
        for state in level:
            for name, session, step in events(state):
                yield state, name, session, step
                if step.state not in seen:
                    seen.add(step.state)
                    following.append(step.state)
        level = following


@pytest.fixture(scope="module")
def steps():
    found = list(all_steps())
    assert len(found) > 2_000
    return found


def holdings(state):
    """What each session reads or stages, as (session, mode, generation)."""
    held = [(state.writer, "stage", state.last)] if state.writer is not None else []
    for each in (*state.superseded, *([state.committed] if state.committed else [])):
        held += [(session, "read", each.generation) for session in each.sessions]
    return held


def test_a_session_waits_or_holds_one_thing(steps):
    for _, _, _, step in steps:
        engaged = [session for session, _, _ in holdings(step.state)]
        engaged += [waiter.session for waiter in step.state.waiters]
        assert len(engaged) == len(set(engaged))
        assert set(engaged) == step.state.sessions


def test_nobody_waits_who_could_be_granted(steps):
    for _, _, _, step in steps:
        for waiter in step.state.waiters:
            assert waiter.request == "RO" or step.state.writer is not None
            assert waiter.request == "RW" or step.state.committed is None


def test_grants_are_what_changed_and_go_to_those_who_asked(steps):
    for before, name, session, step in steps:
        held_before = {each[0] for each in holdings(before)}
        news = {each for each in holdings(step.state) if each[0] not in held_before}
        assert {(each.session, each.mode, each.generation) for each in step.grants} == news
        waited = {waiter.session for waiter in before.waiters} | ({session} if name == "ask" else set())
        assert {each.session for each in step.grants} <= waited


def test_who_left_holds_nothing_and_is_granted_nothing(steps):
    for _, name, session, step in steps:
        if name == "leave":
            assert session not in step.state.sessions
            assert session not in {each.session for each in step.grants}


def test_only_a_commit_or_a_drop_changes_what_is_committed(steps):
    for before, name, _, step in steps:
        generation = before.committed and before.committed.generation
        after = step.state.committed and step.state.committed.generation
        expected = {"commit": before.last, "drop": None}.get(name, generation)
        assert after == expected


def test_generation_numbers_are_never_reused(steps):
    for before, _, _, step in steps:
        staged = [each.generation for each in step.grants if each.mode == "stage"]
        assert staged in ([], [before.last + 1])
        assert step.state.last == max([before.last, *staged])
        kept = [each.generation for each in step.state.superseded]
        kept += [step.state.committed.generation] if step.state.committed else []
        assert len(kept) == len(set(kept))
        assert step.state.writer is None or step.state.last not in kept


def test_readers_keep_their_generation_until_they_leave(steps):
    for before, name, session, step in steps:
        for reader, mode, generation in holdings(before):
            if mode == "read" and (name, session) != ("leave", reader):
                assert (reader, "read", generation) in holdings(step.state)
                assert generation in step.state.generations


def test_a_superseded_generation_lives_as_long_as_a_reader(steps):
    for before, name, session, step in steps:
        assert all(each.sessions for each in step.state.superseded)
        for generation in before.generations - step.state.generations:
            others = [each for each in holdings(before) if each[2] == generation and each[0] != session]
            assert not others or name == "leave"


def test_the_first_who_may_write_is_promoted(steps):
    for before, name, session, step in steps:
        if name == "leave" and session == before.writer:
            asked = [each.session for each in before.waiters if each.request != "RO" and each.session != session]
            staged = [each.session for each in step.grants if each.mode == "stage"]
            assert staged == asked[:1]


def test_what_is_not_possible_is_an_error():
    staged = ask(KeyState(), 1, "RW").state

    with pytest.raises(GmsError, match="asked twice"):
        ask(staged, 1, "RO")
    with pytest.raises(GmsError, match="nothing to commit"):
        commit(staged, 2)


def test_a_writer_that_replaces_leaves_readers_alone():
    state = commit(ask(KeyState(), 1, "RW").state, 1).state
    state = ask(state, 2, "RW").state
    state = ask(state, 3, "RO").state
    assert state.phase == "committed, staged"

    step = commit(state, 2)

    assert step.state.committed.generation == 2
    assert [each.generation for each in step.state.superseded] == [1]
    assert leave(leave(step.state, 1).state, 3).state.generations == {2}


def test_waiters_read_what_the_writer_commits():
    state = ask(KeyState(), 1, "RW_OR_RO").state
    state = ask(ask(state, 2, "RO").state, 3, "RW_OR_RO").state
    assert state.waiters == (Waiter(2, "RO"), Waiter(3, "RW_OR_RO"))

    assert commit(state, 1).grants == (Grant(2, "read", 1), Grant(3, "read", 1))
