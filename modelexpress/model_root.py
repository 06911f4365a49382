"""ModelRoot: one module object that an engine holds, and at most one parameter set behind it.

The one thing in modelexpress that changes. A failed attempt leaves its root dirty; `reset` empties it, lets the
memory go, builds afresh and puts the new state on the same object, so that the engine's reference stays good and
no second parameter set ever exists.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from modelexpress.discovery import holds_tensors, slots_of
from modelexpress.errors import (
    ConfigError,
    ModelExpressError,
    RecoveryFailed,
    in_flight,
    raise_interrupt,
    release_frames,
)

logger = logging.getLogger(__name__)

# Dicts of hooks by id. A RemovableHandle points weakly at the very dict, so the objects themselves must survive.
_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_LOADING = (
    "_modelexpress_loading"  # on a module while it is loaded; lies there since two loads know nothing else in common
)
_OWN_STATE = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", *_HOOK_DICTS})


class Dirt(IntEnum):
    """What has happened to a model since it was built, from nothing to anything.

    A way of loading states the most it can start from; beyond that the root is reset first.
    """

    NONE = 0
    CHECKPOINT_BYTES = 1  # bytes of tensors that every checkpoint load overwrites
    LAYOUT = 2  # the served layout was prepared
    LAYOUT_BYTES = 3  # bytes of any tensor in that layout
    ANYTHING = 4


class ModelRoot:
    """Owns a module on behalf of an engine while its weights are being loaded.

    Attributes:
        module: the object the engine holds; never replaced.
        dirt: what it has gone through.
        resets: how often it was rebuilt.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.dirt = Dirt.NONE
        self.resets = 0
        self._accepted = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Hold this for a whole load: a reset frees memory that another load of the module would be writing to.

        Raises:
            ConfigError: another load of this module is under way, or one was broken off while it built the module
                again, which left nothing to load into.
        """
        load = _Load()
        mine = weakref.ref(load, self._end_loading)  # called where an interrupt keeps the end from being reached
        try:
            vars(self.module).setdefault(_LOADING, mine)  # one step: of two threads only one finds its own
            state = vars(self.module)  # another one, if the other load has just put a fresh one there
            if "_parameters" not in state:
                raise ConfigError(
                    f"the {type(self.module).__name__} is empty: a load of it is building it again, or was broken off "
                    "while it did; build a new one and load that"
                )
            if state.get(_LOADING) is not mine:
                raise ConfigError(
                    f"another thread is loading this {type(self.module).__name__}; wait for it, or load another object"
                )
            yield
        finally:
            self._end_loading(mine)
            del mine  # before the load, which would call it

    def _end_loading(self, mine: weakref.ref[_Load]) -> None:
        state = vars(self.module)
        if state.get(_LOADING) is mine:
            del state[_LOADING]

    @contextmanager
    def writing(self, dirt: Dirt = Dirt.ANYTHING) -> Iterator[nn.Module]:
        """Hold this while the model is changed; it is dirty from entry on, whatever happens inside.

        Args:
            dirt: what the block does at most. Give less than ANYTHING only where nothing but the bytes of
                tensors changes, or the layout is prepared.
        """
        if self._accepted:
            raise ModelExpressError("the model was accepted already; a loaded model is not written again")
        self.dirt = max(self.dirt, dirt)
        yield self.module

    def prepare(self, prepare_layout: Callable[[nn.Module], bool]) -> None:
        """Bring the model into the served layout, once; `prepare_layout` says whether that changed it."""
        if self.dirt >= Dirt.LAYOUT:
            return
        before = self.dirt
        with self.writing() as module:
            changed = prepare_layout(module)
        self.dirt = Dirt.LAYOUT if changed else before

    def accept(self) -> nn.Module:
        """The model is right: it is handed to the engine, and never written again."""
        self.dirt = Dirt.NONE
        self._accepted = True
        return self.module

    def reset(self, initialize: Callable[[], nn.Module]) -> None:
        """Free everything behind the root, build afresh, and put the fresh state on the same object.

        Keeps the object, its class, what the engine set on it, its hooks and its training mode. What the
        engine set is dropped where it holds tensors or modules of its own: it may be the old ones. Everything
        below the root (its children's hooks and modes, `requires_grad`) is as `initialize` makes it. Call it
        with no exception in flight that you caught: a traceback keeps its frames, and they keep parameters.

        Raises:
            RecoveryFailed: `initialize` raised (its exception is the cause), or built another class. The
                root is empty and the memory free.
        """
        outer = in_flight()
        kept = _Kept.of(self.module)
        old = [weakref.ref(parameter) for parameter in self.module.parameters()]
        _empty(self.module)
        self.dirt = Dirt.ANYTHING
        _free_memory()
        alive = sum(ref() is not None for ref in old)
        if alive:
            logger.warning(
                "%d of %d old parameters are still referenced from outside the model; until that ends the "
                "rebuild needs memory for them too",
                alive,
                len(old),
            )
        failure = None
        try:
            fresh = _build(initialize, self.module)
        except Exception as exc:  # noqa: BLE001 - whatever the engine's constructor raises is the caller's to see
            raise_interrupt(exc, outer=outer)
            release_frames(exc, outer=outer)
            failure = exc
        if failure is not None:
            _free_memory()
            raise RecoveryFailed(
                f"the model could not be built again after a failed attempt: {failure}; its memory is free, "
                "start the replica again"
            ) from failure
        kept.put_on(self.module, fresh)
        self.dirt = Dirt.NONE
        self.resets += 1


class _Load:
    """Lives in the frame of a load and goes with it, however that ends."""


class _Kept:
    """What outlives a reset: the root's hooks and training mode, and what the engine set on it."""

    def __init__(self, module: nn.Module) -> None:
        self._training = module.training
        self._hooks: dict[str, Any] = {name: vars(module)[name] for name in _HOOK_DICTS if name in vars(module)}
        self._attributes = {
            name: value
            for name, value in vars(module).items()
            if name not in _OWN_STATE and not holds_tensors(value, besides=module)
        }

    @classmethod
    def of(cls, module: nn.Module) -> _Kept:
        kept = cls(module)
        for hooks in kept._hooks.values():
            for number, hook in list(hooks.items()):
                if holds_tensors(hook, besides=module):
                    # A hook that keeps the old layers alive belongs to the old model; the count below
                    # still needs its place, since the constructor's hooks come first.
                    hooks[number] = None
        return kept

    def put_on(self, module: nn.Module, fresh: nn.Module) -> None:
        """Give `module` the state of `fresh`, then what was kept.

        The two objects share one dict from here on, so that a closure which `fresh` made over itself in its
        constructor sees the loaded model and not an emptied shell.
        """
        for name, hooks in self._hooks.items():
            by_constructor = vars(fresh).get(name, {})
            by_engine = [(number, hook) for number, hook in list(hooks.items())[len(by_constructor) :] if hook]
            hooks.clear()
            hooks.update(by_constructor)
            hooks.update(by_engine)
            vars(fresh)[name] = hooks
        for name, value in self._attributes.items():
            vars(fresh).setdefault(name, value)
        object.__setattr__(module, "__dict__", vars(fresh))
        if type(module) is not type(fresh):
            object.__setattr__(module, "__class__", type(fresh))
        for _, member in slots_of(fresh):
            with suppress(AttributeError):
                member.__set__(module, member.__get__(fresh))
        if module.training != self._training:
            module.train(self._training)


def _empty(module: nn.Module) -> None:
    module.__dict__.clear()
    for _, member in slots_of(module):
        with suppress(AttributeError):  # a slot that was never set
            member.__delete__(module)


def _build(initialize: Callable[[], nn.Module], root: nn.Module) -> nn.Module:
    fresh = initialize()
    if fresh is root:
        raise ConfigError("what builds the model returned the one that failed; it must build a new one each time")
    was, now = type(root), type(fresh)
    # Parametrisations, traced graphs and factories make a class for each model: one that is called the same and
    # has the same bases is the same but for that, and the root takes it over.
    if now is not was and (now.__qualname__, now.__bases__) != (was.__qualname__, was.__bases__):
        raise ConfigError(f"the model was a {was.__name__} and is built as a {now.__name__} now")
    return fresh


def _free_memory() -> None:
    # Engines bind weight loaders to parameters, a cycle that only the collector breaks: 26 of 27 parameters
    # of a small Llama outlive their last reference without it.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
