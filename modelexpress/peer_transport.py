"""Several transports as one: a source offers itself by all of them, a reader takes the first that reaches it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from modelexpress.errors import NotAvailable
from modelexpress.frame import framed, unframed
from modelexpress.manifest import Manifest
from modelexpress.transport import Connection, Registration, Transport

logger = logging.getLogger(__name__)

_MAGIC = b"MXPEER\x00\x01"
_BETWEEN = ","


class PeerTransport(Transport):
    """Makes each transport when it is first needed, and closes those that it made.

    Args:
        open_by_name: the transports, the one to be tried first in front. What opens one raises NotAvailable where
            this machine has it not.
    """

    def __init__(self, open_by_name: Mapping[str, Callable[[], Transport]]) -> None:
        self.name = _BETWEEN.join(open_by_name)
        self._open_by_name = open_by_name
        self._opened: dict[str, Transport] = {}

    def register(self, manifest: Manifest) -> Registration:
        """By every transport that can; raises NotAvailable when none can."""
        made: dict[str, Registration] = {}
        reasons: list[str] = []
        try:
            for name in self._open_by_name:
                try:
                    made[name] = self._transport(name).register(manifest)
                except NotAvailable as exc:
                    reasons.append(f"{name}: {exc}")
        except BaseException:
            _close(made)
            raise
        if not made:
            raise NotAvailable("; ".join(reasons))
        for reason in reasons:
            logger.info("peers cannot read these weights by %s", reason)
        return _PeerRegistration(made)

    def connect(self, endpoint: bytes, *, deadline: float, stop: threading.Event | None = None) -> Connection:
        offered = unframed(_MAGIC, endpoint, dict[str, bytes], what="transports")
        reasons: list[str] = []
        for name in (each for each in self._open_by_name if each in offered):
            try:
                connection = self._transport(name).connect(offered[name], deadline=deadline, stop=stop)
            except NotAvailable as exc:
                reasons.append(f"{name}: {exc}")
                continue
            for reason in reasons:
                logger.info("the source is read by %s, since by %s", name, reason)
            return connection
        unlike = f"the source is reached by {_BETWEEN.join(offered)}, and we have {self.name}"
        raise NotAvailable("; ".join(reasons) or unlike)

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def _transport(self, name: str) -> Transport:
        if name not in self._opened:
            self._opened[name] = self._open_by_name[name]()
        return self._opened[name]


class _PeerRegistration(Registration):
    def __init__(self, made: Mapping[str, Registration]) -> None:
        self._made = made
        self.transport = _BETWEEN.join(made)

    @property
    def endpoint(self) -> bytes:
        return framed(_MAGIC, {name: each.endpoint for name, each in self._made.items()})

    def close(self) -> None:
        _close(self._made)


def _close(registrations: Mapping[str, Registration]) -> None:
    """Close every one, whatever the others raise."""
    with ExitStack() as closing:
        for each in registrations.values():
            closing.callback(each.close)
