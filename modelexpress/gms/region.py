"""DeferredPublication: a writer's weights are published only after the engine has left every managed region.

While a region is open, an engine's allocations may land in memory that the service manages, and private clones made
then would land there too. So what is to be published waits until the outermost region was left, and cleanly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, TypeVar

from modelexpress.errors import GmsError

T = TypeVar("T")


class DeferredPublication(Generic[T]):
    """At most one pending publication, and the regions it waits for. For one thread, as an engine loads.

    Args:
        publish: called with what is to be published, once, with no region open.
        discard: called with what is not published after all.
        allocating: makes what each region holds open, like `Arena.landing`.
    """

    def __init__(
        self,
        publish: Callable[[T], object],
        allocating: Callable[[], AbstractContextManager[object]] = nullcontext,
        discard: Callable[[T], object] = lambda weights: None,
    ) -> None:
        self._publish = publish
        self._discard = discard
        self._allocating = allocating
        self._depth = 0
        self._pending: list[T] = []

    @property
    def pending(self) -> bool:
        """Whether something waits for a region to end."""
        return bool(self._pending)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Hold this while the engine allocates in managed memory. May be nested.

        A region whose body or end raises discards what is pending: its weights may be half-made. What `publish`
        raises goes up from the exit of the outermost region; it is not tried again.
        """
        self._depth += 1
        try:
            with self._allocating():
                yield
        except BaseException:
            while self._pending:
                self._discard(self._pending.pop())
            raise
        finally:
            self._depth -= 1
        self._settle()

    def request(self, weights: T) -> None:
        """Publish `weights` when no region is open: now, or at the end of the outermost.

        Raises:
            TypeError: there is nothing to publish.
            GmsError: something is pending already; it stays.
        """
        if weights is None:
            raise TypeError("None cannot be published; pass the model")
        if self._pending:
            raise GmsError("a publication is pending already; leave the regions it waits for before the next")
        self._pending.append(weights)
        self._settle()

    def _settle(self) -> None:
        if self._depth == 0 and self._pending:
            self._publish(self._pending.pop())  # taken before it is tried, so that a failure is never retried
