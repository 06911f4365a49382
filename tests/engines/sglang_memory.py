"""What the tests of KV pool sizes share: a device whose memory is known, and models with a report of their load."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

from modelexpress.strategies.base import LoadReport

GIB = 1 << 30


@dataclass
class Device:
    """Memory that is used by name; `free_gib` is what SGLang measures."""

    nbytes: int = 16 * GIB
    used: dict[str, int] = field(default_factory=dict)

    def free_gib(self, *_: object, **__: object) -> float:
        return (self.nbytes - sum(self.used.values())) / GIB


class Generation(NamedTuple):
    """What the accounting reads of an imported generation: which one it is."""

    instance: str
    generation: int


def loaded(nbytes=0, generation=1):
    """A model that was loaded, with `nbytes` of a generation that were there before."""
    imported = Generation("service", generation) if nbytes else None
    report = LoadReport(None, "gms" if nbytes else "disk", None, nbytes, 0.0, (), None, imported, nbytes)
    return SimpleNamespace(modelexpress=SimpleNamespace(report=report))


def foreign():
    """A model that SGLang loaded by itself."""
    return SimpleNamespace()


def install_tree(monkeypatch, version="0.0", **classes):
    """Make classes importable under the names of SGLang's: `Runner`, `Loader`, `Scheduler`."""
    places = {
        "Runner": ("sglang.srt.model_executor.model_runner", "ModelRunner"),
        "Loader": ("sglang.srt.model_loader.loader", "BaseModelLoader"),
        "Scheduler": ("sglang.srt.managers.scheduler", "Scheduler"),
    }
    names = ("sglang", "sglang.srt", "sglang.srt.model_executor", "sglang.srt.model_loader", "sglang.srt.managers")
    for name in (*names, *(module for module, _ in places.values())):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["sglang"].__version__ = version
    for key, cls in classes.items():
        module, name = places[key]
        setattr(sys.modules[module], name, cls)
