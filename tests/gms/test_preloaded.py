"""What a load says about memory that the service held before it began, and the service says the same."""

import threading
import time
from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelexpress.api import fill_root
from modelexpress.config import Config
from modelexpress.gms import client
from modelexpress.gms.client import Staging, held_nbytes, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.weights import publish_model
from tests.gms.service import adapter_of, publish, serving, where_of
from tests.support.tensors import TinyModel, randomize

MIB = 1 << 20


class Mixed(nn.Module):
    """Some of it may be written to, and is copied by whoever imports it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512)
        self.register_buffer("table", torch.zeros(300, 1000))


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        yield path


def save(path, model):
    tensors = {name: each for name, each in model.state_dict().items() if name != "head.weight"}  # tied
    save_file(tensors, path)


def load(path, build=TinyModel, *, publish_it=False):
    adapter = adapter_of(build)
    config = Config(gms=path, strategies=("gms", "disk"), publish=publish_it, transfer_timeout_s=20.0)
    return fill_root(adapter, adapter.initialize, path, config)


@pytest.mark.parametrize("build", [TinyModel, Mixed])
def test_an_imported_generation_counts_with_all_that_the_service_keeps_for_it(build, service):
    adapter = adapter_of(build)
    publish(service, randomize(build(), 1), adapter=adapter)

    report = load(service, build).report

    assert report.strategy == "gms"
    assert report.preloaded_nbytes == held_nbytes(where_of(service, adapter)) == client.status(service).used_nbytes
    assert report.preloaded_nbytes >= adapter.manifest(build()).nbytes
    assert report.imported.kept_nbytes == report.preloaded_nbytes


def test_segments_that_nobody_here_looks_at_are_in_memory_all_the_same(service):
    adapter = adapter_of()
    staging = open_session(where_of(service, adapter), "RW", HostMemory(), wait_s=5)
    staging.add(3 * MIB, [])
    publish_model(
        staging, adapter, randomize(TinyModel(), 1), kind="layout", label="tiny", checksums=False, threads=1
    ).close()

    report = load(service).report

    assert report.preloaded_nbytes == client.status(service).used_nbytes > 3 * MIB
    assert report.imported.nbytes < 3 * MIB  # what is still mapped here


def test_weights_that_another_process_stages_meanwhile_count_as_far_as_they_were_there(service):
    adapter = adapter_of()
    where = where_of(service, adapter)
    staging = open_session(where, "RW", HostMemory(), wait_s=5)
    assert isinstance(staging, Staging)
    staging.add(MIB + 1, [])
    reports = []
    waiting = threading.Thread(target=lambda: reports.append(load(service, publish_it=True).report))
    waiting.start()
    give_up = time.monotonic() + 20
    while sum(key.waiting for key in client.status(service).keys) == 0 and time.monotonic() < give_up:
        time.sleep(0.01)

    publish_model(
        staging, adapter, randomize(TinyModel(), 1), kind="layout", label="tiny", checksums=False, threads=1
    ).close()
    waiting.join(20)

    (report,) = reports
    assert report.strategy == "gms"
    assert report.preloaded_nbytes == MIB + 4096  # whole pages
    assert report.imported.kept_nbytes > report.preloaded_nbytes


def test_what_this_process_staged_itself_counts_nothing(service, tmp_path):
    save(tmp_path / "model.safetensors", randomize(TinyModel(), 1))
    adapter = adapter_of()
    config = Config(gms=service, strategies=("gms", "disk"), publish=True)

    with closing(fill_root(adapter, adapter.initialize, tmp_path, config)) as filled:
        report = filled.publish()

    assert report.strategy == "disk"
    assert report.imported is not None
    assert client.status(service).used_nbytes > 0
    assert report.preloaded_nbytes == 0


def test_a_generation_that_does_not_fit_counts_nothing(service, tmp_path):
    """It stays in the service's memory, as other processes' memory does."""
    publish(service, randomize(Mixed(), 1), adapter=adapter_of(Mixed))
    save(tmp_path / "model.safetensors", randomize(TinyModel(), 1))
    adapter = adapter_of()  # of the same name, and another layout

    report = fill_root(adapter, adapter.initialize, tmp_path, Config(gms=service, strategies=("gms", "disk"))).report

    assert report.strategy == "disk"
    assert [each.outcome for each in report.attempts] == ["failed", "loaded"]
    assert report.preloaded_nbytes == 0
