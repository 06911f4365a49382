"""How long a fleet takes to get one model: simulated, with the classes that decide in the product.

All replicas start within a second and want the same weights; one source has them. Three ways: through peers as
modelexpress chooses them, all from the one source, and from shared storage. Who reads from whom, and who waits, is
decided by `modelexpress.strategies.turn`; links, the registry and the time between are simulated:

- A link carries the same rate in and out. The readers of a source share its link; a reader of several sources gets the
  sum of its shares, at most its own link.
- The registry answers one look after the other.
- A reader is a source itself `PUBLISH_S` after its last byte.

The ideal doubling has no time between transfers: ceil(log2(replicas + 1)) of them. `fleet_vs_ideal` is the time to fill
the fleet over it, one pair a seed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import simpy
from ratios import add_to_summary, ratio_of, rows, show
from rich.console import Console
from rich.progress import track
from rich.table import Table

from modelexpress.config import Config
from modelexpress.registry.base import FoundSource, SourceRecord
from modelexpress.strategies.turn import SAMPLE, Turn, is_idle

GB = 1e9
# Measured by scale.py and load_latency.py on a quiet machine of two cores, rounded up.
LOOK_S = 0.0002  # the registry's time for one look at SAMPLE sources
LEASE_S = 0.00005
SETUP_S = 0.15  # offer, plan, registration, connection
PUBLISH_S = 0.15  # registration, connection, record; checksums are known where the bytes were verified
STARTS_WITHIN_S = 1.0

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Fleet:
    """What is simulated: bytes, and bytes a second of each link and of the storage as a whole."""

    replicas: int
    nbytes: float = 16 * GB
    link: float = 12.5 * GB  # 100 Gb/s
    storage: float = 40 * GB

    @property
    def transfer_s(self) -> float:
        return self.nbytes / self.link

    @property
    def ideal_s(self) -> float:
        return math.ceil(math.log2(self.replicas + 1)) * self.transfer_s

    @property
    def one_source_s(self) -> float:
        return self.replicas * self.transfer_s

    @property
    def storage_s(self) -> float:
        return max(self.replicas * self.nbytes / self.storage, self.transfer_s)


@dataclass(eq=False)
class Node:
    """A replica that has the weights, and who reads them."""

    record: SourceRecord
    reads: set[Read] = field(default_factory=set)


@dataclass(eq=False)
class Read:
    """One replica's transfer: `left` bytes at the moment `since`, at `rate` bytes a second from then on."""

    sources: list[Node]
    left: float
    done: simpy.Event
    since: float
    rate: float = 0.0
    epoch: int = 0


class Network:
    """Fluid flows: each change of who reads from whom changes the rates of all who share a source."""

    def __init__(self, env: simpy.Environment, link: float) -> None:
        self._env = env
        self._link = link
        self._touched: set[Read] = set()

    def read(self, sources: list[Node], nbytes: float) -> simpy.Event:
        read = Read(sources, nbytes, self._env.event(), self._env.now)
        for source in sources:
            source.reads.add(read)
        self._touch(sources)
        return read.done

    def _touch(self, sources: Iterable[Node]) -> None:
        # Once for all changes of one moment: many readers of one source begin and end together.
        if not self._touched:
            self._env.process(self._settle())
        self._touched.update(read for source in sources for read in source.reads)

    def _settle(self) -> Process:
        yield self._env.timeout(0)
        touched, self._touched = self._touched, set()
        for read in touched:
            if read.done.triggered:
                continue
            now = self._env.now
            read.left -= read.rate * (now - read.since)
            read.rate = min(self._link, sum(self._link / len(source.reads) for source in read.sources))
            read.since = now
            read.epoch += 1
            self._env.process(self._end(read, read.epoch))

    def _end(self, read: Read, epoch: int) -> Process:
        yield self._env.timeout(max(0.0, read.left / read.rate))
        if read.epoch != epoch:
            return
        for source in read.sources:
            source.reads.remove(read)
        self._touch(read.sources)
        read.done.succeed()


class Registry:
    """Who has the weights, and how many hold a lease on each: as Redis tells it, one call after the other."""

    def __init__(self, env: simpy.Environment, chance: random.Random) -> None:
        self._env = env
        self._chance = chance
        self._server = simpy.Resource(env)
        self._nodes: list[Node] = []
        self._readers: dict[Node, int] = {}
        self._by_id: dict[str, Node] = {}
        self.calls = 0

    def publish(self, node: Node) -> None:
        self._nodes.append(node)
        self._readers[node] = 0
        self._by_id[node.record.source_id] = node

    def call(self, seconds: float) -> Process:
        self.calls += 1
        with self._server.request() as turn:
            yield turn
            yield self._env.timeout(seconds)

    def find(self) -> list[FoundSource]:
        some = self._chance.sample(self._nodes, min(SAMPLE, len(self._nodes)))
        return sorted((FoundSource(each.record, self._readers[each]) for each in some), key=lambda each: each.readers)

    def lease(self, record: SourceRecord, limit: int | None) -> Node | None:
        node = self._by_id[record.source_id]
        if limit is not None and self._readers[node] >= limit:
            return None
        self._readers[node] += 1
        return node

    def give_back(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._readers[node] -= 1


class Simulation:
    """One fleet filling up; `filled_at` has the moment of each replica."""

    def __init__(self, fleet: Fleet, seed: int, config: Config) -> None:
        self.filled_at: list[float] = []
        self._fleet = fleet
        self._config = config
        self._chance = random.Random(seed)
        self._env = simpy.Environment()
        self._network = Network(self._env, fleet.link)
        self.registry = Registry(self._env, self._chance)

    def run(self) -> None:
        self.registry.publish(self._node(0))
        for number in range(1, self._fleet.replicas + 1):
            self._env.process(self._replica(number))
        self._env.run()

    def _node(self, number: int) -> Node:
        record = msgspec.structs.replace(RECORD, source_id=f"{number:032x}", nbytes=int(self._fleet.nbytes))
        return Node(record)

    def _replica(self, number: int) -> Process:
        yield self._env.timeout(self._chance.uniform(0, STARTS_WITHIN_S))
        turn = Turn(self._config.max_readers, self._chance)
        sources: list[Node] = []
        while not sources:
            sources, look_s = yield self._env.process(self._look(turn))
            if not sources:
                yield self._env.timeout(turn.pause_s(look_s))
        yield self._env.timeout(SETUP_S)
        yield self._network.read(sources, self._fleet.nbytes)
        self.registry.give_back(sources)
        self.filled_at.append(self._env.now)
        yield self._env.timeout(PUBLISH_S)
        self.registry.publish(self._node(number))

    def _look(self, turn: Turn) -> Generator[simpy.Event, Any, tuple[list[Node], float]]:
        """As RdmaFromPeer takes its turn: the sources that were leased, and how long the look took."""
        began = self._env.now
        yield self._env.process(self.registry.call(LOOK_S))
        found, look_s = self.registry.find(), self._env.now - began
        limit = turn.limit_of(found, self._env.now)
        for each in found:
            if each.readers >= limit:
                continue
            yield self._env.process(self.registry.call(LEASE_S))
            node = self.registry.lease(each.record, limit)
            if node is not None:
                others = [other for other in found if other is not each] if is_idle(found) else []
                more = (self.registry.lease(other.record, None) for other in others[: self._config.max_sources - 1])
                return [node, *(other for other in more if other is not None)], look_s
        return [], look_s


RECORD = SourceRecord(
    source_id="0" * 32,
    generation=1,
    keys=("key",),
    kind="layout",
    label="simulated",
    host="host",
    pid=1,
    transport="nixl",
    nbytes=0,
    tensors=1,
    offer_digest="",
    published_at=0.0,
)


def simulate(fleet: Fleet, seed: int, config: Config) -> dict[str, object]:
    simulation = Simulation(fleet, seed, config)
    simulation.run()
    if len(simulation.filled_at) != fleet.replicas:
        raise RuntimeError(f"{len(simulation.filled_at)} of {fleet.replicas} replicas were filled")
    last = max(simulation.filled_at)
    return {
        "replicas": fleet.replicas,
        "nbytes": fleet.nbytes,
        "link_gb_per_s": fleet.link / GB,
        "storage_gb_per_s": fleet.storage / GB,
        "max_readers": config.max_readers,
        "seed": seed,
        "peers_s": last,
        "median_s": sorted(simulation.filled_at)[fleet.replicas // 2],
        "ideal_s": fleet.ideal_s,
        "one_source_s": fleet.one_source_s,
        "storage_s": fleet.storage_s,
        "registry_calls": simulation.registry.calls,
        "vs_ideal": last / fleet.ideal_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--most", type=int, default=4096, help="replicas")
    parser.add_argument("--link", type=float, default=12.5, help="GB/s")
    parser.add_argument("--nbytes", type=float, default=16 * GB)
    parser.add_argument("--max-readers", type=int, default=Config().max_readers)
    options = parser.parse_args()
    config = Config(max_readers=options.max_readers)
    table = Table("replicas", "by peers, s", "over ideal", "median replica, s", "one source, s", "storage, s", "calls")
    sizes = [4**power for power in range(7) if 4**power <= options.most]
    found: list[dict[str, object]] = []
    with rows("fleet") as write:
        for replicas in track(sizes, description="simulating"):
            fleet = Fleet(replicas, options.nbytes, options.link * GB)
            for seed in range(options.seeds if replicas == sizes[-1] else 1):
                found.append(simulate(fleet, seed, config))
                write(found[-1])
    for row in found:
        if row["seed"] == 0:
            keys = ("peers_s", "vs_ideal", "median_s", "one_source_s", "storage_s", "registry_calls")
            table.add_row(str(row["replicas"]), *(f"{float(str(row[key])):.2f}" for key in keys))
    Console(width=max(120, Console().width)).print(table)
    if sizes[-1] == 4096:
        ratios = {"fleet_vs_ideal": ratio_of([float(str(row["vs_ideal"])) for row in found if row["replicas"] == 4096])}
        add_to_summary(ratios)
        show(ratios)


if __name__ == "__main__":
    main()
