"""Standbys: servers of one host that name the same lock. One serves, the others sleep and take over when it dies.

Who locks the file when it loads is the primary. A standby loads what the primary commits into the memory service,
so it has no weights of its own, and lets go of it when its server is ready. It takes over by the server's own routes
for releasing and resuming memory, which reach every rank: the watcher is a thread of the first rank.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from modelexpress.config import Config
from modelexpress.engines.sglang.identity import server_arguments
from modelexpress.engines.sglang.ranks import from_first
from modelexpress.errors import ConfigError, ModelExpressError, NotAvailable, SnapshotError, describe, printable
from modelexpress.gms import client as service
from modelexpress.processes import listener_on, tree_of
from modelexpress.takeover_lock import Owner, TakeoverLock, look, this_process

logger = logging.getLogger(__name__)

Kind = Literal["primary", "standby"]
Arguments = Callable[[], Mapping[str, Any]]

_POLL_S = 0.01  # a waiting flock() could not be stopped
_DECIDE_S = 0.05
_DECIDED_S = 60.0  # the other ranks wait so much longer than the first
_READY_S = 0.2
_STUCK_S = 1.0
_HEALTH_S = 30.0  # SGLang itself gives a health check 20 s
_SHOWN = 500  # characters of a refusal


@dataclass(frozen=True, slots=True)
class Role:
    """What this server is to the others.

    Attributes:
        config: what to load with: a standby reads the memory service, and nothing else.
        wanted: the settings as they were given; they count again after a takeover.
        lock: of the first rank; None on the others.
    """

    kind: Kind
    config: Config
    wanted: Config
    lock: TakeoverLock | None


def claim(config: Config, key: Callable[[], str], arguments: Arguments = server_arguments) -> Role | None:
    """Decide what this server is, before anything is loaded; every rank calls it, and the first decides.

    The first rank waits until it gets the lock, or the owner has committed weights that a standby can read: an owner
    that dies before is replaced by a primary that loads.

    Args:
        key: of the weights that this rank wants.
        arguments: of the server.

    Returns:
        None where no lock is set.

    Raises:
        ConfigError: a setting of modelexpress or of the server does not go with a standby, or the lock's path cannot be
            one. Nothing was changed.
        NotAvailable: somebody else has the lock, and nothing was committed within `transfer_timeout_s`.
    """
    if config.takeover_lock is None:
        return None
    lock: TakeoverLock | None = None
    decided: tuple[str, str] = ("", "")
    if _is_first():
        lock = TakeoverLock(config.takeover_lock)
        try:
            decided = _decide(lock, config, key, arguments()), ""
        except ModelExpressError as exc:
            lock.release()
            # The others wait for the decision, and end with the same reason.
            decided = ("wrong" if isinstance(exc, ConfigError) else "failed"), str(exc)
    wait_s = config.transfer_timeout_s + _DECIDED_S
    kind, reason = from_first(decided, tuple[str, str], wait_s=wait_s)
    if kind == "primary":
        return Role("primary", config, config, lock)
    if kind == "standby":
        reading = replace(config, strategies=("gms",), publish=False)
        return Role("standby", reading, config, lock)
    raise (ConfigError if kind == "wrong" else NotAvailable)(reason)


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _decide(lock: TakeoverLock, config: Config, key: Callable[[], str], arguments: Mapping[str, Any]) -> Kind:
    _require_fit(config, arguments)
    wanted = key()
    give_up = time.monotonic() + config.transfer_timeout_s
    while not lock.try_take():
        reason = _not_committed(config, wanted)
        if reason is None:
            logger.info("standby of %s, which holds %s", _owner_of(lock) or "another server", lock.path)
            return "standby"
        if time.monotonic() > give_up:
            raise NotAvailable(
                f"{_owner_of(lock) or 'another server'} holds {lock.path}, and after "
                f"{config.transfer_timeout_s:g} s there is nothing to stand by with: {reason}; does it load the same "
                "model, with the same gms and publish?"
            )
        time.sleep(_DECIDE_S)
    lock.write(this_process(serves=_model(arguments), url=_public_url(arguments)))
    logger.info("primary: holds %s", lock.path)
    return "primary"


def _owner_of(lock: TakeoverLock) -> str | None:
    """For a message: what the file says, if it says something."""
    with suppress(ConfigError):
        owner = look(lock.path).owner
        return owner.owner if owner is not None else None
    return None


def _not_committed(config: Config, key: str) -> str | None:
    """Why a standby could not load now."""
    try:
        held = service.status(config.gms or "")
    except ModelExpressError as exc:
        return describe(exc)
    if any(
        (each.namespace, each.key) == (service.DEFAULT_NAMESPACE, key) and each.generation is not None
        for each in held.keys
    ):
        return None
    return f"the memory service at {config.gms} has no commit of {key[:16]}"


def _require_fit(config: Config, arguments: Mapping[str, Any]) -> None:
    """Say at once what would not work when the primary dies."""
    if not config.publish:
        raise ConfigError("takeover_lock is set and publish is not; standbys read what the primary publishes in gms")
    replicas = arguments.get("dp_size") or 1
    wrong = {
        f"dp_size {replicas}: the replicas of one server would stand by for each other": (
            replicas > 1 and not arguments.get("enable_dp_attention")
        ),
        "nnodes above 1: the lock and the memory service are those of one host": (arguments.get("nnodes") or 1) > 1,
        "speculative_algorithm: a draft model is not imported": bool(arguments.get("speculative_algorithm")),
        "gRPC: a standby is put to sleep and woken by HTTP": bool(
            arguments.get("grpc_mode") or arguments.get("smg_grpc_mode")
        ),
    }
    for what, given in wrong.items():
        if given:
            raise ConfigError(f"takeover_lock does not go with {what}; start the server without one of them")


class Watch:
    """The thread of a standby that puts it to sleep, waits for the lock, and takes over. It ends with the takeover.

    A takeover that fails gives the lock back, since another standby may do better, and is not tried again: the
    generation that this one knew is gone. Its server goes on to refuse requests; start it anew.

    Args:
        refuses: why this rank would refuse a request now, None when it would not. What the server answers is checked
            against it: SGLang answers some failures with 200.
        taken: called after a takeover, in this thread; publishes to peers, for example.
        patience_s: for one answer of the server that moves weights.
    """

    def __init__(
        self,
        lock: TakeoverLock,
        server: Server,
        *,
        serves: str,
        refuses: Callable[[], str | None],
        taken: Callable[[], object] | None = None,
        patience_s: float,
    ) -> None:
        self._lock = lock
        self._server = server
        self._serves = serves
        self._refuses = refuses
        self._taken = taken
        self._patience_s = patience_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mx-standby", daemon=True)

    def start(self) -> Watch:
        """Begin; returns at once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread, whatever it waits for. What it has taken over stays taken."""
        self._stopping.set()
        self._thread.join()

    @property
    def watching(self) -> bool:
        """Whether the thread still has something to do."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._fall_asleep() and self._wait_for_lock():
                self._take_over()
        except Exception:  # the outermost line of a thread: nobody above would see it
            logger.exception("the standby of %s stopped watching", self._lock.path)
            if self._refuses() is not None:
                self._lock.release()

    def _fall_asleep(self) -> bool:
        """Wait until the server is ready, and let it go to sleep; False when stopped before."""
        said, late = "", time.monotonic() + self._patience_s
        while not self._stopping.wait(_READY_S):
            try:
                self._server.require_ours()
                self._server.ask("/health", timeout_s=_HEALTH_S)
                self._server.sleep(timeout_s=self._patience_s)
            except ModelExpressError as exc:
                reason = describe(exc)
                if time.monotonic() > late:
                    late += self._patience_s
                    logger.warning("still awake, and no standby yet: %s", reason)
                elif reason != said:
                    logger.info("not ready to stand by yet: %s", reason)
                said = reason
            if self._refuses() is not None:
                logger.info("stands by, asleep; %s serves", _owner_of(self._lock) or "nobody")
                return True
        return False

    def _wait_for_lock(self) -> bool:
        said, look_again = None, time.monotonic() + _STUCK_S
        while not self._stopping.is_set():
            try:
                if self._lock.try_take():
                    return True
                strange = self._lock.stuck() if time.monotonic() > look_again else said
            except ConfigError as exc:  # somebody put something else at the path
                strange = str(exc)
            if time.monotonic() > look_again:
                look_again = time.monotonic() + _STUCK_S
            if strange != said and strange is not None:
                logger.warning("%s", strange)
            said = strange
            self._stopping.wait(_POLL_S)
        return False

    def _take_over(self) -> None:
        began = time.monotonic()
        before = _owner_of(self._lock)
        owner = this_process(serves=self._serves, url=self._server.public_url, took_over_from=before)
        self._say(owner)
        try:
            self._wake()
        except ModelExpressError as exc:
            self._give_back(describe(exc))
            return
        weights_s = time.monotonic() - began
        owner = msgspec.structs.replace(owner, weights_s=round(weights_s, 6))
        self._say(owner)
        answered_s = self._first_answer(began)
        self._say(msgspec.structs.replace(owner, answered_s=round(answered_s, 6) if answered_s else None))
        logger.info(
            "took over from %s: weights after %.3f s, first answer after %s",
            owner.took_over_from or "nobody",
            weights_s,
            "none" if answered_s is None else f"{answered_s:.3f} s",
        )
        if self._taken is not None:
            self._taken()

    def _say(self, owner: Owner) -> None:
        try:
            self._lock.write(owner)
        except ConfigError as exc:  # a full disk is no reason not to serve
            logger.warning("serves, and could not say so: %s", exc)

    def _wake(self) -> None:
        self._server.wake(timeout_s=self._patience_s)
        reason = self._refuses()
        if reason is not None:
            raise NotAvailable(reason)

    def _first_answer(self, began: float) -> float | None:
        give_up = began + self._patience_s
        while not self._stopping.is_set() and time.monotonic() < give_up:
            with suppress(ModelExpressError):
                self._server.ask("/health", timeout_s=_HEALTH_S)
                return time.monotonic() - began
            self._stopping.wait(_READY_S)
        return None

    def _give_back(self, reason: str) -> None:
        if self._refuses() is None:
            # Some ranks have weights and some may not: nobody may be answered by half a model.
            with suppress(ModelExpressError):
                self._server.sleep(timeout_s=self._patience_s)
        self._lock.release()
        logger.error(
            "could not take over, and gave %s back: %s; this server refuses requests until it is started anew",
            self._lock.path,
            reason,
        )


def watch(
    role: Role,
    *,
    refuses: Callable[[], str | None],
    taken: Callable[[], object] | None = None,
    arguments: Arguments = server_arguments,
) -> Watch | None:
    """Begin to stand by, when the scheduler of this rank begins its loop; None where there is nothing to watch."""
    if role.kind != "standby" or role.lock is None:
        return None
    given = arguments()
    watching = Watch(
        role.lock,
        server_of(given),
        serves=_model(given),
        refuses=refuses,
        taken=taken,
        patience_s=role.wanted.transfer_timeout_s,
    )
    return watching.start()


@dataclass(frozen=True, slots=True)
class Server:
    """The HTTP side of the server that this process belongs to.

    Attributes:
        url: as this host reaches it.
        public_url: as others do.
        key: the admin key, else the key, where the server has one. Never shown.
    """

    url: str
    public_url: str
    port: int
    key: str | None = field(repr=False)
    tls: ssl.SSLContext | None

    def require_ours(self) -> None:
        """Make sure that who listens on the port is this process's own server: it will be put to sleep.

        Raises:
            NotAvailable: nobody listens there, or somebody else; an `Engine` without a server never does.
        """
        try:
            listener = listener_on(self.port)
        except SnapshotError as exc:
            raise NotAvailable(str(exc)) from exc
        if os.getpid() not in tree_of(listener):
            raise NotAvailable(f"pid {listener} listens on port {self.port}, and this process is not of that server")

    def sleep(self, *, timeout_s: float) -> None:
        """Let go of the weights on every rank. Requests of that moment are aborted: SGLang must be idle for it.

        Those that arrive meanwhile wait, and are refused with the reason afterwards.
        """
        try:
            self.ask("/pause_generation", {"mode": "abort"}, timeout_s=timeout_s)
            self.ask("/release_memory_occupation", {"tags": ["weights"]}, timeout_s=timeout_s)
        finally:
            self.ask("/continue_generation", {}, timeout_s=timeout_s)

    def wake(self, *, timeout_s: float) -> None:
        """Get the same weights back on every rank."""
        self.ask("/resume_memory_occupation", {"tags": ["weights"]}, timeout_s=timeout_s)

    def ask(self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float) -> None:
        """GET, or POST where there is a body.

        Raises:
            NotAvailable: no answer, or another than 2xx; says which.
        """
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)  # noqa: S310 - http or https: see server_of
        # A proxy of the environment does not lead to this host.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        handlers += [urllib.request.HTTPSHandler(context=self.tls)] if self.tls is not None else []
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                said = printable(exc.read(_SHOWN).decode(errors="replace"))
            raise NotAvailable(f"{path} answered {exc.code}: {said or exc.reason}") from exc
        except OSError as exc:  # what urllib wraps is one, and so is a timeout
            raise NotAvailable(f"{path} gave no answer within {timeout_s:g} s: {exc}") from exc


def server_of(arguments: Mapping[str, Any]) -> Server:
    """From SGLang's arguments."""
    certificate, authorities = arguments.get("ssl_certfile"), arguments.get("ssl_ca_certs")
    tls = None
    if certificate:
        # As SGLang asks itself: without authorities, a certificate that it signed itself is taken.
        tls = ssl.create_default_context(cafile=authorities) if authorities else ssl._create_unverified_context()  # noqa: S323 - see above
    host, port = _host(arguments), int(arguments["port"])
    nearby = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - read, not bound
    scheme = "https" if certificate else "http"
    return Server(
        url=f"{scheme}://{nearby}:{port}",
        public_url=_public_url(arguments),
        port=port,
        key=arguments.get("admin_api_key") or arguments.get("api_key"),
        tls=tls,
    )


def _host(arguments: Mapping[str, Any]) -> str:
    host = str(arguments.get("host") or "0.0.0.0")  # noqa: S104 - SGLang's own meaning of none
    return f"[{host}]" if ":" in host and not host.startswith("[") and host != "::" else host


def _public_url(arguments: Mapping[str, Any]) -> str:
    host = _host(arguments)
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - read, not bound
    return f"{'https' if arguments.get('ssl_certfile') else 'http'}://{host}:{arguments['port']}"


def _model(arguments: Mapping[str, Any]) -> str:
    return str(arguments.get("served_model_name") or arguments.get("model_path") or "")
