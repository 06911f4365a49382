"""What every registry promises."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest

from modelexpress.errors import ConfigError, NotAvailable, RegistryError, SourceBusy
from modelexpress.registry.base import MAX_OFFER_NBYTES, MAX_RECORD_NBYTES, encode_record
from tests.support.registry_process import KEY, record_of

OTHER_KEY = "b" * 64

FORKING = """
import os, sys
from modelexpress.errors import RegistryError
from modelexpress.registry.open import open_registry
from tests.support.registry_process import record_of
registry = open_registry(sys.argv[1], signing_key=None, timeout_s=2, lease_ttl_s=30)
record = registry.publish(record_of("1" * 32), b"offer")
with registry.reading(record, lease_s=30):
    if os.fork() == 0:
        assert registry.stands(record)
        try:
            registry.withdraw(record)
        except RegistryError as exc:
            assert "fork" in str(exc)
        registry.close()
        sys.exit(0)  # leaves the block that holds the lease, too
    assert os.wait()[1] == 0
    assert registry.readers(record) == 1
    assert registry.stands(record)
registry.close()
"""


def ids(found):
    return sorted(each.record.source_id for each in found)


def test_published_source_is_found_by_each_of_its_keys(registry, other, record):
    sealed = registry.publish(msgspec.structs.replace(record, keys=(KEY, OTHER_KEY)), b"offer")

    assert [each.record for each in other.find(KEY)] == [sealed]
    assert [each.record for each in other.find(OTHER_KEY)] == [sealed]
    assert [each.record for each in other.find(None)] == [sealed]
    assert other.find("c" * 64) == []


def test_its_own_process_finds_it_too(registry, record):
    sealed = registry.publish(record, b"offer")

    assert [each.record for each in registry.find(KEY)] == [sealed]
    assert registry.stands(sealed)
    assert registry.offer(sealed) == b"offer"


@pytest.mark.parametrize("nbytes", [1, 3_000_001])
def test_offer_arrives_whole(registry, other, record, nbytes):
    offer = secrets.token_bytes(nbytes)
    sealed = registry.publish(record, offer)

    assert other.offer(sealed) == offer


def test_withdrawn_source_is_gone(registry, other, record):
    sealed = registry.publish(record, b"offer")
    registry.withdraw(sealed)
    registry.withdraw(sealed)

    assert other.find(KEY) == []
    assert other.find(None) == []
    assert not other.stands(sealed)
    with pytest.raises(NotAvailable):
        other.offer(sealed)


def test_closing_withdraws(store, connect, other, record):
    publisher = connect(store.url)
    sealed = publisher.publish(record, b"offer")
    publisher.close()
    publisher.close()

    assert other.find(None) == []
    assert not other.stands(sealed)
    with pytest.raises(RegistryError, match="closed"):
        publisher.publish(record, b"offer")


def test_next_generation_takes_the_place_of_the_last(registry, other, record):
    first = registry.publish(record, b"one")
    second = registry.publish(msgspec.structs.replace(record, generation=2), b"two")

    assert [each.record for each in other.find(KEY)] == [second]
    assert not other.stands(first)
    with pytest.raises(NotAvailable):
        other.offer(first)
    registry.withdraw(first)
    assert other.stands(second)
    assert other.offer(second) == b"two"


def test_same_generation_can_be_published_again(registry, other, record):
    registry.publish(record, b"offer")
    sealed = registry.publish(record, b"offer")

    assert other.stands(sealed)
    assert other.offer(sealed) == b"offer"


def test_renew_changes_nothing_that_others_see(registry, other, record):
    sealed = registry.publish(record, b"offer")
    registry.renew(sealed, b"offer")

    assert [each.record for each in other.find(KEY)] == [sealed]
    assert other.stands(sealed)


def test_renew_publishes_again_what_the_registry_lost(store, registry, other, record):
    sealed = registry.publish(record, b"offer")
    store.lose()
    assert other.find(KEY) == []

    registry.renew(sealed, b"offer")

    assert [each.record for each in other.find(KEY)] == [sealed]
    assert other.stands(sealed)
    assert other.offer(sealed) == b"offer"
    registry.withdraw(sealed)
    assert other.find(None) == []


def test_renew_never_brings_back_a_withdrawn_source(registry, other, record):
    sealed = registry.publish(record, b"offer")
    registry.withdraw(sealed)

    with pytest.raises(RegistryError, match="not published"):
        registry.renew(sealed, b"offer")
    assert other.find(None) == []


def test_renewing_while_it_is_withdrawn_never_brings_it_back(registry, other, record):
    def renew_until_withdrawn(sealed):
        while True:
            try:
                registry.renew(sealed, b"offer")
            except RegistryError:
                return

    for generation in range(10):
        sealed = registry.publish(msgspec.structs.replace(record, generation=generation), b"offer")
        renewing = threading.Thread(target=renew_until_withdrawn, args=(sealed,))
        renewing.start()
        registry.withdraw(sealed)
        renewing.join(10)

        assert not other.stands(sealed)


def test_retired_source_is_not_offered_and_is_still_confirmed_until_it_is_withdrawn(registry, other, record):
    """Readers that are at it may finish, nobody new begins, and an older generation is never confirmed."""
    stored = registry.publish(record, b"offer")
    retired = registry.retire(stored, b"offer")

    assert all(other.find(key) == [] for key in stored.keys)
    assert not other.stands(stored)
    assert other.confirms(stored)
    assert not other.confirms(msgspec.structs.replace(stored, generation=stored.generation + 1))
    with pytest.raises(NotAvailable), other.reading(stored, lease_s=5):
        pass

    registry.withdraw(retired)

    assert not other.confirms(stored)


def test_leases_are_counted_while_they_are_held(registry, other, record):
    sealed = registry.publish(record, b"offer")

    with other.reading(sealed, lease_s=30), other.reading(sealed, lease_s=30):
        assert registry.readers(sealed) == 2
        assert [each.readers for each in registry.find(KEY)] == [2]
    assert registry.readers(sealed) == 0


def test_a_source_with_as_many_readers_as_it_may_have_refuses_more(registry, other, record):
    sealed = registry.publish(record, b"offer")

    with other.reading(sealed, lease_s=30, limit=2), registry.reading(sealed, lease_s=30, limit=2):
        with pytest.raises(SourceBusy, match="2 readers"), other.reading(sealed, lease_s=30, limit=2):
            pass
        assert registry.readers(sealed) == 2  # who was refused holds nothing
        with other.reading(sealed, lease_s=30):
            assert registry.readers(sealed) == 3
    with other.reading(sealed, lease_s=30, limit=1):
        assert registry.readers(sealed) == 1


def test_a_lease_that_ran_out_is_no_reader_for_the_limit(registry, other, record):
    sealed = registry.publish(record, b"offer")

    with other.reading(sealed, lease_s=0.2):
        time.sleep(0.3)
        with other.reading(sealed, lease_s=30, limit=1):
            assert registry.readers(sealed) == 1


def test_of_many_sources_as_many_are_found_as_were_asked_for(registry, other):
    """Not the same ones each time: who looks again sees others."""
    published = {registry.publish(record_of(f"{n:032x}"), b"offer").source_id for n in range(40)}

    looks = [{each.record.source_id for each in other.find(KEY, at_most=8)} for _ in range(60)]

    assert all(len(each) == 8 for each in looks)
    assert set.union(*looks) == published
    assert len(other.find(KEY, at_most=100)) == 40


def test_withdrawn_source_still_counts_its_readers(registry, other, record):
    sealed = registry.publish(record, b"offer")

    with other.reading(sealed, lease_s=30):
        registry.withdraw(sealed)
        assert registry.readers(sealed) == 1
        assert other.find(None) == []
        assert registry.readers(sealed) == 1
    assert registry.readers(sealed) == 0


def test_lease_on_a_withdrawn_source_is_refused(registry, other, record):
    sealed = registry.publish(record, b"offer")
    registry.withdraw(sealed)

    with pytest.raises(NotAvailable, match="withdrew"), other.reading(sealed, lease_s=30):
        pytest.fail("entered")
    assert registry.readers(sealed) == 0


def test_lease_on_an_older_generation_is_refused(registry, other, record):
    first = registry.publish(record, b"one")
    registry.publish(msgspec.structs.replace(record, generation=2), b"two")

    with pytest.raises(NotAvailable), other.reading(first, lease_s=30):
        pytest.fail("entered")


def test_lease_ends_by_itself(registry, other, record):
    sealed = registry.publish(record, b"offer")

    with other.reading(sealed, lease_s=0.2):
        assert registry.readers(sealed) == 1
        time.sleep(0.3)
        assert registry.readers(sealed) == 0
        assert [each.readers for each in registry.find(KEY)] == [0]


def test_lease_is_given_back_when_the_read_fails(registry, other, record):
    sealed = registry.publish(record, b"offer")

    with pytest.raises(KeyError, match="mid-read"), other.reading(sealed, lease_s=30):
        raise KeyError("mid-read")
    assert registry.readers(sealed) == 0


@pytest.mark.parametrize("lease_s", [0, -1, float("nan"), float("inf")])
def test_lease_has_to_have_a_length(registry, other, record, lease_s):
    sealed = registry.publish(record, b"offer")

    with pytest.raises(ConfigError, match="lease"), other.reading(sealed, lease_s=lease_s):
        pytest.fail("entered")


def test_publisher_that_withdraws_and_reader_that_starts_see_each_other(registry, other, record):
    """Never may a publisher count nobody while a reader believes that it has its lease."""

    def read(sealed, seen):
        try:
            with other.reading(sealed, lease_s=30):
                seen.append("in")
                withdrawn.wait(10)
        except NotAvailable:
            seen.append("refused")

    for generation in range(20):
        sealed = registry.publish(msgspec.structs.replace(record, generation=generation), b"offer")
        seen: list[str] = []
        withdrawn = threading.Event()
        reader = threading.Thread(target=read, args=(sealed, seen))
        reader.start()
        time.sleep(generation * 0.0001)
        registry.withdraw(sealed)
        counted = registry.readers(sealed)
        withdrawn.set()
        reader.join(10)

        assert counted >= (seen == ["in"])


def test_least_loaded_source_comes_first(registry, other):
    busy, calm, idle = (registry.publish(record_of(secrets.token_hex(16)), b"offer") for _ in range(3))

    with ExitStack() as held:
        for record in (busy, busy, calm):
            held.enter_context(other.reading(record, lease_s=30))
        found = other.find(KEY)

    assert [(each.record, each.readers) for each in found] == [(idle, 0), (calm, 1), (busy, 2)]


def test_equally_loaded_sources_come_in_random_order(registry, other):
    for _ in range(6):
        registry.publish(record_of(secrets.token_hex(16)), b"offer")

    orders = {tuple(each.record.source_id for each in other.find(KEY)) for _ in range(20)}

    assert len(orders) > 1


def test_threads_share_one_registry(registry, other):
    def one_life(number):
        sealed = registry.publish(record_of(f"{number:032x}"), b"offer")
        with registry.reading(sealed, lease_s=30):
            registry.renew(sealed, b"offer")
            assert sealed in [each.record for each in registry.find(None)]
            assert registry.readers(sealed) == 1
        registry.withdraw(sealed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one_life, range(40)))
    assert other.find(None) == []


def test_forked_child_cannot_change_what_its_parent_published_and_leased(store):
    subprocess.run([sys.executable, "-c", FORKING, store.url], check=True, timeout=60)


def test_signed_source_is_found_with_the_key(store, connect, record):
    sealed = connect(store.url, signing_key=b"secret").publish(record, b"offer")
    target = connect(store.url, signing_key=b"secret")

    assert [each.record for each in target.find(KEY)] == [sealed]
    assert target.stands(sealed)
    assert target.offer(sealed) == b"offer"


@pytest.mark.parametrize("publisher_key", [None, b"wrong"])
def test_source_without_the_right_signature_is_not_found(store, connect, record, publisher_key):
    connect(store.url, signing_key=publisher_key).publish(record, b"offer")

    assert connect(store.url, signing_key=b"secret").find(None) == []


def test_changed_record_is_not_used(store, connect, record):
    publisher = connect(store.url, signing_key=b"secret")
    sealed = publisher.publish(record, b"offer")
    store.tamper("record", sealed, encode_record(msgspec.structs.replace(sealed, keys=(OTHER_KEY,))))
    target = connect(store.url, signing_key=b"secret")

    assert target.find(None) == []
    assert not target.stands(sealed)
    with pytest.raises(NotAvailable), target.reading(sealed, lease_s=30):
        pytest.fail("entered")


@pytest.mark.parametrize("signing_key", [None, b"secret"])
def test_changed_offer_is_not_used(store, connect, record, signing_key):
    sealed = connect(store.url, signing_key=signing_key).publish(record, b"offer")
    store.tamper("offer", sealed, b"other")

    with pytest.raises(NotAvailable, match="not the one"):
        connect(store.url, signing_key=signing_key).offer(sealed)


@pytest.mark.parametrize(
    "data", [b"x", b"\xc1" * 100, msgspec.msgpack.encode({"source_id": "../../etc"}), b"\x90" * MAX_RECORD_NBYTES * 2]
)
def test_broken_record_hides_nobody_else(store, registry, other, record, data):
    broken = registry.publish(record, b"offer")
    sound = registry.publish(record_of(secrets.token_hex(16)), b"offer")
    store.tamper("record", broken, data)

    assert [each.record for each in other.find(None)] == [sound]
    assert not other.stands(broken)


def test_record_of_another_source_is_not_used(store, registry, other, record):
    here = registry.publish(record, b"offer")
    there = registry.publish(record_of(secrets.token_hex(16)), b"offer")
    store.tamper("record", here, encode_record(there))

    assert [each.record for each in other.find(None)] == [there]


@pytest.mark.parametrize(
    "wrong",
    [
        {"source_id": "../" * 10},
        {"source_id": "a" * 32 + "\n"},
        {"label": "two\nlines"},
        {"nbytes": -1},
        {"pid": 2**70},
    ],
)
def test_record_that_others_would_refuse_is_not_published(registry, other, record, wrong):
    with pytest.raises(ConfigError, match="cannot be published"):
        registry.publish(msgspec.structs.replace(record, **wrong), b"offer")
    assert other.find(None) == []


def test_record_is_bounded(registry, other, record):
    with pytest.raises(RegistryError, match=f"{MAX_RECORD_NBYTES:,}"):
        registry.publish(msgspec.structs.replace(record, label="x" * MAX_RECORD_NBYTES), b"offer")
    assert other.find(None) == []


def test_offer_is_bounded(registry, other, record):
    with pytest.raises(RegistryError, match=f"{MAX_OFFER_NBYTES:,}"):
        registry.publish(record, bytes(MAX_OFFER_NBYTES + 1))
    assert other.find(None) == []


def test_signing_key_has_to_have_a_byte(store, connect):
    with pytest.raises(ConfigError, match="empty"):
        connect(store.url, signing_key=b"")


def test_a_thousand_sources_are_found(registry, other):
    published = [registry.publish(record_of(f"{number:032x}"), b"offer") for number in range(1000)]

    with other.reading(published[7], lease_s=30):
        found = other.find(KEY)

    assert ids(found) == [each.source_id for each in published]
    assert found[-1].record == published[7]
    assert [each.readers for each in found] == [0] * 999 + [1]
