"""One run: sets the stage, waits for the moment, lets the fault happen, and says what came of it and what was left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from modelexpress.checkpoint.checksums import write_checksums
from modelexpress.checkpoint.index import open_index
from modelexpress.errors import ModelExpressError
from modelexpress.gms.client import Imported, Staging, Where, drop, open_session, status
from modelexpress.gms.memory import HostMemory
from modelexpress.registry.base import Registry
from modelexpress.registry.open import open_registry
from tests.faults import actors, cell
from tests.faults.actors import Actor, Died, Message, Silent
from tests.faults.blows import BLOWS, Impossible
from tests.faults.limits import MemoryGroup
from tests.faults.scenario import Scenario
from tests.faults.weights import Weights, write_weights
from tests.support.redis_server import RedisServer

TRANSFER_S = 3.0
CONNECT_S = 2.0
LEASE_S = 1.5

_SOON_S = 0.4
_LONG_S = TRANSFER_S + 1.0
_RACE_S = 0.2
_START_S = 30.0  # for a process to say that it is ready, on a busy machine
_HANG_S = 40.0  # far beyond what any load here may take; the judge has the bound
_END_S = 25.0  # a source that drains and cannot reach its registry
_IDLE_S = 0.4
_IDLE_NBYTES = 50_000  # what registries say in that time
_IDLE_AT_MOST_S = 3.0

_NAMES = {"host": "host", "nixl": "nixl", "nixl-tcp": "nixl", "tcp": "tcp"}


class Outcome(msgspec.Struct, kw_only=True):
    """What one run came to. `judge` says whether that is as promised.

    Attributes:
        impossible: why the fault cannot be made on this machine; nothing else is set then.
        happened: whether the moment came, and the fault with it.
        result: what the target said: report, error, seconds, held_s, peak, digests; None where it died.
        target_code: its exit code.
        replica: the same of a second target, which loads after the first one died.
        again: digests once more, when everybody that was stopped goes on and is idle.
        before, after, outside: what the target held before and after, as it says, and as /proc says from outside.
        wanted, other: digests of the weights, and of those that a restarted source has.
        paused_s: how long the target itself was stopped.
        codes: exit codes of the others.
        left: what was left behind.
        service: what is wrong with the memory service afterwards.
        work: what was raised where somebody wrote to a full disk.
    """

    scenario: Scenario
    impossible: str | None = None
    happened: bool = False
    result: Message | None = None
    target_code: int | None = None
    replica: Message | None = None
    again: dict[str, str] | None = None
    before: dict[str, list[str]] = msgspec.field(default_factory=dict)
    after: dict[str, list[str]] = msgspec.field(default_factory=dict)
    outside: dict[str, list[str]] = msgspec.field(default_factory=dict)
    wanted: dict[str, str] = msgspec.field(default_factory=dict)
    other: dict[str, str] = msgspec.field(default_factory=dict)
    nbytes: int = 0
    paused_s: float = 0.0
    codes: dict[str, int | None] = msgspec.field(default_factory=dict)
    sources: list[str] = msgspec.field(default_factory=list)
    struck: list[str] = msgspec.field(default_factory=list)
    left: list[str] = msgspec.field(default_factory=list)
    service: str | None = None
    work: Message | None = None
    seconds: float = 0.0


def direct(scenario: Scenario, folder: Path) -> Outcome:
    """Run a scenario in the cell of this process. The folder is empty, and the run's own."""
    began = time.monotonic()
    os.chdir(folder)
    outcome = Outcome(scenario=scenario)
    stage = Stage(scenario, folder, outcome)
    try:
        stage.set_up()
        stage.play()
    except Impossible as exc:
        outcome.impossible = str(exc)
    finally:
        stage.tear_down()
    outcome.seconds = time.monotonic() - began
    return outcome


class Stage:
    """Everybody that takes part in a run."""

    def __init__(self, scenario: Scenario, folder: Path, outcome: Outcome) -> None:
        self.scenario = scenario
        self.folder = folder
        self.outcome = outcome
        self.actors: list[Actor] = []
        self.sources: list[Actor] = []
        self.networks: list[Actor] = []
        self.target: Actor | None = None
        self.writer: Actor | None = None
        self.service: Actor | None = None
        self.relay: Actor | None = None
        self.redis: RedisServer | None = None
        self.group: MemoryGroup | None = None
        self.model = folder / "model"
        self.origin = folder / "origin"
        self.socket = str(folder / "service.sock")
        self.weights: Weights | None = None
        self.other: Weights | None = None
        self._resume: Callable[[], None] | None = None
        self._resume_at = 0.0
        self._resumed = False
        self._expected: set[str] = set()

    # Before

    def set_up(self) -> None:
        """Files, registry, sources, service: all that is there before the target begins."""
        fault = self.scenario.fault
        self._write_files()
        if self.scenario.registry == "redis":
            self.redis = RedisServer(self.folder, config=("bind 0.0.0.0", "protected-mode no"))
            self.redis.start()
        if fault.victim == "redis" and fault.kind in ("drop", "black hole"):
            assert self.redis is not None
            self.relay = self._start("relay", actors.relay, self.redis.port)
            self.relay.port = self._ready(self.relay)["port"]  # type: ignore[attr-defined]  # one of our own
        if (fault.kind, fault.victim) == ("full disk", "registry"):
            (self.folder / "registry").mkdir(mode=0o700)
            cell.mount("tmpfs", self.folder / "registry", "size=256k,mode=0700")
        for number in range(self.scenario.peers):
            self._start_source(number, self.origin)
        self.outcome.sources = [self._published(each) for each in self.sources]
        if self.scenario.service != "none":
            self._start_service()
        if self.scenario.service == "committed":
            self._commit()

    def _write_files(self) -> None:
        scenario, fault = self.scenario, self.scenario.fault
        self.weights = write_weights(self.origin, seed=scenario.seed, mib=scenario.size_mib)
        if (fault.kind, fault.victim) == ("restart", "source"):
            self.other = write_weights(self.folder / "other", seed=scenario.seed + 1_000_000, mib=scenario.size_mib)
            self.outcome.other = self.other.digests
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        if fault.victim == "checksums":
            cell.mount("tmpfs", self.model, f"size={self.weights.nbytes + (1 << 16)}")
        if scenario.files != "absent":
            for each in self.origin.iterdir():
                shutil.copy(each, self.model)
        if scenario.files == "broken":
            shard = sorted(self.model.glob("*.safetensors"))[-1]
            os.truncate(shard, shard.stat().st_size - 4096)
        if scenario.recorded:
            write_checksums(open_index(self.model), threads=2)
        self.outcome.wanted, self.outcome.nbytes = self.weights.digests, self.weights.nbytes
        self._expected = set(os.listdir(self.model))

    def _start_source(self, number: int, checkpoint: Path, *, revision: str = "r1") -> Actor:
        scenario, fault = self.scenario, self.scenario.fault
        options = self._shared(revision, named=True if scenario.kind == "layout" else scenario.named)
        if not scenario.named:
            options.pop("revision", None)
        options |= {"registry": self._registry_url(), "transports": _NAMES[scenario.transport], "lease_ttl_s": LEASE_S}
        options["environ"] = self._environ("lo")
        at = None
        if scenario.wired:
            if number == len(self.networks):
                self._lay_cable(number)
            at = self.networks[number].pid
            options |= {"environ": self._environ("eth0"), "wired": True}
            options["listen"] = f"10.9.{number}.2"
            options["registry"] = self._registry_url(f"10.9.{number}.1")
        if (fault.kind, fault.victim) == ("clock jump", "registry") and number == fault.number and fault.size < 0.5:
            options["clock"] = self._jump_s()
        spec = self.weights.spec if self.weights is not None else {}
        source = self._start(
            f"source {number}", actors.source, spec, str(checkpoint), kind=scenario.kind, options=options, network=at
        )
        if number == len(self.sources):
            self.sources.append(source)
        else:
            self.sources[number] = source
        return source

    def _lay_cable(self, number: int) -> None:
        """A network of a source's own, one hop away."""
        holder = self._start(f"network {number}", actors.network)
        self._ready(holder)
        self.networks.append(holder)
        near, far = f"10.9.{number}.1", f"10.9.{number}.2"
        cell.ip("link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        cell.ip("addr", "add", f"{near}/30", "dev", f"v{number}")
        cell.ip("link", "set", f"v{number}", "up")
        for words in (
            ("addr", "add", f"{far}/30", "dev", "eth0"),
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", near),
        ):
            cell.ip(*words, of=holder.pid)
        cell.wait_for_carrier("eth0", of=holder.pid)
        if self.scenario.fault.kind == "restart" and self.scenario.registry == "directory":
            cell.one_port(of=holder.pid)

    def _start_service(self) -> None:
        self.service = self._start("service", actors.service, self.socket)
        self._ready(self.service)

    def _commit(self) -> None:
        """Have somebody move the weights into the service, and end."""
        writer = self._start_writer(event="never")
        writer.pipe.send(say="go")
        self._result(writer)
        writer.pipe.send(say="end")
        writer.pipe.receive(_START_S)
        writer.pipe.send(say="end")
        writer.wait(_END_S)

    def _start_writer(self, *, event: str) -> Actor:
        options = self._shared("r1") | {"gms": self.socket, "strategies": "gms,disk", "publish": True}
        options["environ"] = self._environ("lo")
        at_nbytes = int(self.outcome.nbytes * self.scenario.fault.moment.fraction)
        spec = self.weights.spec if self.weights is not None else {}
        writer = self._start(
            "writer", actors.target, spec, str(self.origin), event=event, at_nbytes=at_nbytes, options=options
        )
        self._ready(writer)
        return writer

    def _start_target(self, name: str, *, event: str) -> Actor:
        scenario, fault = self.scenario, self.scenario.fault
        options = self._shared("r1") | {"strategies": ",".join(scenario.ways), "verify": scenario.verify}
        devices = ",".join(f"v{at}" for at in range(len(self.networks))) if scenario.wired else "lo"
        options |= {"environ": self._environ(devices), "wired": scenario.wired}
        if scenario.registry != "none":
            port = getattr(self.relay, "port", None)
            options |= {
                "registry": self._registry_url(port=port),
                "transports": _NAMES[scenario.transport],
                "lease_ttl_s": LEASE_S,
            }
        if scenario.service != "none":
            options["gms"] = self.socket
        if (fault.kind, fault.victim) == ("clock jump", "registry") and fault.size >= 0.5:
            options["clock"] = self._jump_s()
        at_nbytes = max(1, int(self.outcome.nbytes * fault.moment.fraction))
        assert self.weights is not None
        return self._start(
            name,
            actors.target,
            self.weights.spec,
            str(self.model),
            event=event,
            at_nbytes=at_nbytes,
            options=options,
        )

    def _shared(self, revision: str, *, named: bool | None = None) -> Message:
        options: Message = {"transfer_timeout_s": TRANSFER_S, "connect_timeout_s": CONNECT_S, "threads": 2}
        if self.scenario.named if named is None else named:
            options |= {"revision": revision, "model_name": "org/model"}
        return options

    def _environ(self, devices: str) -> dict[str, str]:
        environ = {"UCX_NET_DEVICES": devices}
        return environ | ({"UCX_TLS": "tcp"} if self.scenario.transport == "nixl-tcp" else {})

    def _registry_url(self, host: str = "127.0.0.1", *, port: int | None = None) -> str:
        if self.redis is not None:
            return f"redis://{host}:{port or self.redis.port}/0"
        return f"file://{self.folder}/registry"

    def _registry(self) -> Registry:
        return open_registry(self._registry_url(), signing_key=None, timeout_s=CONNECT_S, lease_ttl_s=LEASE_S)

    def _jump_s(self) -> int:
        return 3600 * (1 + int(self.scenario.fault.size * 48))

    def _start(self, name: str, act: Callable[..., None], *args: Any, **options: Any) -> Actor:
        log = self.folder / f"{name.replace(' ', '-')}.log"
        return Actor(name, act, *args, log=log, others=self.actors, **options)

    def _published(self, source: Actor) -> str:
        """The name of a source."""
        said = self._ready(source)
        if "ready" not in said:
            raise RuntimeError(f"{source.name} could not publish: {said}")
        return str(said["ready"])

    def _ready(self, actor: Actor) -> Message:
        try:
            return actor.pipe.receive(_START_S)
        except Died:
            actor.wait(5)
            raise RuntimeError(f"{actor.name} did not start, exit code {actor.code}") from None

    # During

    def play(self) -> None:
        """The target loads, and the fault happens."""
        fault, outcome = self.scenario.fault, self.outcome
        event = fault.moment.event
        self.target = self._start_target("target", event=event if fault.victim != "writer" else "never")
        outcome.before = self._ready(self.target)["census"]
        if self.scenario.service == "staging":
            self._start_staging()
        if event == "before":
            self._strike()
        with suppress(BrokenPipeError):
            self.target.pipe.send(say="go")
        if event == "raced":
            time.sleep(fault.moment.fraction * _RACE_S)
            self._strike()
        if fault.victim == "writer":
            self._strike_when_waited_for()
        outcome.result = self._result(self.target)
        if event == "loaded":
            self._strike()
        self._let_go_on()
        if outcome.result is None:
            self._load_again()
            return
        if fault.victim == "target" and fault.kind == "kill" and outcome.happened:
            self._load_again()
            return
        self._look_again(self.target)

    def _look_again(self, target: Actor) -> None:
        """Who was stopped goes on until it is idle: is every byte as it was? Then let the model go."""
        if self._resumed:
            self._wait_until_idle()
        try:
            target.pipe.send(say="again")
            self.outcome.again = target.pipe.receive(_START_S)["digests"]
            target.pipe.send(say="end")
            self.outcome.after = target.pipe.receive(_START_S)["census"]
            self.outcome.outside = actors.census(target.pid)
            target.pipe.send(say="end")
        except (Died, Silent, BrokenPipeError) as exc:
            self.outcome.left.append(f"{target.name} ended or hung before it was told to: {type(exc).__name__}")
        self.outcome.target_code = target.wait(_END_S)

    def _load_again(self) -> None:
        """The target is dead; the next replica comes."""
        assert self.target is not None
        self.outcome.target_code = self.target.wait(5)
        replica = self._start_target("replica", event="never")
        self.outcome.before = self._ready(replica)["census"]
        replica.pipe.send(say="go")
        self.outcome.replica = self._result(replica)
        if self.outcome.replica is not None:
            first = self.outcome.target_code
            self._look_again(replica)
            self.outcome.codes["replica"] = self.outcome.target_code
            self.outcome.target_code = first

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
                    self.outcome.left.append(f"{target.name} hung: no result within {_HANG_S:g} s")
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
        event = "bytes" if self.scenario.fault.victim == "writer" else "never"
        self.writer = self._start_writer(event=event)
        if event == "never":  # the service is hit while it is written to
            self._strike()
            self.writer.pipe.send(say="go")
            self._result(self.writer)
        else:
            self.writer.pipe.send(say="go")
            self.writer.pipe.receive(_START_S)  # it has the claim, and stands still

    def _strike_when_waited_for(self) -> None:
        """The target waits for the writer's commit when the writer is hit."""
        assert self.writer is not None
        give_up = time.monotonic() + 2
        while not any(each.waiting for each in status(self.socket).keys) and time.monotonic() < give_up:
            time.sleep(0.01)
        self._strike()
        with suppress(BrokenPipeError):
            self.writer.pipe.send(say="go")

    def _strike(self) -> None:
        fault = self.scenario.fault
        if self.outcome.happened:
            return
        resume = BLOWS[fault.kind, fault.victim](self)
        self.outcome.happened = True
        if resume is not None:
            wait_s = _LONG_S if fault.victim == "target" else _HANG_S
            self._resume = resume
            self._resume_at = time.monotonic() + (_SOON_S if fault.resumes == "soon" else wait_s)
            if fault.victim == "target":
                self.outcome.paused_s = self._resume_at - time.monotonic()

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

    # After

    def tear_down(self) -> None:
        """End everybody, the way they end in a fleet, and look at what is left."""
        self._let_go_on()
        outcome = self.outcome
        if self.target is not None and self.target.running:
            self.target.kill()
        if self.writer is not None:
            self._end_writer(self.writer)
        for each in self.sources:
            with suppress(BrokenPipeError):
                each.pipe.send(say="end")
        for each in self.sources:
            outcome.codes[each.name] = each.wait(_END_S)
            if each.running:
                outcome.left.append(f"{each.name} did not end within {_END_S:g} s of being told to")
        if self.group is not None:
            self.group.lift()
        if outcome.impossible is None and self.scenario.service != "none":
            outcome.service = self._service_problem()
        if self.service is not None and self.service.running:
            self.service.signal(signal.SIGTERM)
            outcome.codes["service"] = self.service.wait(10)
            if os.path.exists(self.socket):
                outcome.left.append("the service left its socket")
        if outcome.impossible is None and self.scenario.registry != "none":
            outcome.left += self._left_in_registry()
        if self.redis is not None:
            self.redis.stop()
        for each in (*self.networks, self.relay):
            if each is not None:
                each.kill()
        if self.group is not None:
            self.group.remove()
        outcome.left += self._left_in_cell()
        for each in self.actors:
            each.kill()

    def _end_writer(self, writer: Actor) -> None:
        if writer.running:
            with suppress(BrokenPipeError, Died, Silent):
                if self.scenario.fault.victim == "writer":
                    self._result(writer)
                writer.pipe.send(say="end")
                writer.pipe.receive(_END_S)
                writer.pipe.send(say="end")
        self.outcome.codes["writer"] = writer.wait(_END_S)

    def _service_problem(self) -> str | None:
        """A service that was hit still serves, or can be started again on its socket; and holds no dead session."""
        if self.service is None or not self.service.running:
            self._start_service()
        key = "0" * 64
        try:
            give_up = time.monotonic() + 5
            while (found := status(self.socket)).sessions > 1 and time.monotonic() < give_up:
                time.sleep(0.02)
            if found.sessions > 1:
                return f"{found.sessions - 1} sessions are left"
            granted = open_session(Where(self.socket, key), "RW", HostMemory(), wait_s=2)
            assert isinstance(granted, Staging)
            with closing(granted):
                segment = granted.add_writable(1 << 16)
                segment.tensor(0, 1 << 16).fill_(7)
                del segment
                granted.commit("probe", b"").close()
            read = open_session(Where(self.socket, key), "RO", HostMemory(), wait_s=2)
            assert isinstance(read, Imported)
            with closing(read):
                [segment] = read.take_segments()
                if not bool((segment.tensor(0, 1 << 16) == 7).all()):
                    return "what was committed comes back with other bytes"
                del segment
            drop(Where(self.socket, key))
        except ModelExpressError as exc:
            return f"it does not serve: {type(exc).__name__}: {exc}"
        return None

    def _left_in_registry(self) -> list[str]:
        give_up = time.monotonic() + LEASE_S + 1
        try:
            with closing(self._registry()) as registry:
                while (found := registry.find(None)) and time.monotonic() < give_up:
                    time.sleep(0.05)
        except ModelExpressError as exc:
            killed = (self.scenario.fault.kind, self.scenario.fault.victim) == ("kill", "redis")
            return [] if killed else [f"the registry cannot be asked: {exc}"]
        left = [f"{each.record.name} is still in the registry" for each in found]
        if self.redis is not None:
            with closing(self.redis.client) as client:
                left += [f"{key.decode()} never ends in Redis" for key in client.keys("mx1:*") if client.pttl(key) < 0]
        else:
            left += [f"{each} is left in the registry's directory" for each in self._registry_files()]
        return left

    def _registry_files(self) -> list[str]:
        # A killed process may leave the file that it was writing; whoever looks around a minute later removes it.
        killed = self.scenario.fault.kind in ("kill", "memory", "restart")
        names = os.listdir(self.folder / "registry") if (self.folder / "registry").exists() else []
        return [each for each in names if not (killed and each.endswith(".tmp")) and each != "filler"]

    def _left_in_cell(self) -> list[str]:
        mine = {each.pid for each in self.actors if each.running}
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [f"process {each} is left" for each in cell.processes() if each not in mine]
        left += [f"/dev/shm/{each} is left" for each in os.listdir("/dev/shm")]
        found = set(os.listdir(self.model)) - {"filler"} if self.model.exists() else set()
        left += [f"{each} is left beside the checkpoint" for each in sorted(found - self._expected)]
        left += [f"{each.name} is left" for each in self.folder.glob(".*")]
        return left
