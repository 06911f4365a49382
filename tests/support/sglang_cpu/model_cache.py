"""Test models that are made once and kept between runs, beside the tree and ignored by git."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.sglang_cpu import models
from tests.support.sglang_cpu.environment import ROOT

CACHE = ROOT / ".sglang-models"


class ModelCache:
    """Folders of models by kind and seed. They are shared: copy one before breaking it.

    What another version of `models` made is thrown away.
    """

    def __init__(self, root: Path = CACHE) -> None:
        self._folder = root / hashlib.sha256(Path(models.__file__).read_bytes()).hexdigest()[:12]
        for other in root.glob("*"):
            if other != self._folder:
                shutil.rmtree(other)
        self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, kind: str, *, seed: int = 0) -> Path:
        """The folder of a model; see models.KINDS."""
        return self._made(f"{kind}-{seed}", lambda out: models.make_model(kind, out, seed=seed))

    def adapter(self, *, seed: int = 0) -> Path:
        """The folder of a LoRA adapter for llama."""
        return self._made(f"{models.ADAPTER}-{seed}", lambda out: models.make_adapter(out, seed=seed))

    def _made(self, name: str, make: Callable[[Path], Path]) -> Path:
        """Made under a passing name, so that a run that is killed leaves no half-made model."""
        path = self._folder / name
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=self._folder) as passing:
                make(Path(passing) / name).rename(path)
        return path
