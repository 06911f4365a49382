"""safetensors: each file by `load_file`, then a copy into the parameters. Usage: safetensors_disk.py FOLDER."""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from driver import Parameters, parameters_like, serve, shards
from safetensors import safe_open
from safetensors.torch import load_file


def by_file(folder: Path, parameters: Parameters, threads: int) -> None:
    torch.set_num_threads(threads)  # of each copy
    for path in shards(folder):
        for name, tensor in load_file(path).items():
            parameters[name].copy_(tensor)


def by_tensor(folder: Path, parameters: Parameters) -> None:
    torch.set_num_threads(1)
    for path in shards(folder):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                parameters[name].copy_(opened.get_tensor(name))


def main(folder: Path) -> None:
    parameters = parameters_like(folder)
    ways = {
        "load_file, 1 thread": partial(by_file, folder, parameters, 1),
        "load_file, 2 threads": partial(by_file, folder, parameters, 2),
        "safe_open, 1 thread": partial(by_tensor, folder, parameters),
    }
    serve(ways, parameters, release=f"safetensors {version('safetensors')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
