"""What every peer's driver does: fill the same parameters when it is asked, and say what they hold.

A driver runs in an environment and a process of its own, and talks by JSON lines: a command on stdin, an answer on
stdout. `go` fills the parameters once by one of the driver's ways and says how long that took; `digest` says what they
hold; `spoil` makes all of them wrong. It ends with its stdin. What the peer itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash

SPOILED_EVERY = 64 * 1024
Parameters = dict[str, torch.Tensor]


def parameters_like(folder: Path) -> Parameters:
    """A touched tensor with memory of its own for each tensor of the files, by their headers."""
    from safetensors import safe_open

    made: Parameters = {}
    for path in shards(folder):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                part = opened.get_slice(name)
                if part.get_dtype() != "BF16":
                    raise SystemExit(f"{name} is {part.get_dtype()}; these benchmarks have bf16 alone")
                made[name] = torch.zeros(part.get_shape(), dtype=torch.bfloat16)
    return dict(sorted(made.items()))


def shards(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("*.safetensors")))


def digest_of(parameters: Parameters) -> str:
    """xxh3_128 of the bytes of tensors by name."""
    found = xxhash.xxh3_128()
    for _, tensor in sorted(parameters.items()):
        found.update(_as_bytes(tensor).numpy())
    return found.hexdigest()


def spoil(parameters: Parameters) -> None:
    for tensor in parameters.values():
        _as_bytes(tensor)[::SPOILED_EVERY] ^= 0xFF


def serve(ways: Mapping[str, Callable[[], object]], parameters: Parameters, **about: object) -> None:
    """Answer until stdin ends. `about` is told once: releases, and what the parent needs to know."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _say(answers, {"ready": True, "ways": list(ways), **about})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "go":
            _say(answers, _timed(ways[asked["way"]]))
        elif asked["do"] == "spoil":
            spoil(parameters)
            _say(answers, {})
        else:
            _say(answers, {"digest": digest_of(parameters)})


def _timed(run: Callable[[], object]) -> dict[str, object]:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak becomes what is used now
    before, used = _status("VmRSS"), time.process_time()
    started = time.perf_counter()
    said = run()
    seconds, used = time.perf_counter() - started, time.process_time() - used
    extra = max(0, _status("VmHWM") - before)
    return {"seconds": seconds, "cpu_seconds": used, "extra_bytes": extra, "said": said}


def _status(field: str) -> int:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _say(answers: object, what: Mapping[str, object]) -> None:
    print(json.dumps(what), file=answers, flush=True)  # type: ignore[call-overload]  # a text file


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)
