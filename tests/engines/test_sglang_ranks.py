"""What ranks agree on, between real processes: two of them, or two pipeline stages of two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelexpress.engines.sglang.ranks import first_error, from_first, largest

# Gives SGLang's groups to a process: the world, and with four ranks two pipeline stages of two.
PRELUDE = """
import json, os, sys, types
import torch.distributed as dist
from types import SimpleNamespace
rank, world, stages, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
width = world // stages
of_stage = [dist.new_group(list(range(at * width, (at + 1) * width))) for at in range(stages)][rank // width]
of = lambda size, group: lambda: SimpleNamespace(world_size=size, cpu_group=group)
state = types.ModuleType("sglang.srt.distributed.parallel_state")
state.get_world_group = of(world, dist.group.WORLD)
state.get_tp_group = of(width, of_stage)
state.get_pp_group = of(stages, None)
sys.modules[state.__name__] = state
from modelexpress.engines.sglang.ranks import first_error, from_first, largest
def tell(value):
    print(json.dumps(value), flush=True)
"""


def on_ranks(code: str, folder: Path, world: int = 2, stages: int = 1) -> list[object]:
    """What each rank told, or the last line of its traceback."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PRELUDE + code]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(stages), str(folder)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        ended = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads(said) if said else "".join(error.splitlines()[-1:]) for said, error in ended]


def test_two_ranks_agree(tmp_path):
    code = """
values = [
    largest([3, 70_000_000_000][rank]),
    largest([2**62, 0][rank]),
    first_error(None),
    first_error([None, "rank 1: no space"][rank]),
    first_error(["rank 0: \\u00e9", "rank 1: no space"][rank]),
    from_first([{"key": "a" * 5000, "n": [1, None, True]}, None][rank]),
    from_first([(1, "x"), (2, "longer")][rank], tuple[int, str]) == (1, "x"),
]
tell(values)
"""
    first, second = on_ranks(code, tmp_path)

    assert first == second
    assert first[:3] == [70_000_000_000, 2**62, None]
    assert first[3:5] == ["rank 1: no space", "rank 0: é"]
    assert first[5:] == [{"key": "a" * 5000, "n": [1, None, True]}, True]


def test_a_stage_agrees_without_the_others(tmp_path):
    """A draft model is loaded by one stage alone: nobody may wait for the other."""
    code = """
own = largest(rank, one_stage=True) if rank < 2 else None
tell([own, largest(rank), first_error(f"rank {rank}" if rank else None), from_first(rank, one_stage=True)])
"""
    assert on_ranks(code, tmp_path, world=4, stages=2) == [
        [1, 3, "rank 1", 0],
        [1, 3, "rank 1", 0],
        [None, 3, "rank 1", 2],
        [None, 3, "rank 1", 2],
    ]


def test_one_stage_is_the_whole_world_when_there_is_but_one(tmp_path):
    assert on_ranks("tell(largest(rank, one_stage=True))", tmp_path) == [1, 1]


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(tmp_path):
    code = """
import time
if rank:
    time.sleep(3)
    tell("late")
else:
    largest(1, wait_s=0.5)
"""
    said, other = on_ranks(code, tmp_path)

    assert other == "late"
    assert "ModelExpressError: the 2 ranks of this engine could not agree within 0.5 s" in said
    assert "the log of the rank that is missing says why" in said


def test_a_rank_that_died_is_said(tmp_path):
    code = """
if rank:
    os._exit(1)
largest(1, wait_s=30)
"""
    said = on_ranks(code, tmp_path)[0]

    assert "ModelExpressError: the 2 ranks of this engine could not agree" in said


@pytest.mark.parametrize("one_stage", [False, True])
def test_alone_it_is_ones_own_value(one_stage):
    assert largest(5, one_stage=one_stage) == 5
    assert first_error(None, one_stage=one_stage) is None
    assert first_error("no", one_stage=one_stage) == "no"
    assert from_first({"a": [1]}, one_stage=one_stage) == {"a": [1]}
