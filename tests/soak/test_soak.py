"""Many loads in one process: what it holds does not grow, however they end. `make soak` runs 1,000 of them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

LOADS = int(os.environ.get("SOAK_LOADS") or 60)
WARM_UP = 100  # loads after which libraries have what they keep
MOST_NBYTES_A_LOAD = 1_000_000
LOAD_S = 1.0  # with everything that is started again between two

COUNTS = ("fds", "threads", "ours", "agents", "memfds", "/dev/shm", "files", "records", "redis keys")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.nixl
@pytest.mark.timeout(120 + LOADS * LOAD_S)
def test_loads_that_end_in_every_way_leave_nothing(tmp_path):
    command = [sys.executable, "-c", f"from tests.soak.loads import main; main({str(tmp_path)!r}, {LOADS}, 1)"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100 + LOADS * LOAD_S)
    print(done.stdout)

    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["outcomes"].values()) == LOADS
    samples = [each for each in found["samples"] if each["load"] >= min(WARM_UP, LOADS // 3)]
    assert len(samples) > 1
    for name in COUNTS:
        assert samples[-1][name] <= samples[0][name], f"{name}: {[each[name] for each in samples]}"
    if len(samples) > 10:  # a line through less says nothing
        slope_nbytes = np.polyfit([each["load"] for each in samples], [1e6 * each["rss MB"] for each in samples], 1)[0]
        print(f"{slope_nbytes:,.0f} bytes a load, {found['mean_s']:.3f} s a load")
        assert slope_nbytes < MOST_NBYTES_A_LOAD
