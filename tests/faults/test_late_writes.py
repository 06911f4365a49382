"""A peer that wakes up after its reader moved on cannot change one byte of the model that was accepted.

Of whole loads among real processes; tests/test_nixl_transport.py and tests/test_tcp_transport.py have the same for one
read, where nothing is loaded over what the read left.
"""

from __future__ import annotations

import pytest

from tests.faults.judge import judge
from tests.faults.scenario import Fault, Moment, Scenario

pytestmark = [pytest.mark.faults, pytest.mark.nixl, pytest.mark.timeout(150)]

# Who can be read while it is stopped: the kernel copies, by our call or by UCX's.
READ_WHILE_STOPPED = ("host", "nixl")


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("transport", ["host", "nixl", "nixl-tcp", "tcp"])
def test_a_stopped_peer_that_goes_on_changes_nothing(run, transport, fraction):
    """Stopped when so much of the model is there; it goes on when the model was accepted, until it is idle."""
    stop = Fault("stop", "source", Moment("bytes", fraction), resumes="after")
    scenario = Scenario(
        seed=int(100 * fraction),
        fault=stop,
        ways=("rdma", "disk"),
        size_mib=96,
        peers=1,
        transport=transport,
        registry="directory",
    )

    outcome, logs = run(scenario)

    assert judge(outcome) == [], logs
    assert outcome.happened
    assert outcome.again == outcome.wanted
    tried = [(each["strategy"], each["outcome"]) for each in outcome.result["report"]["attempts"]][:2]
    if transport in READ_WHILE_STOPPED:
        assert tried[0] == ("rdma", "loaded"), logs
    elif fraction < 0.9:  # what was asked for before may have arrived by then
        assert tried == [("rdma", "failed"), ("disk", "loaded")], logs
    else:
        assert tried[-1][1] == "loaded" or tried[0] == ("rdma", "failed"), logs


@pytest.mark.parametrize("transport", ["nixl-tcp", "tcp"])
def test_a_peer_that_was_cut_off_changes_nothing(run, transport):
    """The same where the source ran all the time, and its cable swallowed what it sent."""
    cut = Fault("black hole", "source", Moment("bytes", 0.3), resumes="after")
    scenario = Scenario(
        seed=1, fault=cut, ways=("rdma", "disk"), size_mib=96, peers=1, transport=transport, registry="directory"
    )

    outcome, logs = run(scenario)

    assert judge(outcome) == [], logs
    assert outcome.again == outcome.wanted
    assert [each["outcome"] for each in outcome.result["report"]["attempts"]][:2] == ["failed", "loaded"], logs
