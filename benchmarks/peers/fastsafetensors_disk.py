"""fastsafetensors without GPUDirect, then a copy into the parameters. Usage: fastsafetensors_disk.py FOLDER."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from driver import Parameters, parameters_like, serve, shards
from fastsafetensors import SafeTensorsFileLoader, SingleGroup


def load(folder: Path, parameters: Parameters, threads: int, direct: bool) -> None:
    os.environ["FASTSAFETENSORS_ODIRECT"] = "1" if direct else "0"  # it looks at each load
    torch.set_num_threads(1)
    for path in shards(folder):  # one file at a time: all at once would need the memory of the model twice
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True, max_threads=threads, set_numa=False)
        loader.add_filenames({0: [path]})
        files = loader.copy_files_to_device()
        for name in loader.get_keys():
            parameters[name].copy_(files.get_tensor(name))
        files.close()
        loader.close()


def main(folder: Path) -> None:
    parameters = parameters_like(folder)
    ways = {
        f"{'direct' if direct else 'buffered'}, {threads} threads": partial(load, folder, parameters, threads, direct)
        for direct in (True, False)
        for threads in (2, 16)
    }
    serve(ways, parameters, release=f"fastsafetensors {version('fastsafetensors')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
