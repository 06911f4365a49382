"""Run:ai's model streamer, then a copy into the parameters. Usage: runai_disk.py FOLDER STRATEGY.

The strategy (`default`, or one that the streamer knows, like `sync_buffered`) holds for a whole process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from driver import Parameters, parameters_like, serve, shards

_RING_NBYTES = 256 * 1000 * 1000


def load(stream: Callable[[], object], folder: Path, parameters: Parameters, concurrency: int, ring: bool) -> None:
    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(concurrency)  # it looks at each load
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(_RING_NBYTES if ring else -1)
    torch.set_num_threads(1)
    with stream() as streamer:
        streamer.stream_files(shards(folder), owned=False)
        for name, tensor in streamer.get_tensors():
            parameters[name].copy_(tensor)


def main(folder: Path, strategy: str) -> None:
    if strategy != "default":
        os.environ["RUNAI_STREAMER_FS_STRATEGY"] = strategy
    from runai_model_streamer import SafetensorsStreamer

    parameters = parameters_like(folder)
    ways = {
        f"{strategy}, concurrency {each}{', 256 MB' if ring else ''}": partial(
            load, SafetensorsStreamer, folder, parameters, each, ring
        )
        for each in (2, 8)
        for ring in (False, True)
    }
    serve(ways, parameters, release=f"runai-model-streamer {version('runai-model-streamer')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
