"""Seeded faults among real processes: whatever happens, bytes are right or there is an error, in time.

make faults N=200 makes so many runs and shows what was done to whom; make faults SEED=17 makes one again.
"""

from __future__ import annotations

import os

import pytest

from tests.faults.judge import judge, must_load, summary
from tests.faults.scenario import CASES, Fault, Moment, Scenario, draw

RUNS = int(os.environ.get("FAULT_RUNS", "30"))
FIRST = int(os.environ.get("FAULT_SEED", "0"))

pytestmark = [pytest.mark.faults, pytest.mark.nixl, pytest.mark.redis, pytest.mark.timeout(150)]


@pytest.mark.parametrize("seed", [pytest.param(each, id=f"seed={each}") for each in range(FIRST, FIRST + RUNS)])
def test_a_fault_costs_an_error_at_most(run, seed, record_property):
    scenario = draw(seed)

    outcome, logs = run(scenario)

    record_property("fault", (scenario.fault.kind, scenario.fault.victim, str(scenario.fault.moment), summary(outcome)))
    broken = judge(outcome)
    assert not broken, f"{scenario}\n" + "\n".join(broken) + f"\n{logs}"
    if outcome.impossible is not None:
        pytest.skip(outcome.impossible)


@pytest.mark.parametrize("registry", ["directory", "redis"])
@pytest.mark.parametrize("transport", ["host", "nixl", "nixl-tcp", "tcp"])
def test_without_a_fault_the_first_way_delivers(run, transport, registry):
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

    outcome, logs = run(scenario)

    assert judge(outcome) == [], logs
    tried = outcome.result["report"]["attempts"]
    assert [(each["strategy"], each["outcome"]) for each in tried] == [("rdma", "loaded")], logs


def test_without_a_fault_a_service_delivers(run):
    nothing = Fault("none", "nobody", Moment("built"))
    scenario = Scenario(seed=1, fault=nothing, ways=("gms", "disk"), size_mib=24, service="committed", files="absent")

    outcome, logs = run(scenario)

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
