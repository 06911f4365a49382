"""Draws what the latest run of each benchmark wrote, one SVG file a benchmark.

Usage: plots.py [FOLDER]. Reads FOLDER/*.jsonl (benchmarks/results by default), and draws beside them.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from ratios import RESULTS, last_run

OURS, OTHERS = "#1f6f8b", "#b9b9b9"
STEPS = ("find", "build", "discover", "plan", "connect", "transfer", "finalize")  # the rest runs beside the transfer
Rows = list[dict[str, Any]]


def by(rows: Rows, key: str, value: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[str(row[key])].append(float(row[value]))
    return found


def bars(axes: Axes, groups: dict[str, list[float]], is_ours: Callable[[str], bool]) -> None:
    """Medians, with the least and the most as a line."""
    names = list(groups)[::-1]
    for at, name in enumerate(names):
        values = groups[name]
        axes.barh(at, statistics.median(values), color=OURS if is_ours(name) else OTHERS, height=0.7)
        axes.plot([min(values), max(values)], [at, at], color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)


def is_load(name: str) -> bool:
    return name.startswith("load")


def transfer(axes: Axes, rows: Rows) -> None:
    bars(axes, by(rows, "way", "gb_per_s"), lambda name: is_load(name) or "source" in name or "death" in name)
    axes.set_xlabel("GB/s; `load` is the whole of modelexpress.load(), the others the copy alone")
    axes.set_title(f"Peer to peer, {rows[0]['nbytes'] / 1e9:.1f} GB in {rows[0]['tensors']} tensors, one host")


def disk(axes: Axes, rows: Rows) -> None:
    found = defaultdict(list)
    for row in rows:
        found[f"{row['way']}, {row['state']}"].append(float(row["gb_per_s"]))
    bars(axes, dict(sorted(found.items(), key=lambda each: each[0].rpartition(", ")[2])), is_load)
    axes.set_xlabel("GB/s")
    axes.set_title("From disk into existing parameters")


def latency(axes: Axes, rows: Rows) -> None:
    ways = list(dict.fromkeys(row["way"] for row in rows))[::-1]
    left = [0.0] * len(ways)
    for step, color in zip(STEPS, mpl.colormaps["tab10"].colors, strict=False):  # type: ignore[attr-defined]  # stubs know no lists of colors
        wide = [statistics.median(row["steps"].get(step, 0.0) for row in rows if row["way"] == way) for way in ways]
        axes.barh(ways, wide, left=left, label=step, color=color, height=0.7)
        left = [one + more for one, more in zip(left, wide, strict=True)]
    totals = [statistics.median(row["seconds"] for row in rows if row["way"] == way) for way in ways]
    rest = [total - one for total, one in zip(totals, left, strict=True)]
    axes.barh(ways, rest, left=left, label="rest", color=OTHERS, height=0.7)
    axes.legend(fontsize="small", ncols=2)
    axes.set_xlabel("seconds until the weights are ready")
    axes.set_title(f"{max(row['nbytes'] for row in rows) / 1e9:.1f} GB, by strategy")
    axes.spines[["top", "right"]].set_visible(False)


def scale(axes: Axes, rows: Rows) -> None:
    tensors = [row for row in rows if "tensors" in row]
    axes.loglog(
        [row["tensors"] for row in tensors], [sum(row["seconds"].values()) for row in tensors], "o-", color=OURS
    )
    axes.set_xlabel("tensors")
    axes.set_ylabel("seconds")
    axes.set_title("Describe, offer, decode, plan: the work before a byte moves")
    axes.grid(visible=True, alpha=0.3)


def fleet(axes: Axes, rows: Rows) -> None:
    rows = [row for row in rows if row["seed"] == 0]
    replicas = [row["replicas"] for row in rows]
    lines = {
        "peers_s": "modelexpress",
        "ideal_s": "ideal doubling",
        "storage_s": "shared storage",
        "one_source_s": "one source",
    }
    for (key, label), style in zip(lines.items(), ("o-", ":", "--", "-."), strict=True):
        color = OURS if key == "peers_s" else "black"
        axes.loglog(replicas, [row[key] for row in rows], style, label=label, color=color)
    first = rows[0]
    axes.set_xlabel("replicas that start within a second")
    axes.set_ylabel("seconds until all have the model")
    axes.set_title(
        f"Simulated: {first['nbytes'] / 1e9:.0f} GB, links of {first['link_gb_per_s']:g} GB/s, "
        f"storage {first['storage_gb_per_s']:g} GB/s"
    )
    axes.legend()
    axes.grid(visible=True, alpha=0.3)


PLOTS: dict[str, Callable[[Axes, Rows], None]] = {
    "transfer_throughput": transfer,
    "disk_throughput": disk,
    "load_latency": latency,
    "scale": scale,
    "fleet": fleet,
}


def draw(folder: Path) -> Iterable[Path]:
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "modelexpress"  # the same rows make the same file
    for benchmark, plot in PLOTS.items():
        rows = last_run(benchmark, folder)
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
        plot(axes, rows)
        path = folder / f"{benchmark}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        yield path


if __name__ == "__main__":
    for drawn in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS):
        print(f"drew {drawn}")
