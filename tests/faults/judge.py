"""What every run is held to, whatever happened in it. `judge` returns what was broken, as sentences."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from modelexpress.errors import ModelExpressError
from tests.faults.actors import Message
from tests.faults.outcome import CONNECT_S, TRANSFER_S, Outcome
from tests.faults.scenario import Scenario

MARGIN_S = 5.0

# What a load may raise that is not ours: the caller's own code, or Python, had no memory.
_OUT_OF_MEMORY = frozenset({"MemoryError", "RuntimeError", "OSError"})

_SHORTEST_REASON = 20
_PEAK_SLACK_NBYTES = 64 << 20  # buffers of a transport, threads, what was imported late


def _names_of(kind: type[Exception]) -> tuple[str, ...]:
    return (kind.__name__, *(name for each in kind.__subclasses__() for name in _names_of(each)))


# By what an attempt may end: an error of ours, those of the memory service's protocol included. Anything else was not
# translated at its border.
_OURS = _names_of(ModelExpressError)


def judge(outcome: Outcome) -> list[str]:
    """Bytes right or an error; in time; nothing left; the root kept; the report true."""
    if outcome.impossible is not None:
        return []
    return [
        *_of_load(outcome, outcome.result, "target"),
        *_of_load(outcome, outcome.replica, "replica"),
        *_of_ends(outcome),
        *outcome.left,
        *_of_leaks(outcome),
        *([f"the memory service: {outcome.service}"] if outcome.service else []),
        *_of_work(outcome),
    ]


def summary(outcome: Outcome) -> str:
    """How a run ended, for the table: by which way, or with which error."""
    if outcome.impossible is not None:
        return "not possible here"
    if not outcome.happened:
        return "moment not reached"
    result = outcome.result or outcome.replica
    if result is None:
        return "died"
    if result.get("error"):
        return str(result["error"])
    return ("next replica: " if outcome.result is None else "") + str(result["report"]["strategy"])


def _of_load(outcome: Outcome, result: Message | None, who: str) -> Iterator[str]:
    if result is None:
        return
    scenario = outcome.scenario
    report = result.get("report")
    tries = [each for each in (report or {}).get("attempts", []) if each["outcome"] != "off"]
    took_s = result["seconds"] - result["held_s"] - outcome.paused_s
    bound_s = CONNECT_S + TRANSFER_S * max(1, len(tries)) + MARGIN_S
    if took_s > bound_s:
        yield f"{who}: the load took {took_s:.1f} s, and {bound_s:.1f} s were allowed for {len(tries)} attempts"
    if report is not None:
        yield from (f"{who}: {each}" for each in _of_report(outcome, report))
    if result.get("error"):
        yield from (f"{who}: {each}" for each in _of_error(scenario, result))
        return
    yield from (f"{who}: {each}" for each in _of_bytes(outcome, result["digests"]))
    if not result["same_root"]:
        yield f"{who}: the report's model is another object than the one that was given"
    if outcome.again is not None and outcome.again != result["digests"]:
        changed = [name for name in outcome.again if outcome.again[name] != result["digests"][name]]
        yield f"{who}: bytes changed after the load had returned: {', '.join(changed[:3])}"
    most = 1.3 * outcome.nbytes + _PEAK_SLACK_NBYTES
    if result["peak"] > most:
        yield f"{who}: {result['peak'] / 1e6:.0f} MB of memory for {outcome.nbytes / 1e6:.0f} MB of weights"


def _of_bytes(outcome: Outcome, found: dict[str, str]) -> Iterator[str]:
    fault = outcome.scenario.fault
    wrong = [name for name, each in outcome.wanted.items() if found.get(name) != each]
    if not wrong and found.keys() == outcome.wanted.keys():
        return
    if fault.kind == "restart" and fault.same_name and found == outcome.other:
        return  # one name was given to two sets of bytes: either, and no mixture
    if fault.kind == "flip" and not _promised(outcome.scenario) and len(wrong) == 1:
        return
    yield f"wrong bytes in {len(wrong)} of {len(outcome.wanted)} tensors: {', '.join(wrong[:3])}"


def _promised(scenario: Scenario) -> bool:
    """Whether a flipped bit has to be found: where every piece is compared with a checksum."""
    return scenario.verify == "on" and (scenario.fault.victim == "source" or scenario.recorded)


def _of_error(scenario: Scenario, result: Message) -> Iterator[str]:
    error, text = result["error"], result["text"]
    memory = (scenario.fault.kind, scenario.fault.victim) == ("memory", "target")
    if error != "LoadFailed" and not result["ours"] and not (memory and error in _OUT_OF_MEMORY):
        yield f"an error that is not ours: {error}: {text}"
    if len(text) < _SHORTEST_REASON:
        yield f"an error that says nothing: {error}: {text!r}"
    if must_load(scenario):
        yield f"it could have loaded from {must_load(scenario)}, and ended with {error}: {text}"


def must_load(scenario: Scenario) -> str | None:
    """A way that the fault does not touch, so that a load has to succeed; None where there is none."""
    fault = scenario.fault
    if (fault.kind, fault.victim) == ("memory", "target"):
        return None
    if scenario.files == "present" and "disk" in scenario.ways and fault.victim != "file":
        return "its files"
    if fault.victim == "source" and scenario.peers > 1:
        return "another source"
    if fault.victim == "file" and scenario.peers:
        return "a source"
    return None


def _of_report(outcome: Outcome, report: Message) -> Iterator[str]:
    attempts, strategy = report["attempts"], report["strategy"]
    memory = outcome.scenario.fault.kind == "memory"
    for each in attempts:
        if (each["outcome"] == "loaded") == bool(each.get("error")):
            yield f"an attempt says {each['outcome']} and {each.get('error')!r}"
        if each["outcome"] in ("failed", "unavailable"):
            reason = each["error"] or ""
            if len(reason) < _SHORTEST_REASON:
                yield f"a reason that says nothing: {reason!r}"
            if not memory and not reason.startswith(_OURS):
                yield f"an error that was not translated: {reason}"
    loaded = [each for each in attempts if each["outcome"] == "loaded"]
    if [each["strategy"] for each in loaded] != ([strategy] if strategy else []) or (
        loaded and loaded[0] != attempts[-1]
    ):
        yield f"it says {strategy}, and its attempts say {[(each['strategy'], each['outcome']) for each in attempts]}"
    if strategy is None:
        return
    if report["nbytes"] != outcome.nbytes:
        yield f"it says {report['nbytes']:,} bytes of {outcome.nbytes:,}"
    shares = sum(each[2] for each in loaded[0].get("shares", ()))
    if strategy == "rdma" and shares != outcome.nbytes:
        yield f"its shares make {shares:,} bytes of {outcome.nbytes:,}"
    yield from _of_way(outcome, strategy, report["source"])


def _of_way(outcome: Outcome, strategy: str, source: str | None) -> Iterator[str]:
    """Nothing is delivered by who is not there."""
    scenario = outcome.scenario
    fault = scenario.fault
    if strategy not in scenario.ways:
        yield f"it says {strategy}, which it was not asked for"
    if strategy == "disk" and scenario.files != "present":
        yield f"it says disk, and the files are {scenario.files}"
    if strategy == "rdma" and source not in outcome.sources:
        yield f"it says that {source} delivered, and there are {outcome.sources}"
    gone = fault.kind in ("kill", "restart") and fault.moment.event in ("before", "built") and outcome.happened
    if gone and source in outcome.struck:
        yield f"it says that {source} delivered, which was dead before the target began to look"
    if strategy == "gms" and gone and fault.victim == "service":
        yield "it says gms, and the service was dead before"


def _of_ends(outcome: Outcome) -> Iterator[str]:
    """Who was not killed ends by itself, without an error."""
    fault = outcome.scenario.fault
    hit = fault.victim == "target" and fault.kind in ("kill", "memory")
    if outcome.target_code != 0 and not (hit and outcome.target_code == -signal.SIGKILL):
        yield f"the target ended with {outcome.target_code}"
    for name, code in outcome.codes.items():
        if code != 0 and not _may_end_so(outcome, name, code):
            yield f"{name} ended with {code}"


def _may_end_so(outcome: Outcome, name: str, code: int | None) -> bool:
    scenario, fault = outcome.scenario, outcome.scenario.fault
    if name == f"source {fault.number}" and fault.victim == "source":
        # UCX can abort a source whose reader gave up while it was stopped or out of reach: README.md, its promises.
        aborted = scenario.transport == "nixl-tcp" and fault.kind in ("stop", "black hole", "drop")
        return (fault.kind == "kill" and code == -signal.SIGKILL) or (aborted and code == -signal.SIGABRT)
    if name == fault.victim == "writer":
        return fault.kind == "kill" and code == -signal.SIGKILL
    return (fault.kind, fault.victim) == ("memory", "service") and name == "service" and code == -signal.SIGKILL


def _of_leaks(outcome: Outcome) -> Iterator[str]:
    for seen, after in (("", outcome.after), (" from outside", outcome.outside)):
        for what, found in after.items():
            before = outcome.before.get(what, [])
            if len(found) > len(before):
                yield f"{what} are left, seen{seen}: {_more(found, before)}"


def _more(after: list[str], before: list[str]) -> list[str]:
    rest = list(after)
    for each in before:
        if each in rest:
            rest.remove(each)
    return rest


def _of_work(outcome: Outcome) -> Iterator[str]:
    """Who writes to a full disk is told so by an error of ours."""
    fault, work = outcome.scenario.fault, outcome.work
    if fault.kind != "full disk" or not outcome.happened:
        return
    if work is None or not work.get("error"):
        if fault.victim == "registry" and fault.moment.event != "raced":
            yield f"a source could publish where there is no room: {work}"
        return
    if not work.get("ours", True):
        yield f"an error that is not ours on a full disk: {work['error']}: {work['text']}"
    elif len(work["text"]) < _SHORTEST_REASON:
        yield f"an error that says nothing: {work}"
