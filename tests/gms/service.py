"""A memory service in a thread of the test, and models that are published to it."""

import threading
from contextlib import contextmanager

from modelexpress.adapter import ModuleAdapter
from modelexpress.config import Config
from modelexpress.gms.client import Staging, Where, open_session
from modelexpress.gms.memory import HostMemory
from modelexpress.gms.server import GmsServer
from modelexpress.gms.weights import publish_model
from modelexpress.identity import module_identity
from tests.support.tensors import TinyModel

CONFIG = Config(revision="r1", model_name="org/tiny")


@contextmanager
def serving(path, backend=None, *, quota_nbytes=None):
    with GmsServer(path, backend or HostMemory(), quota_nbytes=quota_nbytes) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield str(path)
        finally:
            server.stop()
            thread.join(20)


def adapter_of(build=TinyModel, config=CONFIG, **options):
    return ModuleAdapter(build, lambda: module_identity("/nonexistent", config), **options)


def where_of(path, adapter):
    return Where(path, adapter.identity().key)


def publish(path, model, *, adapter=None, kind="layout", checksums=True):
    adapter = adapter or adapter_of()
    staging = open_session(where_of(path, adapter), "RW", HostMemory(), wait_s=5)
    assert isinstance(staging, Staging)
    return publish_model(staging, adapter, model, kind=kind, label="tiny", checksums=checksums, threads=1)
