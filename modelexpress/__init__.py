"""Gets a model's weights into an inference replica: from a peer, or from disk; fast, and never wrong.

The names are loaded when they are first used, so that `modelexpress --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelexpress.api import load, load_checkpoint, publish, serve_checkpoint
    from modelexpress.config import Config
    from modelexpress.errors import (
        CheckpointError,
        ConfigError,
        LoadFailed,
        ManifestMismatch,
        ModelExpressError,
        NotAvailable,
        RecoveryFailed,
        RegistryError,
        StrategyError,
        TransferFailed,
        VerificationFailed,
    )
    from modelexpress.source import WeightSource
    from modelexpress.strategies.base import Attempt, LoadReport

__version__ = "0.1.0"

_HOMES = {
    "modelexpress.api": ("load", "load_checkpoint", "publish", "serve_checkpoint"),
    "modelexpress.config": ("Config",),
    "modelexpress.errors": (
        "CheckpointError",
        "ConfigError",
        "LoadFailed",
        "ManifestMismatch",
        "ModelExpressError",
        "NotAvailable",
        "RecoveryFailed",
        "RegistryError",
        "StrategyError",
        "TransferFailed",
        "VerificationFailed",
    ),
    "modelexpress.source": ("WeightSource",),
    "modelexpress.strategies.base": ("Attempt", "LoadReport"),
}
__all__ = [
    "Attempt",
    "CheckpointError",
    "Config",
    "ConfigError",
    "LoadFailed",
    "LoadReport",
    "ManifestMismatch",
    "ModelExpressError",
    "NotAvailable",
    "RecoveryFailed",
    "RegistryError",
    "StrategyError",
    "TransferFailed",
    "VerificationFailed",
    "WeightSource",
    "load",
    "load_checkpoint",
    "publish",
    "serve_checkpoint",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'modelexpress' has no attribute {name!r}")
