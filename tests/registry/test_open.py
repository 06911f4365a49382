"""From a URL to a registry, and what people see of a URL."""

from __future__ import annotations

import subprocess
import sys

import pytest

from modelexpress.errors import ConfigError
from modelexpress.registry.open import open_registry, redact


def opened(url, **wrong):
    return open_registry(url, **{"signing_key": None, "timeout_s": 1.0, "lease_ttl_s": 10.0, **wrong})


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "FILE://{}"])
def test_directory_urls(tmp_path, form):
    registry = opened(form.format(tmp_path / "a%20b%3F"))

    assert registry.path == tmp_path / "a b?"
    assert registry.path.is_dir()
    registry.close()


@pytest.mark.parametrize(
    "url", ["redis://host", "redis://u:p@host:1/3", "rediss://host", "unix:///a", "redis+unix:///a"]
)
def test_redis_urls_connect_only_when_needed(url):
    opened(url).close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/run/user/1000/mx",
        "relative",
        "http://host",
        "file:relative",
        "file:///a?b",
        "file:///a#b",
        "file:///a%00b",
        "file://host/a",
        "file://relative/a",
        "redis://host/name",
        "redis://host:port",
        "redis://host?socket_timeout=1000",
        "redis://host?decode_responses=yes",
        "redis://host?ssl_nonsense=1",
        "redis://:pa/ss@host",
        "redis://[::1",
        "unix://",
    ],
)
def test_other_urls_are_refused(url):
    with pytest.raises(ConfigError) as caught:
        opened(url)
    assert "pa/ss" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"timeout_s": 0.0}, {"lease_ttl_s": -1.0}, {"timeout_s": float("nan")}])
def test_lengths_of_time_are_checked(wrong):
    with pytest.raises(ConfigError, match="seconds"):
        opened("redis://host", **wrong)


def test_missing_redis_package_is_named_with_the_next_step():
    code = """
import sys
sys.modules["redis"] = None
from modelexpress.errors import NotAvailable
from modelexpress.registry.open import open_registry
try:
    open_registry("redis://:secret@host", signing_key=None, timeout_s=1, lease_ttl_s=1)
except NotAvailable as exc:
    assert "modelexpress[redis]" in str(exc) and "secret" not in str(exc), exc
else:
    sys.exit("opened")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_directory_needs_no_redis_package(tmp_path):
    code = """
import sys
from modelexpress.registry.open import open_registry
open_registry(sys.argv[1], signing_key=None, timeout_s=1, lease_ttl_s=1).close()
assert "redis" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, f"file://{tmp_path}/r"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user@host", "redis://user@host"),
        ("redis://user:secret@host:1/2?db=1", "redis://user:***@host:1/2?db=1"),
        ("rediss://:secret@host", "rediss://:***@host"),
        ("redis://:se:cr@et@host", "redis://:***@host"),
        ("unix:///a.sock?password=secret&db=1", "unix:///a.sock?password=***&db=1"),
        ("rediss://host?ssl_password=secret", "rediss://host?ssl_password=***"),
        ("redis://:sec/ret@host", "redis://***"),
        ("redis://:sec#ret@host", "redis://***"),
        ("redis://:sec?ret@host", "redis://***"),
        ("file:///a@b", "file:///a@b"),
    ],
)
def test_redact(url, shown):
    assert redact(url) == shown
