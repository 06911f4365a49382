"""What every peer's driver does: fill the same parameters when it is asked, and say what they hold.

A driver runs in an environment and a process of its own, and talks by JSON lines: a command on stdin, an answer on
stdout. `go` fills the parameters once by one of the driver's ways and says how long that took; `digest` says what they
hold; `spoil` makes all of them wrong. It ends with its stdin. What the peer itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from contents import digest_of, spoil
from one_pass import timed

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


def serve(ways: Mapping[str, Callable[[], object]], parameters: Parameters, **about: object) -> None:
    """Answer until stdin ends. `about` is told once: releases, and what the parent needs to know."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _say(answers, {"ready": True, "ways": list(ways), **about})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "go":
            _say(answers, asdict(timed(ways[asked["way"]])))
        elif asked["do"] == "spoil":
            spoil(parameters.values())
            _say(answers, {})
        else:
            _say(answers, {"digest": digest_of(parameters)})


def _say(answers: object, what: Mapping[str, object]) -> None:
    print(json.dumps(what), file=answers, flush=True)  # type: ignore[call-overload]  # a text file
