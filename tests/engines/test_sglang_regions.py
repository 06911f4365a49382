"""Loaded weights are published when SGLang has left every memory region, and not at all when a load fails."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from modelexpress.engines.sglang.regions import around_region, publish_outside
from modelexpress.errors import GmsError


class Weights:
    def __init__(self, said):
        self._said = said

    def publish_loaded(self):
        self._said.append("published")

    def give_up_publishing(self):
        self._said.append("given up")


@pytest.fixture
def said():
    return []


@pytest.fixture
def region(said):
    """A region of SGLang's memory saver, as the plugin hooks it."""

    @contextmanager
    def managed(tag, *, fails=False):
        said.append(f"open {tag}")
        yield "value"
        said.append(f"close {tag}")
        if fails:
            raise RuntimeError("the pool could not be left")

    return lambda tag, **options: around_region(managed, tag, **options)


def test_without_a_region_they_are_published_at_once(said):
    publish_outside(Weights(said))

    assert said == ["published"]


def test_they_wait_for_the_outermost_region(said, region):
    with region("weights") as value:
        with region("inner"):
            publish_outside(Weights(said))
        assert value == "value"
        assert "published" not in said

    assert said == ["open weights", "open inner", "close inner", "close weights", "published"]


def test_the_next_load_has_a_region_of_its_own(said, region):
    for _ in range(2):
        with region("weights"):
            publish_outside(Weights(said))

    assert said.count("published") == 2


@pytest.mark.parametrize("where", ["body", "exit"])
def test_a_load_that_fails_gives_its_claim_back(where, said, region):
    def load():
        with region("weights", fails=where == "exit"):
            publish_outside(Weights(said))
            if where == "body":
                raise RuntimeError("the load failed")

    with pytest.raises(RuntimeError):
        load()

    assert said[-1] == "given up"
    assert "published" not in said
    publish_outside(Weights(said))
    assert said[-1] == "published"


def test_two_models_in_one_region_are_refused(said, region):
    with region("weights"):
        publish_outside(Weights(said))
        with pytest.raises(GmsError, match="pending already"):
            publish_outside(Weights(said))

    assert said.count("published") == 1
