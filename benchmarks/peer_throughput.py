"""modelexpress beside what a user would pick instead, interleaved, on the same files and tensors, bytes checked.

Disk, warm and cold page cache: safetensors, fastsafetensors, Run:ai's streamer. From process to process: the transfer
manager of NVIDIA's package, by the ways that UCX finds and over TCP alone; Mooncake's transfer engine over TCP. Each
peer runs in the environment `.venv-peers` (`make bench-peers` makes it) and in processes of its own. First every
setting of a peer is tried, then its best one is measured, in turns with ours. What is timed of modelexpress is a whole
`load()`; of the transfer peers it is the call that moves the bytes, with everything prepared.

Writes one JSON row a pass, and one with the reason for a peer that does not run, to
benchmarks/results/peer_throughput.jsonl, and ratios to benchmarks/results/summary.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from checkpoints import write_300_tensors
from disk_throughput import DiskTarget, Recorder, load
from page_cache_state import State, put
from peer_drivers import DoesNotRun, Driver
from ratios import Ratio, add_to_summary, pairs_of, ratio_of, rows, show, show_passes
from transfer_source import REVISION, TCP_REVISION
from transfer_throughput import Recorder as TransferRecorder
from transfer_throughput import Source, Target
from transfer_throughput import load as load_from_peer

Row = dict[str, object]
Write = Callable[[Mapping[str, object]], None]
TRIES = 2  # of each setting, before the best one is measured

DISK_PEERS = (
    ("safetensors_disk.py",),
    ("fastsafetensors_disk.py",),
    ("runai_disk.py", "default"),
    ("runai_disk.py", "sync_buffered"),
)


class DiskPeer:
    """One peer that reads files, and the rows of its passes."""

    def __init__(self, driver: Driver, target: DiskTarget, recorder: Recorder) -> None:
        self.best: dict[State, str] = {}
        self._driver = driver
        self._target = target
        self._recorder = recorder
        self._release = str(driver.said["release"])

    def way(self, state: State) -> str:
        return f"{self._release}: {self.best[state]}"

    def try_all(self, state: State) -> None:
        """Find the fastest setting for files in this state."""
        tried: dict[str, list[float]] = {}
        for number in range(TRIES):
            for setting in self._driver.said["ways"]:
                tried.setdefault(setting, []).append(self._pass(setting, f"try {number}", state))
        self.best[state] = min(tried, key=lambda setting: min(tried[setting]))

    def measure(self, pair: int, state: State) -> None:
        if state == "warm":
            self._driver.ask(do="go", way=self.best[state])
        self._pass(self.best[state], pair, state)

    def _pass(self, setting: str, pair: int | str, state: State) -> float:
        self._driver.ask(do="spoil")
        share = put(self._target.files, state)
        went = self._driver.ask(do="go", way=setting)
        if self._driver.ask(do="digest")["digest"] != self._target.digest:
            raise SystemExit(f"{self._release}: {setting} brought wrong bytes")
        self._recorder.add({
            "way": f"{self._release}: {setting}", "state": state, "share_in_memory": share, "pair": pair,
            "nbytes": self._target.nbytes, "tensors": len(self._target.parameters), "seconds": went["seconds"],
            "cpu_seconds": went["cpu_seconds"], "gb_per_s": self._target.nbytes / went["seconds"] / 1e9,
            "extra_bytes": went["extra_bytes"], "strategy": setting,
        })  # fmt: skip
        return float(went["seconds"])


def start_or_say(write: Write, script: str, *arguments: str, **environment: str) -> Driver | None:
    """A driver; None, and a row with the reason, where it does not run."""
    try:
        return Driver(script, *arguments, environment=environment)
    except (DoesNotRun, OSError) as exc:
        write({"way": " ".join((script, *arguments[:1])), "does_not_run": str(exc)})
        return None


def compare_disk(folder: Path, pairs: int, write: Write) -> tuple[list[Row], dict[str, Ratio]]:
    target = DiskTarget(folder)
    recorder = Recorder(target, write)
    found: dict[str, Ratio] = {}
    with ExitStack() as stack:
        peers = []
        for script, *arguments in DISK_PEERS:
            driver = start_or_say(write, script, str(folder.absolute()), *arguments)
            if driver is not None:
                peers.append(DiskPeer(stack.enter_context(driver), target, recorder))
        for state in ("warm", "cold"):
            for peer in peers:
                peer.try_all(state)
            for pair in range(pairs):
                recorder.time("load", lambda: load(target), pair, state)
                for peer in peers:
                    peer.measure(pair, state)
            against = pairs_of(recorder.rows, "load", [peer.way(state) for peer in peers], state=state)
            if against:
                found[f"disk_{state}_vs_best_peer"] = ratio_of(against)
    return [row for row in recorder.rows if isinstance(row["pair"], int)], found


class TransferPeer:
    """A source and a target of one peer; `run` is one pass of the target."""

    def __init__(self, source: Driver, target: Driver, *, tcp: bool) -> None:
        self.way = f"{target.said['release']}{', TCP' if tcp else ''}"
        self.digest = source.ask(do="digest")["digest"]
        self._source = source
        self._target = target

    @contextmanager
    def resting(self) -> Iterator[None]:
        with self._source.resting(), self._target.resting():
            yield

    def run(self, pair: int, nbytes: int, write: Write) -> Row:
        """A warm-up and a timed pass; what landed is compared with what the source holds."""
        (way,) = self._target.said["ways"]
        self._target.ask(do="go", way=way)
        self._target.ask(do="spoil")
        went = self._target.ask(do="go", way=way)
        if self._target.ask(do="digest")["digest"] != self.digest:
            raise SystemExit(f"{self.way} brought wrong bytes")
        row: Row = {"way": self.way, "pair": pair, "nbytes": nbytes, "strategy": f"{way}, {went['said']}"} | {
            name: went[name] for name in ("seconds", "cpu_seconds", "extra_bytes")
        }
        row["gb_per_s"] = nbytes / float(went["seconds"]) / 1e9
        write(row)
        return row


@contextmanager
def all_resting(peers: Iterable[TransferPeer]) -> Iterator[None]:
    with ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.resting())
        yield


def transfer_peer(
    stack: ExitStack, write: Write, script: str, options: argparse.Namespace, *, tcp: bool, **environment: str
) -> TransferPeer | None:
    sizes = (str(options.nbytes), str(options.tensors))
    source = start_or_say(write, script, "source", *sizes, **environment)
    if source is None:
        return None
    stack.enter_context(source)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as said:
        json.dump(source.said["peer"], said)
        said.flush()
        target = start_or_say(write, script, "target", *sizes, said.name, **environment)
    return None if target is None else TransferPeer(source, stack.enter_context(target), tcp=tcp)


def compare_transfers(
    options: argparse.Namespace, write: Write, *, tcp: bool, peers: Mapping[str, tuple[str, dict[str, str]]]
) -> tuple[list[Row], dict[str, list[float]]]:
    """Ours beside each peer that runs; and for each, its seconds over ours, a number a pair."""
    with ExitStack() as stack:
        registry = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/peers"
        source = stack.enter_context(Source(options, registry, raw=tcp))
        target = Target(options, source.said["digest"])
        recorder = TransferRecorder(target, write)
        running = {
            name: peer
            for name, (script, environment) in peers.items()
            if (peer := transfer_peer(stack, write, script, options, tcp=tcp, **environment)) is not None
        }
        ours: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in running}
        found: list[Row] = []
        chosen: dict[str, Any] = {"revision": TCP_REVISION, "transports": "tcp"} if tcp else {"revision": REVISION}
        for pair in range(options.pairs):
            way = "load, tcp" if tcp else "load"
            with all_resting(running.values()):
                recorder.time(way, lambda: load_from_peer(target.model, registry, verify="off", **chosen), pair)
            ours.append(float(str(recorder.rows[-1]["seconds"])))
            for name, peer in running.items():
                with all_resting(other for other in running.values() if other is not peer):
                    row = peer.run(pair, target.nbytes, write)
                found.append(row)
                theirs[name].append(float(str(row["seconds"])))
    return recorder.rows + found, {
        name: [each / our for each, our in zip(seconds, ours, strict=True)] for name, seconds in theirs.items()
    }


def all_transfers(options: argparse.Namespace, write: Write) -> tuple[list[Row], dict[str, Ratio]]:
    nvidia, mooncake = "nvidia_transfer.py", "mooncake_transfer.py"
    found, ratios = compare_transfers(options, write, tcp=False, peers={"peer_vs_nvidia": (nvidia, {})})
    over_tcp = {
        "peer_tcp_vs_nvidia": (nvidia, {"NIXL_UCX_TLS": "tcp"}),
        "peer_tcp_vs_mooncake": (mooncake, {}),
    }
    more, others = compare_transfers(options, write, tcp=True, peers=over_tcp)
    return found + more, {name: ratio_of(pairs) for name, pairs in (ratios | others).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("demo-data/300-tensors"), help="written where it is not")
    parser.add_argument("--nbytes", type=int, default=2_000_000_000, help="of what moves between processes")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", choices=("disk", "transfers"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    table: list[Row] = []
    found: dict[str, Ratio] = {}
    with rows("peer_throughput") as write:
        if options.only != "transfers":
            table, found = compare_disk(write_300_tensors(options.folder), options.pairs, write)
        if options.only != "disk":
            more, ratios = all_transfers(options, write)
            table, found = table + more, found | ratios
    add_to_summary(found)
    show_passes(table)
    show(found)


if __name__ == "__main__":
    main()
