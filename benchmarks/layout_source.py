"""Loads a model by disk and publishes it the way an engine holds it, until SIGTERM. Used by benchmarks and tests.

Usage: layout_source.py CHECKPOINT REGISTRY_URL [REVISION MODEL_NAME]. With a revision it is offered by tcp, too.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

import modelexpress
from modelexpress.adapter import CheckpointModule
from modelexpress.checkpoint.index import open_index


def build(checkpoint: Path) -> CheckpointModule:
    """A model of a checkpoint's tensors, allocated and not yet written."""
    module = CheckpointModule()
    module.allocate(open_index(checkpoint).manifest)
    return module


def main(checkpoint: Path, registry: str, revision: str | None = None, model_name: str | None = None) -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    report = modelexpress.load(lambda: build(checkpoint), checkpoint, strategies="disk")
    assert report.model is not None
    named = {"revision": revision, "model_name": model_name, "transports": "host,nixl,tcp"} if revision else {}
    with modelexpress.publish(report.model, checkpoint, registry=registry, **named):
        print("ready", flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
