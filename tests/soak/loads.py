"""Loads in one process, in every way, every second one with a failure; samples what the process holds.

    python -c 'from tests.soak.loads import main; main(FOLDER, LOADS, SEED)'

(Not with -m: every process that is started would import this module again.)

Prints a table of samples for people, and at its end one line of JSON. Exits 1 when a load gave a wrong byte, or ended
in another way than its kind of failure lets it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import modelexpress
from modelexpress.errors import ConfigError, LoadFailed
from modelexpress.processes import threads_of
from modelexpress.registry.directory import DirectoryRegistry
from modelexpress.registry.redis import RedisRegistry
from modelexpress.strategies.base import LoadReport
from tests.soak.helpers import Helper, digest_of, service, source
from tests.support.redis_server import RedisServer, free_port
from tests.support.safetensors_writer import raw, write_file

TENSORS = {f"t{at:02}": raw("BF16", 100 + at, 1000, seed=at) for at in range(30)}  # 6.9 MB
EVERY = 25
SHORT_S = 0.3  # for what is dead or stopped
SETTLE_S = 5.0  # for keys of killed sources, which live as long as their lease

Options = dict[str, Any]


class Soak:
    """Everything that the loads use, and what they may come to."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.checkpoint = write_file(folder / "model" / "model.safetensors", TENSORS)
        self.broken = write_file(folder / "broken" / "model.safetensors", TENSORS)
        self.broken.write_bytes(self.checkpoint.read_bytes()[:-5])
        self.redis = redis
        self.directory = f"file://{folder}/registry"
        self.wrong = f"file://{folder}/wrong"
        self.gms = str(folder / "gms.sock")
        self.service = Helper(service, self.gms)
        self.sources = {
            registry: Helper(source, str(self.checkpoint), registry, False) for registry in (self.directory, redis.url)
        }
        self.liar = Helper(source, str(self.checkpoint), self.wrong, True)
        self.reports: list[LoadReport] = []
        self.outcomes: Counter[str] = Counter()
        self.expected = digest_of(self.load(strategies="disk").model)
        self._fill_service()
        self._dead_port = free_port()
        self._least: dict[str, int] = {}

    def load(self, **options: object) -> LoadReport:
        given: Options = {"revision": "r", "connect_timeout_s": 5.0, "lease_ttl_s": 2.0, **options}
        return modelexpress.load_checkpoint(given.pop("checkpoint", self.checkpoint), **given)

    def close(self) -> None:
        self.let_go()
        for each in (self.service, self.liar, *self.sources.values()):
            each.kill()

    def let_go(self) -> None:
        while self.reports:
            publication = self.reports.pop().publication
            if publication is not None:
                publication.withdraw()

    def _fill_service(self) -> None:
        self.load(strategies="disk", gms=self.gms, publish=True)

    # Loads that nothing goes wrong in

    def good(self, chance: random.Random) -> None:
        registry = chance.choice(list(self.sources))
        way, options = chance.choice(
            [
                ("disk", {"strategies": "disk"}),
                ("gms", {"strategies": "gms", "gms": self.gms}),
                *(("rdma", {"strategies": "rdma", "registry": registry, "transports": each}) for each in TRANSPORTS),
            ]
        )
        if chance.random() < 0.25:  # published, and withdrawn after a later load, which may read from it
            options = {"registry": registry, "transports": ",".join(TRANSPORTS), **options, "publish": True}
        report = self.load(**options)
        assert report.strategy == way, report
        self.check(report, f"{way}{',' + options['transports'] if way == 'rdma' else ''}")
        self.let_go()
        if report.publication is not None:
            self.reports.append(report)

    def check(self, report: LoadReport, kind: str) -> None:
        assert report.model is not None
        assert digest_of(report.model) == self.expected, f"{kind}: wrong bytes: {report}"
        self.outcomes[f"{kind}: {report.strategy}"] += 1

    # Loads with a failure

    def bad(self, chance: random.Random) -> None:
        failures = [
            self.source_is_dead, self.source_dies, self.source_is_stopped, self.source_lies, self.shard_is_broken,
            self.service_is_gone, self.service_is_stopped, self.registry_is_gone, self.registry_is_stopped,
            self.setting_is_wrong, self.caller_breaks_off, self.caller_is_interrupted,
        ]  # fmt: skip
        chance.choice(failures)(chance)

    def _from_peer(self, chance: random.Random) -> tuple[Helper, Options]:
        self.let_go()  # or this process would be a source, too
        registry = chance.choice(list(self.sources))
        options = {"registry": registry, "transports": chance.choice(TRANSPORTS), "strategies": "rdma,disk"}
        return self.sources[registry], options

    def source_is_dead(self, chance: random.Random) -> None:
        helper, options = self._from_peer(chance)
        helper.kill()
        self.check(self.load(**options, connect_timeout_s=SHORT_S), "source is dead")
        helper.again()

    def source_dies(self, chance: random.Random) -> None:
        helper, options = self._from_peer(chance)
        report = self.load(**options, progress=lambda _: helper.kill())
        # Redis knows it until its lease ends, and what was proven before it died counts.
        assert report.strategy == "disk" or options["registry"] == self.redis.url
        self.check(report, "source dies")
        helper.again()

    def source_is_stopped(self, chance: random.Random) -> None:
        helper, options = self._from_peer(chance)
        helper.signal(signal.SIGSTOP)
        try:
            self.check(
                self.load(**options, connect_timeout_s=SHORT_S, transfer_timeout_s=2 * SHORT_S),
                f"source is stopped, {options['transports']}",
            )
        finally:
            helper.signal(signal.SIGCONT)
        if options["registry"] == self.redis.url:
            helper.again()  # its lease may have run out meanwhile

    def source_lies(self, chance: random.Random) -> None:
        report = self.load(registry=self.wrong, transports=chance.choice(TRANSPORTS))
        assert report.strategy == "disk"
        assert any("checksum" in (each.error or "") for each in report.attempts), report
        self.check(report, "source lies")

    def shard_is_broken(self, chance: random.Random) -> None:
        self._refused(LoadFailed, "shard is broken", checkpoint=self.broken, strategies="disk")

    def service_is_gone(self, chance: random.Random) -> None:
        self.let_go()
        self.service.kill()
        self.check(self.load(strategies="gms,disk", gms=self.gms), "service is gone")
        self.service.again()
        self._fill_service()

    def service_is_stopped(self, chance: random.Random) -> None:
        self.service.signal(signal.SIGSTOP)
        try:
            report = self.load(strategies="gms,disk", gms=self.gms, connect_timeout_s=SHORT_S)
        finally:
            self.service.signal(signal.SIGCONT)
        assert report.strategy == "disk"
        self.check(report, "service is stopped")

    def registry_is_gone(self, chance: random.Random) -> None:
        url = f"redis://127.0.0.1:{self._dead_port}/0"
        self.check(self.load(registry=url, connect_timeout_s=SHORT_S), "registry is gone")

    def registry_is_stopped(self, chance: random.Random) -> None:
        self.let_go()
        self.redis.freeze()
        try:
            self.check(self.load(registry=self.redis.url, connect_timeout_s=SHORT_S), "registry is stopped")
        finally:
            self.redis.thaw()

    def setting_is_wrong(self, chance: random.Random) -> None:
        self._refused(ConfigError, "setting is wrong", verify="perhaps")

    def caller_breaks_off(self, chance: random.Random) -> None:
        _, options = self._from_peer(chance)
        report = self.load(**options, progress=_raising(RuntimeError("broken off")))
        assert report.strategy == "disk"
        self.check(report, "caller breaks off")

    def caller_is_interrupted(self, chance: random.Random) -> None:
        _, options = self._from_peer(chance)
        self._refused(KeyboardInterrupt, "caller is interrupted", progress=_raising(KeyboardInterrupt()), **options)

    def _refused(self, kind: type[BaseException], what: str, **options: object) -> None:
        try:
            self.load(**options)
        except kind:
            self.outcomes[f"{what}: {kind.__name__}"] += 1
        else:
            raise AssertionError(f"{what}: the load was not refused")

    # What is left

    def sample(self, load: int) -> dict[str, float]:
        """What this process and its registries hold, once what is on its way out has gone."""
        self.let_go()
        give_up = time.monotonic() + SETTLE_S
        found = self._counts()
        while any(count > self._least.get(name, 0) for name, count in found.items()) and time.monotonic() < give_up:
            time.sleep(0.1)
            found = self._counts()
            self._least = {name: min(count, self._least.get(name, count)) for name, count in found.items()}
        return {"load": load, "rss MB": rss_nbytes() / 1e6, **found}

    def _counts(self) -> dict[str, int]:
        gc.collect()
        threads = threads_of(os.getpid())
        with (
            closing(DirectoryRegistry(self.directory.removeprefix("file://"), signing_key=None)) as directory,
            closing(RedisRegistry(self.redis.url, signing_key=None, timeout_s=5.0, lease_ttl_s=2.0)) as redis,
            self.redis.client as client,
        ):
            records = len(directory.find(None)), len(redis.find(None))
            keys = int(client.dbsize())
        maps = Path("/proc/self/maps").read_text()
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(threads),
            "ours": sum(each.startswith("mx-") for each in threads),
            "agents": threads.count("async"),
            "memfds": maps.count("memfd:modelexpress"),
            "/dev/shm": sum("/dev/shm/" in line for line in maps.splitlines()),
            "files": len(os.listdir(self.directory.removeprefix("file://"))),
            "records": sum(records),
            "redis keys": keys,
        }


TRANSPORTS = ("host", "nixl", "tcp")


def _raising(error: BaseException) -> Callable[[int], None]:
    failures = [error]

    def once(_: int) -> None:
        if failures:
            raise failures.pop()

    return once


def rss_nbytes() -> int:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def main(folder: str, loads: int, seed: int) -> None:
    """Raises what a load raised that should not have."""
    chance = random.Random(seed)
    samples: list[dict[str, float]] = []
    took_s: list[float] = []
    with RedisServer(Path(folder)) as redis:
        soak = Soak(Path(folder), redis)
        try:
            for number in range(1, loads + 1):
                began = time.monotonic()
                (soak.bad if number % 2 else soak.good)(chance)
                took_s.append(time.monotonic() - began)
                if number % EVERY == 0:
                    samples.append(soak.sample(number))
                    _show(samples[-1], first=len(samples) == 1)
        finally:
            soak.close()
    mean_s = sum(took_s) / len(took_s)
    print(json.dumps({"samples": samples, "outcomes": soak.outcomes, "mean_s": mean_s, "most_s": max(took_s)}))


def _show(sample: dict[str, float], *, first: bool) -> None:
    if first:
        print(" ".join(f"{name:>10}" for name in sample))
    print(
        " ".join(f"{count:10.1f}" if name == "rss MB" else f"{count:10}" for name, count in sample.items()), flush=True
    )
