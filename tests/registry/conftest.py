"""Both registries behind one face, with what a test needs to change what they stored."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from modelexpress.registry.base import Registry, SourceRecord
from modelexpress.registry.open import open_registry
from tests.support.redis_server import RedisServer
from tests.support.registry_process import TIMEOUT_S, record_of

Open = Callable[..., Registry]


class DirectoryStore:
    """Writes over the locked files of a directory registry, after their header."""

    header_nbytes = 56

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}"
        self.folder = folder

    def tamper(self, what: str, record: SourceRecord, data: bytes) -> None:
        [path] = self.folder.glob(f"{record.source_id}.*.{what}")
        with path.open("r+b") as file:
            file.truncate(self.header_nbytes)
            file.seek(self.header_nbytes)
            file.write(data)

    def lose(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


class RedisStore:
    def __init__(self, url: str, client: Redis) -> None:
        self.url = url
        self.client = client

    def tamper(self, what: str, record: SourceRecord, data: bytes) -> None:
        [key] = self.client.keys(f"mx1:{what}:{record.source_id}*")
        self.client.set(key, data, keepttl=True)

    def lose(self) -> None:
        self.client.flushall()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_client(shared_redis: RedisServer) -> Iterator[Redis]:
    """The shared server, emptied."""
    with shared_redis.client as client:
        client.flushall()
        yield client


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, to be frozen or killed."""
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture(params=["directory", pytest.param("redis", marks=pytest.mark.redis)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryStore | RedisStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "registry")
    client = request.getfixturevalue("redis_client")
    return RedisStore(request.getfixturevalue("shared_redis").url, client)


@pytest.fixture
def connect() -> Iterator[Open]:
    """Opens registries by URL and closes them at the end."""
    opened: list[Registry] = []

    def connect(
        url: str, *, signing_key: bytes | None = None, timeout_s: float = TIMEOUT_S, lease_ttl_s: float = 30.0
    ) -> Registry:
        opened.append(open_registry(url, signing_key=signing_key, timeout_s=timeout_s, lease_ttl_s=lease_ttl_s))
        return opened[-1]

    yield connect
    for registry in opened:
        registry.close()


@pytest.fixture
def registry(store, connect) -> Registry:
    """The publisher's."""
    return connect(store.url)


@pytest.fixture
def other(store, connect) -> Registry:
    """Of someone who looks around."""
    return connect(store.url)


@pytest.fixture
def record() -> SourceRecord:
    return record_of(secrets.token_hex(16))
