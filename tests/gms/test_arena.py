"""What an engine allocates inside a region lands in the service, and is published without being moved."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

from modelexpress.errors import GmsError, NotAvailable
from modelexpress.gms import arena as arenas
from modelexpress.gms import client
from modelexpress.gms.arena import Arena, first_gap
from modelexpress.gms.client import open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.region import DeferredPublication
from modelexpress.gms.weights import publish_model
from tests.gms.service import adapter_of, serving, where_of
from tests.gms.test_weights import load
from tests.support.tensors import TinyModel, randomize, snapshot

MIB = 1 << 20


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        yield path


@pytest.fixture
def staging(service):
    with open_session(where_of(service, adapter_of()), "RW", HostMemory(), wait_s=5) as staging:
        yield staging


@pytest.fixture
def arena(staging):
    return Arena(staging)


def publish(staging, model, pieces, build=TinyModel):
    options = {"kind": "layout", "label": "tiny", "checksums": True, "threads": 1}
    return publish_model(staging, adapter_of(build), model, pieces=pieces, **options)


def lies_in(staging, tensor):
    spans = [(each.mapping.address, each.mapping.nbytes) for each in staging.segments]
    return any(
        start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + size for start, size in spans
    )


def eventually(condition):
    give_up = time.monotonic() + 5
    while not condition() and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("taken", "nbytes", "offset"),
    [
        ({}, 4096, 0),
        ({}, 4097, None),
        ({0: 100}, 10, 512),
        ({0: 100, 512: 1000, 2048: 1}, 512, 1536),
        ({0: 100, 512: 1000, 2048: 1}, 513, 2560),
        ({512: 10}, 512, 0),
        ({512: 10}, 4000, None),
        ({0: 4096}, 1, None),
    ],
)
def test_the_first_gap_that_fits(taken, nbytes, offset):
    assert first_gap(taken, 4096, nbytes) == offset


def test_weights_that_were_born_in_the_service_stay_where_they_are(service, staging, arena):
    with arena.landing():
        model = randomize(TinyModel(), 3)
    expected, addresses = snapshot(model), {name: each.data_ptr() for name, each in model.named_parameters()}
    assert all(lies_in(staging, each) for each in model.parameters())

    publish(staging, model, arena.settle())

    assert {name: each.data_ptr() for name, each in model.named_parameters()} == addresses
    assert snapshot(model) == expected
    assert client.status(service).keys[0].segments == 2  # and one for what was not
    loaded, _ = load(service)
    assert snapshot(loaded) == expected
    assert loaded.head.weight is loaded.embedding.weight


def test_nobody_sees_what_the_publisher_writes_afterwards(service, staging, arena):
    with arena.landing():
        model = randomize(TinyModel(), 3)
        model.register_buffer("moving", torch.empty(4))
        model.moving.fill_(1)
    build = lambda: with_buffer(TinyModel())  # noqa: E731 - it is passed on as it is
    publish(staging, model, arena.settle(), build)
    expected = snapshot(model)

    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.zero_()

    assert snapshot(load(service, build)[0]) == expected


def with_buffer(model):
    model.register_buffer("moving", torch.empty(4))
    return model


def test_what_may_be_written_moves_out_and_keeps_its_views(service, staging, arena):
    with arena.landing():
        model = randomize(TinyModel(), 3)
        model.register_buffer("moving", torch.empty(4))
        model.moving.fill_(1)
        model.view = model.moving[1:]
    segments = staging.segments

    publish(staging, model, arena.settle())

    inside = range(segments[0].mapping.address, segments[0].mapping.address + segments[0].mapping.nbytes)
    assert model.moving.data_ptr() not in inside
    assert model.view.data_ptr() == model.moving.data_ptr() + 4
    assert model.moving.tolist() == [1, 1, 1, 1]


def test_only_uninitialised_memory_of_the_device_lands(staging, arena):
    with arena.landing():
        made = {
            "empty": torch.empty(3),
            "like": torch.empty_like(torch.ones(2, 2).t(), dtype=torch.int8),
            "new": torch.ones(1).new_empty(5),
            "strided": torch.empty_strided((2, 3), (1, 2)),
            "zeros": torch.zeros(3),
            "meta": torch.empty(3, device="meta"),
            "none": torch.empty(0, 4),
        }

    landed = {name for name, each in made.items() if not each.is_meta and each.numel() and lies_in(staging, each)}
    assert landed == {"empty", "like", "new", "strided"}
    assert (made["like"].stride(), made["like"].dtype) == ((1, 2), torch.int8)
    assert made["strided"].stride() == (1, 2)


def test_other_threads_and_later_allocations_do_not_land(staging, arena):
    made = []
    with arena.landing(), arena.landing():
        thread = threading.Thread(target=lambda: made.append(torch.empty(3)))
        thread.start()
        thread.join()
        assert lies_in(staging, torch.empty(3))
    made.append(torch.empty(3))

    assert not any(lies_in(staging, each) for each in made)


def test_freed_memory_is_given_out_again_and_empty_segments_are_given_back(service, staging, arena):
    with arena.landing():
        first = torch.empty(100 * MIB, dtype=torch.uint8)
        address = first.data_ptr()
        del first
        second = torch.empty(80 * MIB, dtype=torch.uint8)
        third = torch.empty(90 * MIB, dtype=torch.uint8)
        assert second.data_ptr() == address
        assert client.status(service).used_nbytes == 190 * MIB
    del second

    (piece,) = arena.settle()

    assert piece.address == third.data_ptr()
    assert piece.segment is staging.segments[0]
    assert client.status(service).used_nbytes == 90 * MIB


def test_what_is_no_part_of_the_model_is_not_frozen_with_it(service, staging, arena):
    with arena.landing():
        model = randomize(TinyModel(), 3)
        workspace = torch.empty(1000, dtype=torch.uint8)
    expected = snapshot(model)

    with pytest.raises(NotAvailable, match="1 tensors of 1,000 bytes were allocated with the weights"):
        publish(staging, model, arena.settle())

    assert snapshot(model) == expected
    workspace.fill_(1)
    assert eventually(lambda: client.status(service).keys == ())


def test_without_room_in_the_service_weights_are_allocated_elsewhere(tmp_path, caplog):
    with serving(tmp_path / "gms.sock", quota_nbytes=MIB) as path:
        staging = open_session(where_of(path, adapter_of()), "RW", HostMemory(), wait_s=5)
        arena = Arena(staging)
        with staging, arena.landing():
            model = randomize(TinyModel(), 3)
            assert not any(lies_in(staging, each) for each in model.parameters())
            publish(staging, model, arena.settle())

        assert caplog.text.count("outside of the memory service") == 1
        assert snapshot(load(path)[0]) == snapshot(model)


def test_an_abandoned_generation_leaves_the_model_its_memory_and_the_service_none(service, staging, arena):
    with arena.landing():
        model = randomize(TinyModel(), 3)
    expected = snapshot(model)

    staging.close()

    assert eventually(lambda: client.status(service).used_nbytes == 0)
    assert snapshot(model) == expected
    with torch.no_grad():
        model.head.weight.add_(1)


def test_a_service_that_went_away_before_the_commit_leaves_the_model_its_weights(tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        staging = open_session(where_of(path, adapter_of()), "RW", HostMemory(), wait_s=5)
        arena = Arena(staging)
        with arena.landing():
            model = randomize(TinyModel(), 3)
        expected, pieces = snapshot(model), arena.settle()

    with pytest.raises(GmsError):
        publish(staging, model, pieces)
    assert snapshot(model) == expected


def test_the_session_lasts_as_long_as_the_weights(service, staging, arena):
    with arena.landing():
        model = randomize(TinyModel(), 3)
    publish(staging, model, arena.settle())
    weight = model.head.weight.detach()
    del model
    gc.collect()
    assert client.status(service).keys[0].readers == 1

    del weight

    assert eventually(lambda: client.status(service).keys[0].readers == 0)


def test_pause_and_resume_keep_addresses_and_bytes(staging, arena):
    with arena.landing():
        model = randomize(TinyModel(), 3)
    expected = {name: each.tolist() for name, each in model.named_parameters()}
    imported = publish(staging, model, arena.settle())

    imported.pause()
    imported.resume()

    assert {name: each.tolist() for name, each in model.named_parameters()} == expected


def test_segments_grow_with_what_is_staged(staging, arena, monkeypatch):
    monkeypatch.setattr(arenas, "_SMALL_SEGMENT_NBYTES", 4096)
    with arena.landing():
        kept = [torch.empty(4096, dtype=torch.uint8) for _ in range(200)]

    assert sum(each.nbytes for each in kept) <= sum(each.mapping.nbytes for each in staging.segments)
    assert len(staging.segments) < 80


def test_a_publication_follows_the_outermost_region(service, staging, arena):
    deferred = DeferredPublication(lambda model: publish(staging, model, arena.settle()), arena.landing)

    with deferred.region():
        with deferred.region():
            model = randomize(TinyModel(), 3)
            deferred.request(model)
        assert client.status(service).keys[0].generation is None

    assert client.status(service).keys[0].generation == 1
    assert snapshot(load(service)[0]) == snapshot(model)


def test_a_linear_layer_computes_on_memory_of_the_service(staging, arena):
    with arena.landing():
        layer = nn.Linear(3, 2)
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)

    assert lies_in(staging, layer.weight)
    assert layer(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad.tolist() == [[1, 1, 1], [1, 1, 1]]
