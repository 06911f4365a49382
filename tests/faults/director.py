"""One run: waits for the moment, lets the fault happen, and sees what comes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from modelexpress.gms.client import status
from tests.faults import actors, cell
from tests.faults.actors import Actor, Died, Message, Silent
from tests.faults.aftermath import END_S, tear_down
from tests.faults.blows import BLOWS, Impossible
from tests.faults.outcome import TRANSFER_S, Outcome
from tests.faults.scenario import Scenario
from tests.faults.stage import START_S, Stage

_SOON_S = 0.4
_LONG_S = TRANSFER_S + 1.0
_RACE_S = 0.2
_HANG_S = 40.0  # far beyond what any load here may take; the judge has the bound
_IDLE_S = 0.4
_IDLE_NBYTES = 50_000  # what registries say in that time
_IDLE_AT_MOST_S = 3.0


def direct(scenario: Scenario, folder: Path) -> Outcome:
    """Run a scenario in the cell of this process. The folder is empty, and the run's own."""
    began = time.monotonic()
    os.chdir(folder)
    outcome = Outcome(scenario=scenario)
    stage = Stage(scenario, folder, outcome)
    director = _Director(stage)
    try:
        stage.set_up()
        director.play()
    except Impossible as exc:
        outcome.impossible = str(exc)
    finally:
        director.end()
        tear_down(stage)
    outcome.seconds = time.monotonic() - began
    return outcome


class _Director:
    """Follows the target, and strikes once."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._outcome = stage.outcome
        self._fault = stage.scenario.fault
        self._resume: Callable[[], None] | None = None
        self._resume_at = 0.0
        self._resumed = False

    def play(self) -> None:
        """The target loads, and the fault happens."""
        fault, outcome = self._fault, self._outcome
        event = fault.moment.event
        self._stage.target = self._stage.start_target("target", event=event if fault.victim != "writer" else "never")
        outcome.before = self._stage.hear(self._stage.target)["census"]
        if self._stage.scenario.service == "staging":
            self._start_staging()
        if event == "before":
            self._strike()
        with suppress(BrokenPipeError):
            self._stage.target.pipe.send(say="go")
        if event == "raced":
            time.sleep(fault.moment.fraction * _RACE_S)
            self._strike()
        if fault.victim == "writer":
            self._strike_when_waited_for()
        outcome.result = self._result(self._stage.target)
        if event == "loaded":
            self._strike()
        self._let_go_on()
        if outcome.result is None:
            self._load_again()
            return
        if fault.victim == "target" and fault.kind == "kill" and outcome.happened:
            self._load_again()
            return
        self._look_again(self._stage.target)

    def _look_again(self, target: Actor) -> None:
        """Who was stopped goes on until it is idle: is every byte as it was? Then let the model go."""
        if self._resumed:
            self._wait_until_idle()
        try:
            target.pipe.send(say="again")
            self._outcome.again = target.pipe.receive(START_S)["digests"]
            target.pipe.send(say="end")
            self._outcome.after = target.pipe.receive(START_S)["census"]
            self._outcome.outside = actors.census(target.pid)
            target.pipe.send(say="end")
        except (Died, Silent, BrokenPipeError) as exc:
            self._outcome.left.append(f"{target.name} ended or hung before it was told to: {type(exc).__name__}")
        self._outcome.target_code = target.wait(END_S)

    def _load_again(self) -> None:
        """The target is dead; the next replica comes."""
        assert self._stage.target is not None
        self._outcome.target_code = self._stage.target.wait(5)
        replica = self._stage.start_target("replica", event="never")
        self._outcome.before = self._stage.hear(replica)["census"]
        replica.pipe.send(say="go")
        self._outcome.replica = self._result(replica)
        if self._outcome.replica is not None:
            first = self._outcome.target_code
            self._look_again(replica)
            self._outcome.codes["replica"] = self._outcome.target_code
            self._outcome.target_code = first

    def _result(self, target: Actor) -> Message | None:
        """Follow a target until it is done; strike where it stands still. None: it died."""
        give_up = time.monotonic() + _HANG_S
        while True:
            now = time.monotonic()
            if self._resume is not None and now >= self._resume_at:
                self._let_go_on()
            until = min(give_up, self._resume_at) if self._resume is not None else give_up
            try:
                said = target.pipe.receive(max(0.001, until - now))
            except Silent:
                if time.monotonic() >= give_up:
                    self._outcome.left.append(f"{target.name} hung: no result within {_HANG_S:g} s")
                    target.kill()
                    return None
                continue
            except Died:
                target.wait(5)
                return None
            if "at" in said:
                self._strike()
                with suppress(BrokenPipeError):
                    target.pipe.send(say="go")
            else:
                result: Message = said["result"]
                return result

    def _start_staging(self) -> None:
        event = "bytes" if self._fault.victim == "writer" else "never"
        self._stage.writer = self._stage.start_writer(event=event)
        if event == "never":  # the service is hit while it is written to
            self._strike()
            self._stage.writer.pipe.send(say="go")
            self._result(self._stage.writer)
        else:
            self._stage.writer.pipe.send(say="go")
            self._stage.writer.pipe.receive(START_S)  # it has the claim, and stands still

    def _strike_when_waited_for(self) -> None:
        """The target waits for the writer's commit when the writer is hit."""
        assert self._stage.writer is not None
        give_up = time.monotonic() + 2
        while not any(each.waiting for each in status(self._stage.socket).keys) and time.monotonic() < give_up:
            time.sleep(0.01)
        self._strike()
        with suppress(BrokenPipeError):
            self._stage.writer.pipe.send(say="go")

    def _strike(self) -> None:
        if self._outcome.happened:
            return
        resume = BLOWS[self._fault.kind, self._fault.victim](self._stage)
        self._outcome.happened = True
        if resume is not None:
            wait_s = _LONG_S if self._fault.victim == "target" else _HANG_S
            self._resume = resume
            self._resume_at = time.monotonic() + (_SOON_S if self._fault.resumes == "soon" else wait_s)
            if self._fault.victim == "target":
                self._outcome.paused_s = self._resume_at - time.monotonic()

    def _let_go_on(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            self._resumed = True
            resume()

    def _wait_until_idle(self) -> None:
        """Until nothing arrives any more: what could still be written has been."""
        give_up = time.monotonic() + _IDLE_AT_MOST_S
        before = cell.received_nbytes()
        while time.monotonic() < give_up:
            time.sleep(_IDLE_S)
            now = cell.received_nbytes()
            if now - before < _IDLE_NBYTES:
                return
            before = now

    def end(self) -> None:
        """Nobody is stopped any more, and the target and a writer have ended."""
        self._let_go_on()
        stage = self._stage
        if stage.target is not None and stage.target.running:
            stage.target.kill()
        if stage.writer is not None:
            self._end_writer(stage.writer)

    def _end_writer(self, writer: Actor) -> None:
        if writer.running:
            with suppress(BrokenPipeError, Died, Silent):
                if self._fault.victim == "writer":
                    self._result(writer)
                writer.pipe.send(say="end")
                writer.pipe.receive(END_S)
                writer.pipe.send(say="end")
        self._outcome.codes["writer"] = writer.wait(END_S)
