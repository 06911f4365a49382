"""Which weights a checkpoint path means: by a revision that the user gives, else by the files' content."""

from __future__ import annotations

import os
import re
from pathlib import Path

from modelexpress.checkpoint.content_digest import content_digest
from modelexpress.checkpoint.index import open_index
from modelexpress.config import Config
from modelexpress.errors import CheckpointError, ConfigError, NotAvailable, printable
from modelexpress.manifest import WeightsIdentity

_HUB_FOLDER = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/[^/]+$")

# Changes when modelexpress lays a plain module out in another way, so that old and new do not mix.
_MODULE_LAYOUT_VERSION = "1"


def model_name(checkpoint: Path) -> str:
    """The hub's name of a model in the hub's cache, else the folder's or file's own name."""
    path = os.path.abspath(checkpoint)  # without `..`, by which two models would have one name
    in_hub = _HUB_FOLDER.search(path)
    name = f"{in_hub['org']}/{in_hub['name']}" if in_hub is not None else os.path.basename(path)
    if not name:
        raise ConfigError(f"{checkpoint} has no name of its own; give model_name with the revision")
    return printable(name)


def label(checkpoint: Path, config: Config) -> str:
    """What people call these weights."""
    name = config.model_name or model_name(checkpoint)
    return f"{name}@{config.revision}" if config.revision is not None else name


def content_of(checkpoint: Path, config: Config) -> tuple[str, str]:
    """(model, revision) of a checkpoint; the model is empty where a digest says it all.

    Reads the files only when no revision is given.

    Raises:
        NotAvailable: no revision is given and the files cannot be read.
    """
    if config.revision is not None:
        return config.model_name or model_name(checkpoint), config.revision
    try:
        return "", content_digest(open_index(checkpoint), threads=config.threads)
    except CheckpointError as exc:
        raise NotAvailable(f"no revision is given, and the files cannot say which weights they are: {exc}") from exc


def module_identity(checkpoint: Path, config: Config) -> WeightsIdentity:
    """Identity of a plain module. Its dtypes and shapes are compared tensor by tensor, by the plan."""
    model, revision = content_of(checkpoint, config)
    return WeightsIdentity(
        model=model,
        revision=revision,
        engine="module",
        engine_version=_MODULE_LAYOUT_VERSION,
        dtype="as built",
        quantization="none",
        role="target",
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        ep_rank=0,
        ep_size=1,
        dp_rank=0,
        dp_size=1,
    )
