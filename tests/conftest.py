"""Fixtures that several folders use."""

import pytest


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX listens on every interface unless told otherwise; tests and their children stay on loopback."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for name in ("MX_REGISTRY", "MX_REVISION", "MX_SIGNING_KEY", "MX_STRATEGIES", "MX_VERIFY"):
        monkeypatch.delenv(name, raising=False)
