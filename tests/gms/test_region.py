"""A publication waits for the outermost region, and for it to end well."""

from contextlib import nullcontext

import pytest

from modelexpress.errors import GmsError
from modelexpress.gms.region import DeferredPublication


@pytest.fixture
def published():
    return []


@pytest.fixture
def deferred(published):
    return DeferredPublication(published.append)


def test_without_a_region_it_is_published_at_once(deferred, published):
    deferred.request("weights")

    assert published == ["weights"]


def test_it_follows_the_outermost_region(deferred, published):
    with deferred.region():
        with deferred.region():
            deferred.request("weights")
        assert published == []
        assert deferred.pending

    assert published == ["weights"]
    assert not deferred.pending


@pytest.mark.parametrize("inner", [True, False])
def test_a_failed_body_of_any_region_discards_what_is_pending(deferred, published, inner):
    def body():
        deferred.request("weights")
        with deferred.region() if inner else nullcontext():
            raise KeyError

    with pytest.raises(KeyError), deferred.region():
        body()

    assert published == []
    assert not deferred.pending


def test_a_failure_that_is_handled_outside_of_the_inner_region_still_discards(deferred, published):
    with deferred.region():
        deferred.request("weights")
        with pytest.raises(KeyError), deferred.region():
            raise KeyError

    assert published == []


def test_a_failed_exit_discards_and_the_next_region_works(deferred, published):
    class FailsAtExit:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            raise OSError("pool")

    with pytest.raises(OSError, match="pool"), deferred.region(), FailsAtExit():
        deferred.request("weights")
    with deferred.region():
        deferred.request("next")

    assert published == ["next"]


def test_a_second_request_is_refused_and_the_first_stays(deferred, published):
    with deferred.region():
        deferred.request("first")
        with pytest.raises(GmsError, match="pending already"):
            deferred.request("second")

    assert published == ["first"]


def test_none_is_a_type_error_and_leaves_what_is_pending(deferred, published):
    with deferred.region():
        deferred.request("first")
        with pytest.raises(TypeError):
            deferred.request(None)

    assert published == ["first"]


def test_a_failed_publication_is_not_tried_again():
    tried = []

    def fail(weights):
        tried.append(weights)
        raise GmsError("no memory")

    deferred = DeferredPublication(fail)
    with pytest.raises(GmsError, match="no memory"), deferred.region():
        deferred.request("weights")
    with deferred.region():
        pass

    assert tried == ["weights"]
    assert not deferred.pending
