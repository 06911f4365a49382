"""One frozen Config, and the only code that reads the environment or an engine's extra-config.

A setting comes from a keyword, else from the engine's JSON extra-config, else from the environment variable
`MX_` + its name in capitals, else it has its default. A value that cannot be meant is an error that names
where it came from and what is accepted; nothing is guessed.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modelexpress.checkpoint.strict_json import parse_object
from modelexpress.errors import ConfigError

logger = logging.getLogger(__name__)

STRATEGIES = ("rdma", "gms", "disk")
TRANSPORTS = ("host", "nixl", "tcp")
_DEFAULT_TRANSPORTS = ("host", "nixl")  # tcp opens a port, so it is asked for
ENV_PREFIX = "MX_"

_MOST_SECONDS = 366 * 24 * 3600  # far below what clocks and sockets overflow at
_SECRET = frozenset({"signing_key", "registry"})  # values that no message may repeat: a URL holds a password
_MOST_LANES = 8  # above this many parallel reads no machine measured so far moved more bytes


def _default_threads() -> int:
    return min(_MOST_LANES, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of a load or a publication.

    Attributes:
        strategies: ways to load, tried in this order: rdma (from a peer), gms (from a memory service), disk.
        registry: where sources are found: file:///absolute/dir, redis://host:port/db or rediss://. May hold a
            password, so it is not in the repr.
        gms: socket of a memory service on this host, which keeps weights when engines end.
        takeover_lock: a file that all replicas which stand in for each other name: who locks it serves, and the
            others wait asleep and take over when the owner dies. Needs `gms`, and an engine.
        revision: names the checkpoint's content, like a commit hash; it must never be reused for other
            bytes. Without it the content is recognised by a digest of the files.
        model_name: goes with `revision`; default: the hub's model name or the folder's name.
        verify: check bytes that came from another process against the checksums of their source: on, off,
            or sampled (one piece in eight). On disk it applies where checksums were recorded.
        transports: ways to a peer, tried in this order: host (the kernel copies from a process of this host), nixl
            (RDMA, host shared memory or TCP), tcp (plain connections, to the source's `listen`). A source offers
            itself by all of them.
        listen: the address of this host at which a source with the transport tcp is reached.
        publish: serve the weights to others once they are loaded: in the registry, in the memory service, or
            both, whichever is set.
        publish_when: offer them to peers as soon as they are loaded, or when the engine is ready to serve. Without
            an engine, `ready` leaves it to the caller, who publishes `LoadReport.publication`.
        strict: fail at the first attempt that does not work, instead of trying the next.
        transfer_timeout_s: seconds for one attempt to move its bytes.
        connect_timeout_s: seconds to reach a registry or a peer.
        threads: parallel lanes and readers; default: the cores this process may use, at most 8. Files are read by at
            least 4.
        direct_reads: read files past the page cache where they are not in it: on, off (they stay there for others on
            this host), or auto: on, but off for several ranks of one engine, which read the same files.
        max_sources: peers of each kind to try.
        max_readers: targets that may read from one peer at a time. Who comes later waits until that peer is free or
            another has the weights, which fills a fleet in the shortest time; where nothing moves, more are let in.
        lease_ttl_s: seconds after which a source that stopped renewing is not found any more.
        signing_key: with it, only records signed with the same key are used. Never logged.
    """

    strategies: tuple[str, ...] = STRATEGIES
    registry: str | None = field(default=None, repr=False)
    gms: str | None = None
    takeover_lock: str | None = None
    revision: str | None = None
    model_name: str | None = None
    verify: Literal["on", "off", "sampled"] = "on"
    transports: tuple[str, ...] = _DEFAULT_TRANSPORTS
    listen: str = "127.0.0.1"
    publish: bool = False
    publish_when: Literal["loaded", "ready"] = "loaded"
    strict: bool = False
    transfer_timeout_s: float = 300.0
    connect_timeout_s: float = 10.0
    threads: int = field(default_factory=_default_threads)
    direct_reads: Literal["auto", "on", "off"] = "auto"
    max_sources: int = 3
    max_readers: int = 1
    lease_ttl_s: float = 15.0
    signing_key: str | None = field(default=None, repr=False)


def resolve_config(
    options: Mapping[str, object],
    *,
    extra_config: str | Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Build a Config from keywords, an engine's extra-config (JSON text or a mapping) and `MX_*` variables.

    None means "not given" in a keyword and in extra-config; so does an empty variable, with a warning.

    Raises:
        ConfigError: an unknown key, or a value that is not of the accepted form; names the key, where it
            came from, the value and the form.
    """
    values: dict[str, Any] = _from_environment(os.environ if environ is None else environ)
    for origin, given in (("extra-config key", _as_mapping(extra_config)), ("option", options)):
        for name, value in given.items():
            if name not in _PARSERS:
                raise ConfigError(f"unknown {origin} {name!r:.200}{_did_you_mean(str(name))}")
            if value is not None:
                values[name] = _parse(name, value, f"{origin} {name}")
    config = Config(**values)
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    """Settings that are right alone and wrong beside each other."""
    if config.publish and config.registry is None and config.gms is None:
        raise ConfigError("publish is set, and neither registry nor gms; set where to publish, like file:///dir")
    if config.registry is None and config.strategies == ("rdma",):
        raise ConfigError("strategies is rdma alone and registry is not set; peers are found in a registry")
    if config.gms is None and config.strategies == ("gms",):
        raise ConfigError("strategies is gms alone and gms is not set; give the socket of the memory service")
    if config.takeover_lock is not None and config.gms is None:
        raise ConfigError("takeover_lock is set and gms is not; a standby takes the weights from a memory service")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX):
            continue
        if name not in _PARSERS:
            logger.warning("ignored the environment variable %s: no such setting%s", variable, _did_you_mean(name))
        elif not environ[variable].strip():
            logger.warning("the environment variable %s is empty; the default is used", variable)
        else:
            values[name] = _parse(name, environ[variable].strip(), f"environment variable {variable}")
    return values


def _as_mapping(extra_config: str | Mapping[str, object] | None) -> Mapping[str, object]:
    if extra_config is None:
        return {}
    if isinstance(extra_config, str):
        try:
            extra_config = parse_object(extra_config.strip().encode())
        except ValueError as exc:
            raise ConfigError(f'extra-config is no JSON object: {exc}; write it like {{"verify": "on"}}') from None
    if not isinstance(extra_config, Mapping):
        raise ConfigError(f"extra-config is a {type(extra_config).__name__}; it must be a JSON object")
    return extra_config


def _parse(name: str, value: object, origin: str) -> object:
    parser, form = _PARSERS[name]
    try:
        return parser(value)
    except (TypeError, ValueError, OverflowError) as exc:
        shown = "..." if name in _SECRET else f"{value!r:.200}"
        detail = f" ({exc})" if isinstance(exc, _Because) else ""
        raise ConfigError(f"{origin} is {shown}{detail}; give {form}") from None


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name, _PARSERS, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(_PARSERS)}"


class _Because(ValueError):
    """A value is refused for a reason that the user should read."""


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    value.encode()  # what is no text, like an undecodable byte of the environment, ends here
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    seconds = float(value)
    if not 0 < seconds <= _MOST_SECONDS:  # NaN is neither
        raise ValueError
    return seconds


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    count = int(value)
    if not 1 <= count <= 1024:
        raise ValueError
    return count


def _host_address(value: object) -> str:
    import ipaddress  # here, since few need it and everybody waits for it

    if not isinstance(value, str):
        raise TypeError
    address = ipaddress.ip_address(value)
    if address.is_unspecified or address.is_multicast:
        raise ValueError
    return str(address)


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if not isinstance(value, str) or value.lower() not in words:
        raise ValueError
    return words[value.lower()]


def _some_of(kind: str, known: tuple[str, ...]) -> Callable[[object], tuple[str, ...]]:
    def parse(value: object) -> tuple[str, ...]:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TypeError
        names = tuple(name.strip() for name in names)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise _Because(f"unknown {kind} {unknown[0]!r:.60}")
        if len(set(names)) != len(names):
            raise _Because(f"a {kind} is named twice")
        if not names:
            raise _Because(f"no {kind} is named")
        return names

    return parse


def _one_of(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return parse


_SECONDS = (_seconds, "a positive number of seconds, like 30, of at most a year")
_COUNT = (_count, "a whole number from 1 to 1024")
_FLAG = (_flag, "true or false")
_PARSERS: Mapping[str, tuple[Callable[[object], object], str]] = {
    "strategies": (_some_of("strategy", STRATEGIES), f"some of {','.join(STRATEGIES)}, in the order to try them"),
    "registry": (_text, "a URL like file:///run/user/1000/modelexpress or redis://host:6379/0"),
    "gms": (_text, "the path of a socket"),
    "takeover_lock": (_text, "the path of a file, the same for all that stand in for each other"),
    "revision": (_text, "a name for the checkpoint's content, like a commit hash"),
    "model_name": (_text, "a model's name, like org/model"),
    "verify": (_one_of("on", "off", "sampled"), "on, off or sampled"),
    "transports": (_some_of("transport", TRANSPORTS), f"some of {','.join(TRANSPORTS)}, in the order to try them"),
    "listen": (_host_address, "an IP address of this host, like 10.0.0.7; not one that stands for all"),
    "publish": _FLAG,
    "publish_when": (_one_of("loaded", "ready"), "loaded or ready"),
    "strict": _FLAG,
    "transfer_timeout_s": _SECONDS,
    "connect_timeout_s": _SECONDS,
    "threads": _COUNT,
    "direct_reads": (_one_of("auto", "on", "off"), "auto, on or off"),
    "max_sources": _COUNT,
    "max_readers": _COUNT,
    "lease_ttl_s": _SECONDS,
    "signing_key": (_text, "a secret text that every process of the fleet shares"),
}
