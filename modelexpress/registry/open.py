"""From a URL to the registry behind it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from modelexpress.errors import ConfigError, NotAvailable
from modelexpress.registry.base import Registry
from modelexpress.registry.directory import DirectoryRegistry
from modelexpress.registry.url import redact

__all__ = ["open_registry", "redact"]

_REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+unix")
_ACCEPTED = (
    "accepted: file:///absolute/directory (this host), redis://[user:password@]host[:port][/db], "
    "rediss://... (TLS), unix:///path/of/redis.sock"
)


def open_registry(url: str, *, signing_key: bytes | None, timeout_s: float, lease_ttl_s: float) -> Registry:
    """Open the registry that a URL names. The caller closes it.

    Args:
        timeout_s: how long one call may wait for a Redis server. A directory does not wait.
        lease_ttl_s: how long a Redis server keeps a source that is not renewed. A directory needs no lease.

    Raises:
        ConfigError: the URL has no accepted form.
        NotAvailable: its back end is not installed.
        RegistryError: the directory cannot be used. A Redis server is first reached when it is needed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "file":
        return DirectoryRegistry(_directory(url), signing_key=signing_key)
    if scheme not in _REDIS_SCHEMES:
        raise ConfigError(f"registry URL {redact(url)!r} has no known scheme; {_ACCEPTED}")
    try:
        # Here and not at the top: redis is an optional package.
        from modelexpress.registry.redis import RedisRegistry
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.split(".")[0] != "redis":
            raise
        raise NotAvailable(
            f"registry {redact(url)!r} needs the redis package; pip install 'modelexpress[redis]'"
        ) from exc
    return RedisRegistry(url, signing_key=signing_key, timeout_s=timeout_s, lease_ttl_s=lease_ttl_s)


def _directory(url: str) -> Path:
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise ConfigError(f"registry URL {redact(url)!r} cannot be read; {_ACCEPTED}") from exc
    path = unquote(parts.path)
    local = parts.netloc in ("", "localhost")
    if not url.lower().startswith("file://") or not local or not path.startswith("/") or "\0" in path:
        raise ConfigError(f"registry URL {redact(url)!r} does not name an absolute directory here; {_ACCEPTED}")
    if parts.query or parts.fragment:
        raise ConfigError(f"registry URL {redact(url)!r}: write ? as %3F and # as %23 in a path; {_ACCEPTED}")
    return Path(os.path.normpath(path))
