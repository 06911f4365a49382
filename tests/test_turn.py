"""When a target waits for a source, and when it has waited long enough."""

from __future__ import annotations

import random

from modelexpress.registry.base import FoundSource
from modelexpress.strategies.turn import Turn, is_idle, patience_s
from tests.support.registry_process import record_of

NBYTES = record_of("0" * 32).nbytes
LONG_S = patience_s(NBYTES) + 0.1


def found(*readers):
    return [FoundSource(record_of(f"{number:032x}"), each) for number, each in enumerate(readers)]


def test_nothing_that_moves_raises_the_limit():
    """Every look shows another picture: the fleet is being filled."""
    turn = Turn(1)

    assert {turn.limit_of(found(*[1] * (count % 7 + 1)), count * LONG_S) for count in range(50)} == {1}


def test_where_nothing_moves_more_readers_are_let_in_step_by_step():
    turn = Turn(1)

    limits = [turn.limit_of(found(1, 1), at * LONG_S) for at in range(5)]

    assert limits == [1, 2, 4, 8, 16]


def test_a_change_starts_the_patience_anew():
    turn = Turn(2)
    turn.limit_of(found(2), 0)

    assert turn.limit_of(found(2), LONG_S * 0.9) == 2
    assert turn.limit_of(found(2, 2), LONG_S * 1.1) == 2
    assert turn.limit_of(found(2, 2), LONG_S * 1.9) == 2
    assert turn.limit_of(found(2, 2), LONG_S * 2.2) == 4


def test_large_weights_may_take_longer():
    assert patience_s(100_000_000_000) > 50 * patience_s(0)


def test_a_slow_registry_is_asked_less_often_and_no_two_targets_ask_in_step():
    one, other = Turn(1, random.Random(1)), Turn(1, random.Random(2))

    assert one.pause_s(0.0) != other.pause_s(0.0)
    assert 0.05 <= one.pause_s(0.0) <= 0.15
    assert 0.5 <= one.pause_s(0.05) <= 1.5
    assert 1.0 <= one.pause_s(60.0) <= 3.0


def test_idle_is_where_nobody_reads():
    assert is_idle(found(0, 0))
    assert not is_idle(found(0, 1))
