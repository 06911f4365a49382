"""SGLang's memory regions: while one is open, allocations land in memory that its memory saver manages.

What is published moves and makes private copies, so it waits until SGLang has left every region. Nothing heavy is
imported here: the plugin puts `around_region` into every process of every server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from modelexpress.gms.region import DeferredPublication


class Pending(Protocol):
    """Loaded weights that are to be published."""

    def publish_loaded(self) -> None: ...

    def give_up_publishing(self) -> None: ...


_OPEN: ContextVar[DeferredPublication[Pending] | None] = ContextVar("open regions of SGLang", default=None)


def around_region(
    original: Callable[..., AbstractContextManager[object]], *args: Any, **kwargs: Any
) -> AbstractContextManager[object]:
    """What SGLang gets in place of a region of its memory saver."""
    return _counted(original(*args, **kwargs))


@contextmanager
def _counted(region: AbstractContextManager[object]) -> Iterator[object]:
    deferred = _OPEN.get() or DeferredPublication(
        lambda weights: weights.publish_loaded(), discard=lambda weights: weights.give_up_publishing()
    )
    token = _OPEN.set(deferred)
    try:
        with deferred.region(), region as value:
            yield value
    finally:
        _OPEN.reset(token)


def publish_outside(weights: Pending) -> None:
    """Publish now, or when SGLang has left the regions that are open now.

    Raises:
        GmsError: other weights wait already.
    """
    deferred = _OPEN.get()
    if deferred is None:
        weights.publish_loaded()
    else:
        deferred.request(weights)
