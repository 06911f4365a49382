"""A model moves into the service storage by storage, and others bind to it without a copy."""

import gc
import os
import time
import weakref
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from modelexpress import api
from modelexpress.adapter import ModuleAdapter
from modelexpress.errors import (
    GmsError,
    LoadFailed,
    ManifestMismatch,
    NotAvailable,
    StaleGeneration,
    VerificationFailed,
)
from modelexpress.gms import client
from modelexpress.gms.client import Imported, Staging, Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.weights import check_checksums, make_private, publish_model
from modelexpress.model_root import ModelRoot
from modelexpress.strategies.base import LoadTarget
from modelexpress.strategies.chain import LoadStrategyChain
from modelexpress.strategies.gms import GmsImport
from tests.gms.service import adapter_of, publish, serving, where_of
from tests.support.safetensors_writer import SIZES, Raw, raw, write_file
from tests.support.tensors import TinyModel, bytes_of, randomize, snapshot


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        yield path


def load(path, build=TinyModel, *, claims=False, wait_s=5.0, **options):
    adapter = adapter_of(build, **options)
    strategy = GmsImport(path, HostMemory(), claims=claims, wait_s=wait_s)
    with closing(strategy):
        report = LoadStrategyChain([strategy]).run(LoadTarget(adapter, ModelRoot(adapter.initialize())))
    return report.model, strategy.imported


def meta(build):
    def on_meta():
        with torch.device("meta"):
            return build()

    return on_meta


def readers(path):
    return sum(key.readers for key in client.status(path).keys)


def eventually(condition):
    give_up = time.monotonic() + 5
    while not condition() and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.02)
    return condition()


def test_the_publisher_goes_on_with_the_shared_memory(service):
    model = randomize(TinyModel(), 3)
    before, old = snapshot(model), model.head.weight.data_ptr()

    publish(service, model)

    assert snapshot(model) == before
    assert model.head.weight.data_ptr() != old
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("build", [TinyModel, meta(TinyModel)])
def test_another_model_gets_every_byte_and_copies_only_what_it_may_write(service, build):
    """Parameters are shared; buffers, persistent or not, are the reader's own. No meta tensor survives."""
    model = randomize(TinyModel(), 3)
    publish(service, model)

    loaded, imported = load(service, build)

    assert snapshot(loaded) == snapshot(model)
    assert loaded.head.weight is loaded.embedding.weight
    assert not any(each.is_meta for each in (*loaded.parameters(), *loaded.buffers()))
    assert isinstance(imported, Imported)


def test_a_reader_that_writes_in_place_changes_nobody_else(service):
    """A31: the page becomes its own; nothing dies."""
    model = randomize(TinyModel(), 3)
    publish(service, model)
    expected = snapshot(model)
    writer, _ = load(service)
    other, _ = load(service)

    with torch.no_grad():
        writer.head.weight.add_(1)
        writer.blocks[0].scale.add_(1)

    assert snapshot(other) == snapshot(model) == expected
    assert snapshot(load(service)[0]) == expected


def test_the_service_keeps_the_weights_when_the_publisher_is_gone(service):
    model = randomize(TinyModel(), 3)
    expected = snapshot(model)
    publish(service, model)
    del model
    gc.collect()

    assert eventually(lambda: readers(service) == 0)
    assert snapshot(load(service)[0]) == expected


def test_the_memory_lives_as_long_as_any_tensor_on_it_and_the_session_with_it(service):
    publish(service, randomize(TinyModel(), 3)).close()
    loaded, imported = load(service)
    weight = loaded.blocks[1].up.weight.detach()
    expected = bytes_of(weight)
    del loaded, imported
    gc.collect()

    assert bytes_of(weight) == expected
    assert eventually(lambda: readers(service) == 1)
    del weight
    assert eventually(lambda: readers(service) == 0)


def test_a_publication_costs_one_segment_more_than_the_model_and_no_descriptor(service):
    model = nn.ParameterList(nn.Parameter(torch.zeros(1000, dtype=torch.float32)) for _ in range(40))
    fds = len(os.listdir("/proc/self/fd"))

    imported = publish(service, model, adapter=adapter_of(lambda: model))

    (key,) = client.status(service).keys
    assert key.segments == 1
    assert key.nbytes < 40 * 4000 * 1.05 + 4096
    imported.close()
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds + 1)  # the service's own, in this process


def anonymous_nbytes():
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_what_has_moved_in_is_given_back_to_the_machine(service):
    """The C library would keep blocks of a size that was freed before, up to 32 MiB, and all below a later one."""
    torch.zeros(31 << 20, dtype=torch.uint8)
    model = nn.ParameterList(nn.Parameter(torch.zeros(2 << 20)) for _ in range(24))
    later = torch.ones(1 << 18)
    before = anonymous_nbytes()

    publish(service, model, adapter=adapter_of(lambda: model)).close()

    assert before - anonymous_nbytes() > 0.9 * 24 * (8 << 20)
    assert later.sum() == 1 << 18


def test_views_ties_strides_and_containers_come_out_right(service):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            base = torch.zeros(6, 4)
            self.turned = nn.Parameter(torch.zeros(3, 5).t())
            self.top, self.bottom = nn.Parameter(base[:2]), nn.Parameter(base[2:])
            self.cache = {"view": self.turned.detach()[1:], "own": torch.zeros(3)}
            self.register_buffer("none", torch.zeros(0, 3))
            self.register_buffer("scalar", torch.zeros(()))

    model = randomize(Odd(), 3)
    model.cache["own"].fill_(5)
    publish(service, model)

    loaded, _ = load(service, Odd)

    assert snapshot(loaded) == snapshot(model)
    assert loaded.cache["view"].data_ptr() == loaded.turned.detach()[1:].data_ptr()
    assert loaded.cache["own"].tolist() == [5, 5, 5]


class Experts(nn.Module):
    """Modules in a plain list, which torch does not know of."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = [nn.Linear(4, 4) for _ in range(2)]


@pytest.mark.parametrize("build", [Experts, meta(Experts)])
def test_modules_in_containers_are_bound_too(service, build):
    model = Experts()
    publish(service, model, adapter=adapter_of(Experts))

    loaded, _ = load(service, build)

    for one, other in zip(loaded.experts, model.experts, strict=True):
        assert bytes_of(one.weight) == bytes_of(other.weight)
        assert isinstance(one.bias, nn.Parameter)


def hold_twice():
    module = nn.Linear(2, 2)
    module.cache = {"w": module.weight.detach()}
    return module


def test_what_cannot_be_replaced_where_it_hangs_is_refused(service):
    publish(service, hold_twice(), adapter=adapter_of(hold_twice))

    with pytest.raises(LoadFailed, match=r"cache.*is on the meta device and cannot be replaced where it hangs"):
        load(service, meta(hold_twice))


def test_a_wrong_identity_is_a_miss_and_a_wrong_layout_is_refused(service):
    publish(service, randomize(TinyModel(), 3))

    with pytest.raises(LoadFailed, match="nothing is committed"):
        load(service, config=adapter_config("r2"))
    with pytest.raises(LoadFailed, match="shape differs"):
        load(service, lambda: TinyModel(width=4))


def adapter_config(revision):
    from modelexpress.config import Config

    return Config(revision=revision, model_name="org/tiny")


def test_a_generation_under_anothers_key_is_not_used(service):
    theirs = adapter_of(config=adapter_config("r2"))
    staging = open_session(where_of(service, adapter_of()), "RW", HostMemory(), wait_s=1)
    publish_model(staging, theirs, TinyModel(), kind="layout", label="x", checksums=False, threads=1)

    with pytest.raises(LoadFailed, match="which is not what is wanted"):
        load(service)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x95\x00"])
def test_a_generation_that_cannot_be_read_is_refused(service, body):
    staging = open_session(where_of(service, adapter_of()), "RW", HostMemory(), wait_s=1)
    staging.commit("x", body).close()

    with pytest.raises(LoadFailed, match="cannot be read"):
        load(service)


def test_each_reader_sees_exactly_one_generation_when_it_is_published_again(service):
    old, new = randomize(TinyModel(), 3), randomize(TinyModel(), 4)
    expected_old, expected_new = snapshot(old), snapshot(new)
    publish(service, old).close()
    early, _ = load(service)
    publish(service, new).close()
    late, _ = load(service)

    assert snapshot(early) == expected_old
    assert snapshot(late) == expected_new


def test_a_failed_publication_leaves_the_model_its_weights_and_the_old_generation(tmp_path):
    """A32: need and free are named; nobody is harmed."""
    with serving(tmp_path / "gms.sock", quota_nbytes=100_000) as path:
        small = randomize(TinyModel(), 3)
        publish(path, small).close()
        big = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
        expected = snapshot(big)

        with pytest.raises(GmsError, match="quota"):
            publish(path, big)

        assert snapshot(big) == expected
        assert snapshot(load(path)[0]) == snapshot(small)
        assert eventually(lambda: client.status(path).used_nbytes < 50_000)


def test_pause_and_resume_keep_addresses_and_bytes(service):
    publish(service, randomize(TinyModel(), 3)).close()
    loaded, imported = load(service)
    expected, address = snapshot(loaded), loaded.head.weight.data_ptr()

    imported.pause()
    assert imported.paused
    assert eventually(lambda: readers(service) == 0)
    imported.resume()

    assert loaded.head.weight.data_ptr() == address
    assert snapshot(loaded) == expected


def test_resume_after_another_generation_is_stale_and_stays_paused(service):
    publish(service, randomize(TinyModel(), 3)).close()
    _loaded, imported = load(service)
    imported.pause()
    publish(service, randomize(TinyModel(), 4)).close()

    with pytest.raises(StaleGeneration, match="generation 1 of"):
        imported.resume()
    assert imported.paused


def test_a_page_that_was_written_is_noticed(service):
    publish(service, randomize(TinyModel(), 3)).close()
    model, imported = load(service)

    assert imported.is_as_sealed()
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    assert not imported.is_as_sealed()


def moved_to_private_memory(service, *, keep):
    """A model whose weights were shared: before, the model, what it was, who looks at it from outside."""
    publish(service, randomize(TinyModel(), 3)).close()
    model, imported = load(service)
    before, held = snapshot(model), weakref.ref(model.head.weight)
    return model, imported, before, held, make_private(adapter_of(), model, imported, keep=keep)


def test_shared_weights_move_to_private_memory_before_they_are_written(service):
    model, imported, before, held, moved = moved_to_private_memory(service, keep=False)
    imported.close()

    assert snapshot(model) == before
    assert held() is model.head.weight is model.embedding.weight
    assert moved.nbytes >= model.head.weight.nbytes
    assert not imported.holds(model.head.weight.data_ptr())
    assert eventually(lambda: readers(service) == 0)
    with torch.no_grad():
        model.head.weight.zero_()
    again, _ = load(service)
    assert snapshot(again) == before


def test_old_bytes_come_back_from_memory_that_was_kept(service):
    model, _, before, _, moved = moved_to_private_memory(service, keep=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert snapshot(model) != before

    moved.bring_back()

    assert snapshot(model) == before


def test_a_paused_generation_leaves_zeros(service):
    publish(service, randomize(TinyModel(), 3)).close()
    model, imported = load(service)
    imported.pause()

    moved = make_private(adapter_of(), model, imported, keep=True)

    assert moved.nbytes
    assert not model.head.weight.any()


def test_what_looks_at_the_memory_from_outside_refuses_the_move(service):
    """It would go on with the old bytes, and nobody would notice."""
    publish(service, randomize(TinyModel(), 3)).close()
    model, imported = load(service)
    address = model.head.weight.data_ptr()

    view = model.head.weight.detach()[1:]

    def cached():
        return view

    with pytest.raises(NotAvailable, match="tensors outside of the model"):
        make_private(adapter_of(), model, imported, keep=False)
    assert model.head.weight.data_ptr() == address
    assert cached().data_ptr() > address
    other = randomize(TinyModel(), 4)
    hidden = [other.head.weight.data]
    with pytest.raises(NotAvailable, match="1 tensors outside of the model"):
        publish(service, other, adapter=adapter_of(config=adapter_config("r2")))
    assert hidden[0].data_ptr() == other.head.weight.data_ptr()


def test_resume_without_a_service_stays_paused(tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        publish(path, randomize(TinyModel(), 3)).close()
        _loaded, imported = load(path)
        imported.pause()

    with pytest.raises(NotAvailable, match="no memory service"):
        imported.resume()
    assert imported.paused


def test_a_restarted_service_is_another_one(tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        publish(path, randomize(TinyModel(), 3)).close()
        _loaded, imported = load(path)
        imported.pause()
    with serving(tmp_path / "gms.sock") as path:
        publish(path, randomize(TinyModel(), 3)).close()
        with pytest.raises(StaleGeneration):
            imported.resume()


def test_claims_make_the_first_a_writer_and_the_next_a_reader(service):
    adapter = adapter_of()
    first = GmsImport(service, HostMemory(), claims=True, wait_s=5)
    with pytest.raises(NotAvailable, match="staging them"):
        first.sources(LoadTarget(adapter, ModelRoot(TinyModel())))
    assert isinstance(first.staging, Staging)

    with pytest.raises(LoadFailed, match="stag"):
        load(service, claims=True, wait_s=0.2)
    first.close()
    with pytest.raises(LoadFailed, match="staging them"):
        load(service, claims=True, wait_s=5)


def test_checksums_name_the_tensor_that_its_writer_spoiled(service):
    """A37: what is sealed cannot change, so only a writer can have spoiled it before."""
    good, bad = adapter_of(), adapter_of(config=adapter_config("r2"))
    publish(service, randomize(TinyModel(), 3), adapter=good).close()
    granted = open_session(where_of(service, good), "RO", HostMemory(), wait_s=0)
    assert check_checksums(granted) == good.manifest(TinyModel()).nbytes

    imported = publish(service, randomize(TinyModel(), 3), adapter=bad)
    body = bytearray(imported.body)
    body[-1] ^= 1  # the last checksum
    staging = open_session(Where(service, "spoiled"), "RW", HostMemory(), wait_s=0)
    source = open_session(where_of(service, bad), "RO", HostMemory(), wait_s=0)
    for segment in source.take_segments():
        staging.add(segment.mapping.nbytes, [(segment.mapping.address, 0, segment.mapping.nbytes)])
    staging.commit("x", bytes(body)).close()

    with pytest.raises(VerificationFailed, match="tensor "):
        check_checksums(open_session(Where(service, "spoiled"), "RO", HostMemory(), wait_s=0))


def test_no_checksums_cannot_be_checked(service):
    publish(service, TinyModel(), checksums=False).close()

    with pytest.raises(ManifestMismatch, match="0 checksums"):
        check_checksums(open_session(where_of(service, adapter_of()), "RO", HostMemory(), wait_s=0))


def publish_raw(path, model):
    adapter = adapter_of()
    staging = open_session(Where(path, adapter.identity().content_key), "RW", HostMemory(), wait_s=1)
    publish_model(staging, adapter, model, kind="checkpoint", label="raw", checksums=False, threads=1).close()


def test_a_raw_checkpoint_is_bound_by_name(service):
    holder = nn.Module()
    for name, shape in {"weight": (2, 3), "bias": (2,)}.items():
        holder.register_parameter(name, nn.Parameter(torch.ones(shape)))
    publish_raw(service, holder)

    loaded, _ = load(service, meta(lambda: nn.Linear(3, 2)))

    assert bytes_of(loaded.weight) == bytes_of(torch.ones(2, 3))
    assert loaded(torch.ones(1, 3)).tolist() == [[4.0, 4.0]]


class Aliased(nn.Module):
    """Something beside the persistent tensors looks at their memory, as fused layers do."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("turned", self.w.detach().t(), persistent=False)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("frequencies", torch.ones(3), persistent=False)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(Aliased, "'turned' shares its memory"), (meta(Rotary), "'frequencies' is on the meta device")],
)
def test_a_raw_checkpoint_refuses_what_it_would_leave_behind(service, build, reason):
    holder = nn.Module()
    holder.register_parameter("w", nn.Parameter(torch.ones(4, 4)))
    publish_raw(service, holder)

    with pytest.raises(LoadFailed, match=reason):
        load(service, build)


def test_a_tensor_between_two_elements_is_refused_before_anything_moves(service):
    memory = bytearray(range(12))
    model = nn.Module()
    model.raw = nn.Parameter(torch.frombuffer(memory, dtype=torch.uint8), requires_grad=False)
    model.odd = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32, offset=2, count=2))

    with pytest.raises(NotAvailable, match="in the middle of an element"):
        publish(service, model, adapter=adapter_of(lambda: model))
    assert bytes(model.raw.tolist()) == bytes(memory)
    assert eventually(lambda: client.status(service).keys == ())


def test_what_no_importer_could_take_is_not_kept(service):
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, 8)[:, ::2])

    with pytest.raises(ManifestMismatch, match="strided with gaps"):
        publish(service, model, adapter=adapter_of(lambda: model))


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_pause_and_resume_with_a_replaced_parameter_keep_the_others(service, monkeypatch):
    monkeypatch.setattr("modelexpress.gms.weights._SEGMENT_NBYTES", 1)  # a segment for each storage
    model = randomize(two_layers(), 3)
    publish(service, model, adapter=adapter_of(two_layers)).close()
    loaded, imported = load(service, two_layers)
    loaded[1].weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()

    imported.pause()
    imported.pause()
    imported.resume()

    assert bytes_of(loaded[0].weight) == bytes_of(model[0].weight)
    assert bytes_of(loaded[1].weight) == bytes_of(torch.ones(4, 4))


def test_resume_without_a_pause_changes_nothing(service):
    publish(service, randomize(TinyModel(), 3)).close()
    loaded, imported = load(service)
    with torch.no_grad():
        loaded.head.weight[0] = 999

    imported.resume()

    assert loaded.head.weight[0].tolist() == [999] * 8


def test_resume_after_a_drop_is_stale(service):
    publish(service, randomize(TinyModel(), 3)).close()
    _loaded, imported = load(service)
    imported.pause()
    client.drop(where_of(service, adapter_of()))

    with pytest.raises(StaleGeneration, match="is gone"):
        imported.resume()


def test_no_service_is_a_miss_within_milliseconds(tmp_path):
    """The weights are not even named: a digest reads files."""
    named = []
    adapter = ModuleAdapter(TinyModel, lambda: named.append("read"))
    missing = GmsImport(str(tmp_path / "none.sock"), HostMemory(), claims=True, wait_s=60)

    with pytest.raises(LoadFailed, match="no memory service is running") as failed:
        LoadStrategyChain([missing]).run(LoadTarget(adapter, ModelRoot(TinyModel())))

    (attempt,) = failed.value.report.attempts
    assert attempt.seconds < 0.01
    assert named == []


# The hard cases of disk and peers, by this way


def kept_and_imported(file, path):
    """The model that another load binds to what was kept of a file."""
    options = {"gms": str(path), "revision": "r1", "connect_timeout_s": 60.0}
    api.keep_checkpoint(file, **options)
    return api.load_checkpoint(file, strategies="gms", **options).model


def test_every_dtype_odd_offset_scalar_and_empty_tensor_is_imported(service, tmp_path):
    """A05, A06, A07: what disk and peers carry, the service carries too."""
    tensors = {"a": raw("U8", 3), **{f"t.{dtype}": raw(dtype, 5, seed=at) for at, dtype in enumerate(SIZES)}}
    tensors |= {"scalar": raw("F32"), "none": raw("BF16", 0), "wide": raw("F32", 0, 8), "tall": raw("I64", 8, 0)}
    tensors |= {"t.BOOL": Raw("BOOL", (3,), b"\x01\x00\x01")}
    file = write_file(tmp_path / "model.safetensors", tensors)

    found = dict(kept_and_imported(file, service).named_parameters())

    assert {name: bytes_of(each) for name, each in found.items()} == {n: each.data for n, each in tensors.items()}
    assert {name: tuple(each.shape) for name, each in found.items()} == {n: each.shape for n, each in tensors.items()}


def test_20000_tensors_are_imported(service, tmp_path):
    """A22: more tensors than a message has descriptors, and a manifest of megabytes."""
    data = os.urandom(20_000 * 256)
    tensors = {f"e.{at}": Raw("U8", (256,), data[256 * at : 256 * (at + 1)]) for at in range(20_000)}
    file = write_file(tmp_path / "many.safetensors", tensors)

    found = kept_and_imported(file, service).named_parameters()

    assert {name: bytes_of(each) for name, each in found} == {name: each.data for name, each in tensors.items()}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_tensor_of_3_gib_is_imported(service, tmp_path):
    """A22: one write call takes at most 2,147,479,552 bytes."""
    size = 3 << 30
    header = f'{{"big":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    file = tmp_path / "big.safetensors"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + size)
        out.seek(8 + len(header) + (1 << 31) - 3)
        out.write(b"middle")
        out.seek(-4, os.SEEK_END)
        out.write(b"last")

    big = kept_and_imported(file, service).get_parameter("big")

    assert bytes(big[(1 << 31) - 3 : (1 << 31) + 3].tolist()) == b"middle"
    assert bytes(big[-4:].tolist()) == b"last"
    assert int(torch.count_nonzero(big)) == 10
    file.unlink()
