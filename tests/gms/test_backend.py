"""The kind of memory follows the model's device. Devices that are not there are stood in for by torch's fake tensors,
and the driver by one that records its calls."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from modelexpress import api
from modelexpress.config import Config
from modelexpress.errors import GmsError, NotAvailable
from modelexpress.gms import client, cuda
from modelexpress.gms.backend import device_of, memory_backend
from modelexpress.gms.cuda import CudaMemory
from modelexpress.gms.memory import HostMemory
from modelexpress.model_root import ModelRoot
from modelexpress.strategies.base import LoadTarget
from tests.gms.service import adapter_of, serving, where_of
from tests.gms.test_cuda import RecordingDriver
from tests.support.tensors import TinyModel, randomize, snapshot


def model_on(*devices: str) -> nn.Module:
    """A parameter and a buffer on each device; no such device need be there."""
    module = nn.Module()
    with FakeTensorMode():
        for at, device in enumerate(devices):
            module.register_parameter(f"weight{at}", nn.Parameter(torch.empty(2, device=device)))
            module.register_buffer(f"scale{at}", torch.empty(1, device=device))
    return module


@pytest.fixture
def driver(monkeypatch):
    """Device 1 of a machine that has one."""
    driver = RecordingDriver()
    monkeypatch.setattr(cuda, "_Driver", {1: driver}.__getitem__)
    return driver


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ((), "cpu"),
        (("cpu",), "cpu"),
        (("meta",), "cpu"),
        (("cuda:1",), "cuda:1"),
        (("cpu", "cuda:1", "meta"), "cuda:1"),
    ],
)
def test_a_model_needs_memory_of_its_accelerator(devices, found):
    assert device_of(model_on(*devices)) == found


def test_a_model_on_two_devices_is_refused_by_name():
    with pytest.raises(NotAvailable, match="lies on cuda:0, cuda:1; a memory service keeps memory of one device"):
        device_of(model_on("cuda:0", "cuda:1"))


def test_each_device_has_its_memory(driver):
    assert type(memory_backend("cpu")) is HostMemory
    found = memory_backend("cuda:1")
    assert (type(found), found.device) == (CudaMemory, "cuda:1")
    assert driver.named("granularity")


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:-1", "xpu:0", "mps", ""])
def test_other_devices_have_none(device):
    with pytest.raises(NotAvailable, match=r"of cpu or of cuda:N, and not of '"):
        memory_backend(device)


def sources_of(path, module):
    """What the default chain finds in a service for a model on some device."""
    with api.default_chain(Config(gms=path, strategies=("gms",)), path) as chain:
        return chain.strategies[0].sources(LoadTarget(adapter_of(), ModelRoot(module)))


def test_a_load_asks_a_service_for_the_memory_of_its_models_device(driver, tmp_path):
    """Nothing is committed there, which is said once the backend was made and the service's kind was compared."""
    with serving(tmp_path / "gms.sock", CudaMemory(1, driver)) as path:
        driver.calls.clear()
        with pytest.raises(NotAvailable, match="memory service at"):
            sources_of(path, model_on("cuda:1"))
        assert driver.calls == [("granularity",)]


def test_a_service_of_another_kind_is_refused_before_it_is_asked(driver, tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        with pytest.raises(
            GmsError, match=r"keeps memory of cpu, and the model lies on cuda:1; start one with --device"
        ):
            sources_of(path, model_on("cuda:1"))
        assert client.status(path).keys == ()


def test_on_the_host_nothing_is_asked_of_a_driver(driver, tmp_path):
    options = {"revision": "r1", "model_name": "org/tiny"}
    model = randomize(TinyModel(), 1)
    with serving(tmp_path / "gms.sock") as path:
        where = where_of(path, adapter_of())
        config = Config(gms=path, publish=True, strategies=("gms", "disk"), **options)
        kept = api._keep_in_service(adapter_of(), model, path, None, tmp_path, config)
        report = api.load(TinyModel, tmp_path, gms=path, strategies="gms", **options)
        assert kept.where.key == report.imported.where.key == where.key
        assert report.imported.device == "cpu"
        assert snapshot(report.model) == snapshot(model)
        del report, kept, model
    assert driver.calls == []
