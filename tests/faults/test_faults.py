"""Seeded faults among real processes: whatever happens, the bytes are right or there is an error, in time, and nothing is left.

make faults N=200 makes so many runs and shows what was done to whom; make faults SEED=17 makes one again.
"""

from __future__ import annotations

import os

import pytest

from tests.faults import cell
from tests.faults.judge import judge, must_load, summary
from tests.faults.nursery import Nursery
from tests.faults.scenario import CASES, Fault, Moment, Scenario, draw

RUNS = int(os.environ.get("FAULT_RUNS", "30"))
FIRST = int(os.environ.get("FAULT_SEED", "0"))

pytestmark = [pytest.mark.faults, pytest.mark.nixl, pytest.mark.redis, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def nursery():
    reason = cell.why_not()
    if reason is not None:
        pytest.skip(reason)
    with Nursery() as found:
        yield found


def outcome_of(nursery, scenario):
    """The outcome of a run that could be made; else why not, and what everybody had to say."""
    answer = nursery.run(scenario)
    assert answer.broken is None, f"{scenario}\n{answer.broken}\n{logs_of(answer)}"
    return answer.outcome, logs_of(answer)


def logs_of(answer):
    return "\n".join(f"--- {name}\n{text}" for name, text in answer.logs.items())


@pytest.mark.parametrize("seed", [pytest.param(each, id=f"seed={each}") for each in range(FIRST, FIRST + RUNS)])
def test_a_fault_costs_an_error_at_most(nursery, seed, record_property):
    scenario = draw(seed)

    outcome, logs = outcome_of(nursery, scenario)

    record_property("fault", (scenario.fault.kind, scenario.fault.victim, str(scenario.fault.moment), summary(outcome)))
    broken = judge(outcome)
    assert not broken, f"{scenario}\n" + "\n".join(broken) + f"\n{logs}"
    if outcome.impossible is not None:
        pytest.skip(outcome.impossible)


@pytest.mark.parametrize("registry", ["directory", "redis"])
@pytest.mark.parametrize("transport", ["host", "nixl", "nixl-tcp", "tcp"])
def test_without_a_fault_the_first_way_delivers(nursery, transport, registry):
    """A harness in which nothing could be reached would find nothing broken."""
    nothing = Fault("none", "nobody", Moment("built"))
    scenario = Scenario(
        seed=1,
        fault=nothing,
        ways=("rdma", "disk"),
        size_mib=24,
        peers=2,
        kind="layout" if registry == "redis" else "checkpoint",
        transport=transport,
        registry=registry,
        files="absent",
    )

    outcome, logs = outcome_of(nursery, scenario)

    assert judge(outcome) == [], logs
    assert (outcome.result["report"]["strategy"], len(outcome.result["report"]["attempts"])) == ("rdma", 1), logs


def test_without_a_fault_a_service_delivers(nursery):
    nothing = Fault("none", "nobody", Moment("built"))
    scenario = Scenario(
        seed=1, fault=nothing, ways=("gms", "disk"), size_mib=24, service="committed", files="absent"
    )

    outcome, logs = outcome_of(nursery, scenario)

    assert judge(outcome) == [], logs
    assert outcome.result["report"]["strategy"] == "gms", logs


def test_one_round_of_seeds_has_every_fault():
    drawn = [draw(seed).fault for seed in range(len(CASES))]

    assert [(each.kind, each.victim) for each in drawn] == list(CASES)
    assert len(CASES) <= 30
    assert draw(17) == draw(17)


def test_what_has_to_succeed_is_most_of_it():
    """A judge that lets every load fail would find nothing broken."""
    drawn = [draw(seed) for seed in range(200)]

    assert sum(must_load(each) is not None for each in drawn) > 80
