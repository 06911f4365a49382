"""A model as large as one likes: its checkpoint is a file with holes, its sources have no memory behind theirs.

    python -m tests.support.hollow NBYTES LAYERS REGISTRY_URL

publishes the model of that size, never written, and prints "ready"; every page that is read of it is the kernel's one
page of zeros. The checkpoint has marks in every layer, which tell its bytes from those of the sources.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
from pathlib import Path

import torch
from torch import nn

import modelexpress
from tests.support.safetensors_writer import entry

COLUMNS = 4096
NAMED = {"revision": "r1", "model_name": "hollow"}
_MARK_NBYTES = 4096


def build(nbytes: int, layers: int, device: str) -> nn.Module:
    """`layers` parameters in bf16, of `nbytes` together or a little less, allocated and not written."""
    module = nn.Module()
    for at in range(layers):
        empty = torch.empty(_rows(nbytes, layers), COLUMNS, dtype=torch.bfloat16, device=device)
        module.register_parameter(f"layer{at}", nn.Parameter(empty, requires_grad=False))
    return module


def write_checkpoint(folder: Path, nbytes: int, layers: int) -> Path:
    """Its files: zeros that take no room on the disk, and a mark at both ends and in the middle of each layer."""
    size = _rows(nbytes, layers) * COLUMNS * 2
    shape = (_rows(nbytes, layers), COLUMNS)
    header = json.dumps({f"layer{at}": entry("BF16", shape, at * size, (at + 1) * size) for at in range(layers)})
    encoded = header.encode().ljust(-(-len(header) // 8) * 8)
    folder.mkdir(parents=True)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        start = file.tell()
        file.truncate(start + layers * size)
        for at in range(layers):
            for offset in _mark_offsets(size):
                file.seek(start + at * size + offset)
                file.write(_mark(at, offset))
    return folder


def wrong_layers(module: nn.Module) -> list[str]:
    """The layers whose bytes are not those of the checkpoint: without a mark, or with something beside the marks."""
    wrong = []
    for at, (name, parameter) in enumerate(module.named_parameters()):
        found = parameter.detach().view(torch.uint8).flatten()
        places = _mark_offsets(found.numel())
        marks = {place: bytes(found[place : place + _MARK_NBYTES].tolist()) for place in places}
        expected = {place: _mark(at, place) for place in places}
        written = sum(len(mark) - mark.count(0) for mark in expected.values())
        if marks != expected or int(torch.count_nonzero(found)) != written:
            wrong.append(name)
    return wrong


def _rows(nbytes: int, layers: int) -> int:
    return nbytes // layers // COLUMNS // 2


def _mark_offsets(size: int) -> tuple[int, int, int]:
    return 0, size // 2, size - _MARK_NBYTES


def _mark(layer: int, offset: int) -> bytes:
    return random.Random(f"{layer} {offset}").randbytes(_MARK_NBYTES)


def main(nbytes: int, layers: int, registry: str) -> None:
    """Publish until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    model = build(nbytes, layers, "cpu")
    with modelexpress.publish(model, "hollow", registry=registry, verify="off", **NAMED):
        print("ready", os.getpid(), flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
