"""What the benchmarks write: a row for each pass, and ratios with the least and the most of their pairs.

Rows are JSON lines under benchmarks/results/. `summary.json` there has, for each name, what came out, and GOALS says
what is asked of it. Usage: ratios.py [FOLDER] prints the summary of a folder as a table.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
SUMMARY = RESULTS / "summary.json"
WORST = "extra_memory_mib"  # the worst of those whose names begin with it
Row = Mapping[str, object]


@dataclass(frozen=True)
class Goal:
    """A median has to be at least, or at most, this."""

    limit: float
    at_least: bool

    def is_met(self, median: float) -> bool:
        return median >= self.limit if self.at_least else median <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:.3g}"


GOALS: Mapping[str, Goal] = {
    "peer_vs_raw_copy": Goal(0.80, at_least=True),
    "peer_tcp_vs_raw_tcp": Goal(0.80, at_least=True),
    "peer_vs_nvidia": Goal(1.3, at_least=True),
    "peer_vs_plain_nixl": Goal(1.3, at_least=True),
    "peer_tcp_vs_nvidia": Goal(2.4, at_least=True),
    "peer_verified_vs_raw_copy": Goal(0.65, at_least=True),
    "disk_warm_vs_memcpy": Goal(1.0, at_least=True),
    "disk_warm_vs_best_peer": Goal(1.25, at_least=True),
    "disk_cold_vs_best_peer": Goal(1.05, at_least=True),
    "disk_cold_vs_device": Goal(0.95, at_least=True),
    WORST: Goal(64 + 0.01 * 2e9 / 2**20, at_least=False),  # 64 MiB and 1 % of 2 GB
    "gms_import_vs_memcpy": Goal(0.1, at_least=False),
    "retry_peak_vs_clean": Goal(1.10, at_least=False),
    "peer_death_at_90_vs_clean": Goal(1.25, at_least=False),
    "two_sources_one_slow_vs_one": Goal(1.4, at_least=False),
    "registry_find_1000_ms": Goal(50, at_least=False),
    "fleet_vs_ideal": Goal(1.3, at_least=False),
    "import_vs_torch": Goal(1.25, at_least=False),
    "help_s": Goal(0.3, at_least=False),
}


@dataclass(frozen=True)
class Ratio:
    """What the pairs of one comparison said."""

    median: float
    min: float
    max: float
    pairs: int


def ratio_of(pairs: Sequence[float]) -> Ratio:
    """One number a pair. Raises ValueError when there is none."""
    if not pairs:
        raise ValueError("no pair was measured")
    return Ratio(statistics.median(pairs), min(pairs), max(pairs), len(pairs))


def pairs_of(measured: Sequence[Row], ours: str, others: Sequence[str], *, state: str | None = None) -> list[float]:
    """Others' seconds over ours, a number a pair; of passes in this state of the page cache, where there is one.

    The fastest of the others is one of them for the whole run, not the luckiest of each pair.
    """
    seconds = {
        (str(row["way"]), row["pair"]): float(str(row["seconds"])) for row in measured if row.get("state") == state
    }
    numbers = [pair for way, pair in seconds if way == ours]
    known = [way for way in others if all((way, pair) in seconds for pair in numbers)]
    if not known or not numbers:
        return []
    best = min(known, key=lambda way: statistics.median(seconds[way, pair] for pair in numbers))
    return [seconds[best, pair] / seconds[ours, pair] for pair in numbers]


@contextmanager
def rows(benchmark: str) -> Iterator[Callable[[Row], None]]:
    """Append rows to the file of a benchmark; each gets the load of the machine, and when this run of it began."""
    RESULTS.mkdir(exist_ok=True)
    run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with (RESULTS / f"{benchmark}.jsonl").open("a") as out:

        def write(row: Row) -> None:
            out.write(json.dumps({**row, "run": run, "load_average": round(os.getloadavg()[0], 2)}) + "\n")
            out.flush()

        yield write


def last_run(benchmark: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of the latest run of a benchmark; none when there was no run."""
    path = folder / f"{benchmark}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in found if row["run"] == found[-1]["run"]]


def add_to_summary(found: Mapping[str, Ratio]) -> None:
    """Put ratios in the place of earlier ones of the same names."""
    RESULTS.mkdir(exist_ok=True)
    ratios = read_summary() | {name: asdict(each) for name, each in found.items()}
    extra = [each for name, each in ratios.items() if name.startswith(f"{WORST}_")]
    if extra:
        ratios[WORST] = max(extra, key=lambda each: each["max"])
    SUMMARY.write_text(json.dumps({"ratios": ratios}, indent=1, sort_keys=True) + "\n")


def read_summary() -> dict[str, dict[str, float]]:
    """All ratios by name; none before the first benchmark has run."""
    if not SUMMARY.exists():
        return {}
    ratios: dict[str, dict[str, float]] = json.loads(SUMMARY.read_text())["ratios"]
    return ratios


def show(found: Mapping[str, Ratio]) -> None:
    """A table of ratios and their goals."""
    table = Table("ratio", "median", "min", "max", "pairs", "goal", "")
    for name, each in found.items():
        goal = GOALS.get(name)
        verdict = "" if goal is None else "met" if goal.is_met(each.median) else "missed"
        cells = (f"{value:.3f}" for value in (each.median, each.min, each.max))
        table.add_row(name, *cells, str(each.pairs), "" if goal is None else str(goal), verdict)
    Console(width=max(120, Console().width)).print(table)


def show_passes(measured: Sequence[Row]) -> None:
    """A table of what the passes of each way took."""
    table = Table("page cache", "way", "GB/s, median", "least", "most", "CPU s, median", "extra MiB, most")
    for state, way in dict.fromkeys((row.get("state"), str(row["way"])) for row in measured):
        of_way = [row for row in measured if (row.get("state"), row["way"]) == (state, way)]
        rates, used, extra = (
            [float(str(row[name])) for row in of_way] for name in ("gb_per_s", "cpu_seconds", "extra_bytes")
        )
        cells = (statistics.median(rates), min(rates), max(rates), statistics.median(used))
        table.add_row(str(state or "-"), way, *(f"{each:.2f}" for each in cells), f"{max(extra) / 2**20:.1f}")
    Console(width=max(120, Console().width)).print(table)


def as_markdown(folder: Path = RESULTS) -> str:
    """The summary as a table, in the order of GOALS."""
    ratios = json.loads((folder / "summary.json").read_text())["ratios"]
    lines = ["| ratio | median | min | max | pairs | goal |", "|---|---|---|---|---|---|"]
    for name, goal in GOALS.items():
        if name in ratios:
            each = ratios[name]
            verdict = "met" if goal.is_met(each["median"]) else "missed"
            cells = " | ".join(f"{each[key]:.3g}" for key in ("median", "min", "max"))
            lines.append(f"| `{name}` | {cells} | {each['pairs']} | {goal}, {verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown(*map(Path, sys.argv[1:])))
