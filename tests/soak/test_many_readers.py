"""Many readers of one source at once: each is served or refused with a reason, and the source goes on with its work."""

import json
import os
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import modelexpress
from tests.soak.helpers import Helper, digest_of, infer, readers
from tests.support.safetensors_writer import raw, write_file

FULL = bool(os.environ.get("SOAK_LOADS"))
PROCESSES, THREADS = (10, 5) if FULL else (3, 4)
TENSORS = {f"t{at:02}": raw("BF16", 280, 1000, seed=at) for at in range(30)}  # 16.8 MB
BASELINE_S = 2.0

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_file(tmp_path_factory.mktemp("model") / "model.safetensors", TENSORS)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return digest_of(modelexpress.load_checkpoint(checkpoint, strategies="disk").model)


@contextmanager
def helper(*arguments):
    made = Helper(*arguments)
    try:
        yield made
    finally:
        made.kill()


def times_of(source):
    """How long each piece of the source's own work took since it was last asked, in milliseconds."""
    source.pipe.send("times")
    found = source.hear()
    return {f"p{each} ms": round(1e3 * float(np.percentile(found, each)), 3) for each in (50, 99, 100)} | {
        "pieces": len(found)
    }


def read_by_all(checkpoint, registry, transport):
    with ExitStack() as running:
        made = [
            running.enter_context(helper(readers, str(checkpoint), registry, transport, THREADS))
            for _ in range(PROCESSES)
        ]
        for each in made:
            each.pipe.send("go")
        return [got for each in made for got in each.hear()]


@pytest.mark.parametrize("transport", ["host", "nixl", "tcp"])
def test_all_are_served_and_the_source_goes_on(checkpoint, expected, tmp_path, transport):
    registry = f"file://{tmp_path}/registry"
    with helper(infer, str(checkpoint), registry, transport, 256) as source:
        times_of(source)
        source.pipe.poll(BASELINE_S)  # it says nothing: how it works when nobody reads
        alone = times_of(source)
        got = read_by_all(checkpoint, registry, transport)
        read = times_of(source)
        took_s = sorted(seconds for _, seconds in got)
        loads = {"load s": [round(took_s[at], 2) for at in (0, len(got) // 2, -1)]}
        print(json.dumps({"transport": transport, "readers": len(got), "alone": alone, "read": read} | loads))
        source.pipe.send("end")

        assert [what for what, _ in got] == [expected] * (PROCESSES * THREADS)
        assert read["pieces"] > 0
        assert source.hear() == "withdrawn"
    assert os.listdir(tmp_path / "registry") == []


def test_who_comes_when_a_source_serves_as_many_as_it_can_is_told_so(checkpoint, expected, tmp_path):
    """A source of the transport tcp has a bound; the next attempt, like the disk, is the reader's to make."""
    registry = f"file://{tmp_path}/registry"
    with helper(infer, str(checkpoint), registry, "tcp", 2) as source:
        got = {what for what, _ in read_by_all(checkpoint, registry, "tcp")}
        refusals = {each for each in got if each != expected}
        later = modelexpress.load_checkpoint(checkpoint, registry=registry, revision="r", transports="tcp")
        source.pipe.send("end")
        assert source.hear() == "withdrawn"

    assert expected in got
    assert all("serves as many readers as it can" in each for each in refusals)
    assert (later.strategy, digest_of(later.model)) == ("rdma", expected)
