"""The process that forks, once for all runs; and what was done to whom, in a table at the end."""

from __future__ import annotations

from collections import Counter

import pytest

from modelexpress.terminal import add_row, console, table_of
from tests.faults import cell
from tests.faults.nursery import Nursery


@pytest.fixture(scope="session")
def nursery():
    reason = cell.why_not()
    if reason is not None:
        pytest.skip(reason)
    with Nursery() as found:
        yield found


@pytest.fixture
def run(nursery):
    """Makes a run that can be made: its outcome, and what everybody had to say."""

    def run_one(scenario):
        answer = nursery.run(scenario)
        logs = "\n".join(f"--- {name}\n{text}" for name, text in answer.logs.items())
        assert answer.broken is None, f"{scenario}\n{answer.broken}\n{logs}"
        return answer.outcome, logs

    return run_one


def pytest_terminal_summary(terminalreporter):
    """One row for each kind of fault, victim and moment: how often, and how the loads ended."""
    reports = [each for which in ("passed", "failed", "skipped") for each in terminalreporter.getreports(which)]
    found = [(dict(each.user_properties)["fault"], each.outcome) for each in reports if _has_fault(each)]
    if not found:
        return
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for (kind, victim, moment, ended), outcome in found:
        rows.setdefault((kind, victim, moment), Counter())[ended if outcome != "failed" else f"BROKEN {ended}"] += 1
    table = table_of("fault", "victim", "moment", "runs", "how the load ended")
    for (kind, victim, moment), ends in sorted(rows.items()):
        said = ", ".join(f"{count} {ended}" for ended, count in ends.most_common())
        add_row(table, kind, victim, moment, str(ends.total()), said)
    broken = sum(outcome == "failed" for _, outcome in found)
    terminalreporter.section("faults")
    console().print(table)
    terminalreporter.write_line(f"{len(found)} runs, {broken} in which a promise was broken")


def _has_fault(report):
    return report.when == "call" and "fault" in dict(report.user_properties)
