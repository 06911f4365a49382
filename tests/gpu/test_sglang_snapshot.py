"""A server on a GPU is made fit for capture and serves again, on the devices that were recorded and on no others.

It has not run on one yet. On a machine with one:

pip install -e '.[cuda,nixl,sglang,dev]'
python -m pytest -m gpu tests/gpu/test_sglang_snapshot.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from modelexpress.devices import Device
from modelexpress.engines.sglang import snapshot
from modelexpress.errors import SnapshotError
from tests.sglang.sources import keeping, new_registry
from tests.sglang.test_servers import NAMED, ours, sources_in
from tests.sglang.test_snapshot import readers_of
from tests.support.sglang_cpu.environment import device
from tests.support.sglang_cpu.model_cache import ModelCache
from tests.support.sglang_cpu.server import SglangServer

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.nixl]

ELSEWHERE = Device(0, "GPU-00000000-0000-0000-0000-000000000000")


def uuids() -> list[str]:
    """What the driver lists, in its order; nothing on a machine without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    said = subprocess.run([program, "-L"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"UUID: ([^)]+)\)", said)


def test_a_server_resumes_on_its_own_devices_only(
    models: ModelCache, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry, socket, ready = new_registry(tmp_path_factory), str(tmp_path / "gms"), tmp_path / "ready.json"
    with (
        keeping(socket),
        SglangServer(models("llama"), *ours(registry, gms=socket, publish=True), env=NAMED, warmup=True) as server,
    ):
        server.wait_ready()
        tokens = server.generate()
        assert (sources_in(registry), readers_of(socket)) == (1, 1)

        written = snapshot.quiesce(server.url, ready)

        assert [each.uuid for each in written.devices] == uuids()
        assert written.devices or device() == "cpu"
        assert snapshot.left_behind(server.url) == ()
        assert (sources_in(registry), readers_of(socket)) == (0, 0)

        on_others = tmp_path / "elsewhere.json"
        others = (*written.devices[1:], ELSEWHERE)
        snapshot.write_ready(on_others, msgspec.structs.replace(written, devices=others))
        with pytest.raises(SnapshotError, match=rf"devices are others: recorded .*{ELSEWHERE.uuid}; found ") as caught:
            snapshot.resume(server.url, on_others)
        assert all(each in str(caught.value) for each in uuids())
        assert (sources_in(registry), readers_of(socket)) == (0, 0)  # nothing was touched

        snapshot.resume(server.url, ready)
        assert server.generate() == tokens
        assert (sources_in(registry), readers_of(socket)) == (1, 1)
