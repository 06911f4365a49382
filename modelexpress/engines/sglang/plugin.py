"""The plugin that SGLang loads in each of its processes: it makes `modelexpress` a load format.

It also sees when SGLang opens and leaves its memory regions. Nothing heavy is imported here: servers that use another
format pay for a comparison of two strings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

NAME = "modelexpress"

_CHOICES = "sglang.srt.server_args.add_load_format_choices"
_HOOKS = "sglang.srt.plugins.hook_registry.HookRegistry"
_GATE = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_REGIONS = tuple(
    f"sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapter{kind}.region" for kind in ("Real", "Noop")
)
_WORKING = "0.5.13 to 0.5.23"


def register() -> None:
    """Called by SGLang (entry point group `sglang.srt.plugins`) before it reads its arguments.

    Raises:
        SystemExit: the command line asks for this format, and this SGLang cannot be given it. SGLang logs and
            ignores every other exception of a plugin.
    """
    missing = [name for name in (_CHOICES, _HOOKS, _GATE) if _find(name) is None]
    if missing:
        _refuse(missing)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import LOAD_FORMAT_CHOICES, add_load_format_choices

    if NAME not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([NAME])
    HookRegistry.register(_GATE, _choose_loader, HookType.AROUND)
    for region in _REGIONS:
        if _find(region) is not None:
            HookRegistry.register(region, _around_region, HookType.AROUND)


def _choose_loader(original: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang takes a class as a load format and calls it; ours stands in for the name."""
    given = load_config.load_format
    if isinstance(given, str) and given.lower() == NAME:
        from modelexpress.engines.sglang.loader import ModelExpressLoader

        load_config.load_format = ModelExpressLoader
        return None
    return original(load_config, *args, **kwargs)


def _around_region(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from modelexpress.engines.sglang.regions import around_region

    return around_region(original, *args, **kwargs)


def _find(dotted: str) -> object | None:
    """What a dotted name means: attributes of the longest prefix that is a module."""
    parts = dotted.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:at]))
        except ImportError:
            continue
        for name in parts[at:]:
            found = getattr(found, name, None)
        return found
    return None


def _refuse(missing: list[str]) -> None:
    """Say what is missing where the format is asked for, and only there."""
    message = (
        f"modelexpress cannot be a load format of SGLang {version('sglang')}: it has no {', '.join(missing)}; "
        f"it works with SGLang {_WORKING}"
    )
    if any(argument == NAME or argument.endswith(f"={NAME}") for argument in sys.argv):
        raise SystemExit(message)
    load_format = _find("sglang.srt.configs.load_config.LoadFormat")
    if isinstance(load_format, type):

        def unknown(cls: type, value: object) -> None:
            if value == NAME:
                raise ValueError(message)

        load_format._missing_ = classmethod(unknown)  # type: ignore[attr-defined]  # an enum's own hook
