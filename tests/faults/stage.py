"""Everybody that takes part in a run, set up as the scenario says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelexpress.checkpoint.checksums import write_checksums
from modelexpress.checkpoint.index import open_index
from modelexpress.registry.base import Registry
from modelexpress.registry.open import open_registry
from tests.faults import actors, cell
from tests.faults.actors import Actor, Died, Message
from tests.faults.limits import MemoryGroup
from tests.faults.outcome import CONNECT_S, LEASE_S, TRANSFER_S, Outcome
from tests.faults.scenario import Scenario
from tests.faults.weights import Weights, write_weights
from tests.support.redis_server import RedisServer

START_S = 30.0  # for a process to say that it is ready, on a busy machine

_NAMES = {"host": "host", "nixl": "nixl", "nixl-tcp": "nixl", "tcp": "tcp"}


class Stage:
    """The processes, files and networks of a run. `set_up` makes what is there before the target begins.

    Attributes:
        group: the memory group of the service, where its memory is limited.
        expected: the files of the target's checkpoint.
    """

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
        self.relay_port: int | None = None
        self.redis: RedisServer | None = None
        self.group: MemoryGroup | None = None
        self.model = folder / "model"
        self.origin = folder / "origin"
        self.socket = str(folder / "service.sock")
        self.weights: Weights | None = None
        self.other: Weights | None = None
        self.expected: set[str] = set()

    def set_up(self) -> None:
        """Files, registry, sources, service: all that is there before the target begins."""
        fault = self.scenario.fault
        self._write_files()
        if self.scenario.registry == "redis":
            self.redis = RedisServer(self.folder, config=("bind 0.0.0.0", "protected-mode no"))
            self.redis.start()
        if fault.victim == "redis" and fault.kind in ("drop", "black hole"):
            assert self.redis is not None
            self.relay = self.start("relay", actors.relay, self.redis.port)
            self.relay_port = self.hear(self.relay)["port"]
        if (fault.kind, fault.victim) == ("full disk", "registry"):
            (self.folder / "registry").mkdir(mode=0o700)
            cell.mount("tmpfs", self.folder / "registry", "size=256k,mode=0700")
        for number in range(self.scenario.peers):
            self.start_source(number, self.origin)
        self.outcome.sources = [self.published(each) for each in self.sources]
        if self.scenario.service != "none":
            self.start_service()
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
        self.expected = set(os.listdir(self.model))

    def start_source(self, number: int, checkpoint: Path, *, revision: str = "r1") -> Actor:
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
            options["clock"] = self.jump_s()
        spec = self.weights.spec if self.weights is not None else {}
        source = self.start(
            f"source {number}", actors.source, spec, str(checkpoint), kind=scenario.kind, options=options, network=at
        )
        if number == len(self.sources):
            self.sources.append(source)
        else:
            self.sources[number] = source
        return source

    def _lay_cable(self, number: int) -> None:
        """A network of a source's own, one hop away."""
        holder = self.start(f"network {number}", actors.network)
        self.hear(holder)
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
        if self.scenario.fault.kind == "restart" and self.scenario.same_port:
            cell.one_port(of=holder.pid)

    def start_service(self) -> None:
        self.service = self.start("service", actors.service, self.socket)
        self.hear(self.service)

    def _commit(self) -> None:
        """Have somebody move the weights into the service, and end."""
        writer = self.start_writer(event="never")
        writer.pipe.send(say="go")
        self.hear(writer)
        writer.pipe.send(say="end")
        writer.pipe.receive(START_S)
        writer.pipe.send(say="end")
        writer.wait(START_S)

    def start_writer(self, *, event: str) -> Actor:
        options = self._shared("r1") | {"gms": self.socket, "strategies": "gms,disk", "publish": True}
        options["environ"] = self._environ("lo")
        at_nbytes = int(self.outcome.nbytes * self.scenario.fault.moment.fraction)
        spec = self.weights.spec if self.weights is not None else {}
        writer = self.start(
            "writer", actors.target, spec, str(self.origin), event=event, at_nbytes=at_nbytes, options=options
        )
        self.hear(writer)
        return writer

    def start_target(self, name: str, *, event: str) -> Actor:
        scenario, fault = self.scenario, self.scenario.fault
        options = self._shared("r1") | {"strategies": ",".join(scenario.ways), "verify": scenario.verify}
        devices = ",".join(f"v{at}" for at in range(len(self.networks))) if scenario.wired else "lo"
        options |= {"environ": self._environ(devices), "wired": scenario.wired}
        if scenario.registry != "none":
            options |= {
                "registry": self._registry_url(port=self.relay_port),
                "transports": _NAMES[scenario.transport],
                "lease_ttl_s": LEASE_S,
            }
        if scenario.service != "none":
            options["gms"] = self.socket
        if (fault.kind, fault.victim) == ("clock jump", "registry") and fault.size >= 0.5:
            options["clock"] = self.jump_s()
        at_nbytes = max(1, int(self.outcome.nbytes * fault.moment.fraction))
        assert self.weights is not None
        return self.start(
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

    def registry(self) -> Registry:
        return open_registry(self._registry_url(), signing_key=None, timeout_s=CONNECT_S, lease_ttl_s=LEASE_S)

    def jump_s(self) -> int:
        return 3600 * (1 + int(self.scenario.fault.size * 48))

    def start(self, name: str, act: Callable[..., None], *args: Any, **options: Any) -> Actor:
        log = self.folder / f"{name.replace(' ', '-')}.log"
        return Actor(name, act, *args, log=log, others=self.actors, **options)

    def published(self, source: Actor) -> str:
        """The name of a source."""
        said = self.hear(source)
        if "ready" not in said:
            raise RuntimeError(f"{source.name} could not publish: {said}")
        return str(said["ready"])

    def hear(self, actor: Actor) -> Message:
        try:
            return actor.pipe.receive(START_S)
        except Died:
            actor.wait(5)
            raise RuntimeError(f"{actor.name} did not start, exit code {actor.code}") from None
