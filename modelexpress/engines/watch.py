"""Sees the torch operations of code that is not ours, in whatever thread it runs them."""

from __future__ import annotations

import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from modelexpress.dispatch_mode import DispatchMode


@dataclass(frozen=True, slots=True)
class Operation:
    """What the schema of a torch operation says: its name, which arguments it writes to, whether it makes a view."""

    kind: str
    written: tuple[tuple[int, str], ...]
    view: bool

    @classmethod
    def of(cls, func: Any) -> Operation:
        schema = func._schema
        written = tuple(
            (at, argument.name)
            for at, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        view = not written and any(each.alias_info is not None for each in schema.returns)
        return cls(schema.name.rpartition("::")[2], written, view)

    def written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for at, name in self.written:
            found.extend(tensors_in([args[at] if at < len(args) else kwargs.get(name)]))
        return found


class Watcher(ABC):
    """Sees every torch operation of a thread, and of the pool threads that it starts meanwhile."""

    def __init__(self) -> None:
        self.last = ""  # the tensor that was handed out last
        self.failed = ""  # the one that a pool thread was busy with when it raised
        self.lock = threading.Lock()
        self._operations: dict[Any, Operation] = {}

    @abstractmethod
    def run(self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one operation that is no view, or do not; gives its result."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A dispatch mode belongs to a thread, and some models load through a ThreadPoolExecutor: tasks that are
        submitted in this block run under a mode of their own.
        """
        submit = concurrent.futures.ThreadPoolExecutor.submit

        def submit_watched(
            pool: concurrent.futures.ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> concurrent.futures.Future[Any]:
            def watched(given: str) -> Any:
                try:
                    with _Watch(self):
                        return task(*args, **kwargs)
                except Exception:
                    self.failed = self.failed or given
                    raise

            return submit(pool, watched, self.last)

        concurrent.futures.ThreadPoolExecutor.submit = submit_watched  # type: ignore[method-assign,assignment]  # undone below
        try:
            with torch.no_grad(), _Watch(self):
                yield
        finally:
            concurrent.futures.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]  # as it was

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch operation of any kind."""
        operation = self._operations.get(func)
        if operation is None:
            operation = self._operations[func] = Operation.of(func)
        if operation.view:
            return func(*args, **kwargs)
        return self.run(operation, func, args, kwargs)


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._watcher.dispatch(func, args, kwargs or {})


def address_of(tensor: torch.Tensor) -> int:
    """Of the tensor's storage, by which its views are known, too."""
    return tensor.untyped_storage().data_ptr()


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results, and in lists of them."""
    found = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found.extend(tensors_in(each))
    return found
