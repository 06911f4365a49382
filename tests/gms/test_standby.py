"""A standby of another replica reads what that one commits: it waits for it, and takes nothing else."""

import threading
from contextlib import closing

import pytest
import torch
from torch import nn

from modelexpress.api import default_chain
from modelexpress.config import Config
from modelexpress.errors import NotAvailable
from modelexpress.gms.client import Staging, Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.weights import publish_model
from modelexpress.model_root import ModelRoot
from modelexpress.strategies.base import LoadTarget
from modelexpress.strategies.gms import GmsImport
from tests.gms.service import adapter_of, publish, serving
from tests.support.tensors import bytes_of

WAIT_S = 20.0


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path / "gms.sock") as path:
        yield path


@pytest.fixture
def config(service, tmp_path):
    return Config(strategies=("gms",), gms=service, takeover_lock=str(tmp_path / "m.lock"), transfer_timeout_s=WAIT_S)


@pytest.fixture
def adapter():
    return adapter_of(lambda: nn.Linear(3, 2))


def model_of(value):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def publish_raw(path, adapter):
    staging = open_session(Where(path, adapter.identity().content_key), "RW", HostMemory(), wait_s=1)
    publish_model(staging, adapter, model_of(1.0), kind="checkpoint", label="raw", checksums=False, threads=1).close()


def load(config, adapter, tmp_path):
    with default_chain(config, tmp_path) as chain:
        return chain.run(LoadTarget(adapter, ModelRoot(adapter.initialize())))


def test_it_waits_for_a_commit_that_nobody_stages_yet_and_leaves_the_raw_checkpoint(config, adapter, service, tmp_path):
    publish_raw(service, adapter)
    later = threading.Timer(0.3, publish, [service, model_of(2.0)], {"adapter": adapter})
    later.start()
    report = load(config, adapter, tmp_path)
    later.join()

    assert report.strategy == "gms"
    assert bytes_of(report.model.weight) == bytes_of(torch.full((2, 3), 2.0))


def test_whoever_publishes_is_no_standby(config, adapter, service, tmp_path):
    publish_raw(service, adapter)
    primary = Config(strategies=("gms",), gms=service, takeover_lock=config.takeover_lock, publish=True)

    report = load(primary, adapter, tmp_path)

    assert bytes_of(report.model.weight) == bytes_of(torch.ones(2, 3))


def test_it_claims_nothing(service, adapter):
    """Another process can stage while it waits, and after it gave up."""
    with closing(GmsImport(service, HostMemory(), claims=False, wait_s=0.2, standby=True)) as standby:
        with pytest.raises(NotAvailable, match=r"nobody stages it, after 0\.2 s"):
            standby.sources(LoadTarget(adapter, ModelRoot(adapter.initialize())))
        assert standby.staging is None
        granted = open_session(Where(service, adapter.identity().key), "RW", HostMemory(), wait_s=0.0)
        granted.close()
        assert isinstance(granted, Staging)
