"""What starting costs: importing modelexpress beside importing torch, and `modelexpress --help`, which needs no torch.

Fresh processes in turns, after one of each to fill the page cache. Usage: start_up.py [--pairs N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from ratios import Ratio, add_to_summary, ratio_of, rows, show
from rich.progress import track

WAYS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "import modelexpress": [sys.executable, "-c", "from modelexpress import load, publish"],
    "modelexpress --help": [sys.executable, "-m", "modelexpress", "--help"],
    "python": [sys.executable, "-c", "pass"],
}


# As installed: with its bytecode.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds_of(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    with rows("start_up") as write:
        for pair in track(range(-1, options.pairs), description="starting"):  # the first warms up
            for way, command in WAYS.items():
                seconds = seconds_of(command)
                if pair >= 0:
                    taken[way].append(seconds)
                    write({"way": way, "pair": pair, "seconds": seconds})
    pairs = zip(taken["import modelexpress"], taken["import torch"], strict=True)
    ratios: dict[str, Ratio] = {
        "import_vs_torch": ratio_of([ours / torch for ours, torch in pairs]),
        "help_s": ratio_of(taken["modelexpress --help"]),
    }
    add_to_summary(ratios)
    show(ratios)


if __name__ == "__main__":
    main()
