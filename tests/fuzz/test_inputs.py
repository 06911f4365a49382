"""The fuzzers reach what they are for: enough of their inputs are nearly right."""

from hypothesis import given, settings
from hypothesis import strategies as st

from modelexpress.errors import ManifestMismatch
from modelexpress.offer import decode_offer
from tests.fuzz.inputs import fuzzed, packed_near, values_near
from tests.fuzz.test_offers import OFFER


def test_some_offers_are_accepted_and_some_are_refused():
    """A fuzzer whose every input is refused at the first byte tests nothing behind it."""
    outcomes = {"accepted": 0, "refused": 0}

    @settings(fuzzed, max_examples=200, derandomize=True)
    @given(packed_near(OFFER))
    def run(data):
        try:
            decode_offer(data)
            outcomes["accepted"] += 1
        except ManifestMismatch:
            outcomes["refused"] += 1

    run()

    assert min(outcomes.values()) > 20, outcomes


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_what_is_valid_stays_as_it_was(data):
    valid = {"a": [1, {"b": 2}]}

    data.draw(values_near(valid))

    assert valid == {"a": [1, {"b": 2}]}
