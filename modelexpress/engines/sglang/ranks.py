"""Values that the ranks of one engine agree on: tensor-parallel times pipeline-parallel processes.

Each call is a meeting: every rank makes it, in the same order, or the others wait for it in vain. It goes over the
CPU groups that SGLang made. One rank alone, and a process without groups, agree with themselves.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from modelexpress.errors import ModelExpressError, describe

T = TypeVar("T")

# As long as SGLang itself lets one rank be behind another with its weights.
_WAIT_S = 480.0


def are_several() -> bool:
    """Whether this engine has more ranks than the one that asks."""
    return _group(one_stage=False) is not None


def largest(value: int, *, one_stage: bool = False, wait_s: float = _WAIT_S) -> int:
    """The largest value that any rank gave.

    Args:
        one_stage: only the ranks of this pipeline stage are asked. Draft models exist on one stage alone.
        wait_s: how long to wait for the others; each of two exchanges may take that long.

    Raises:
        ModelExpressError: a rank did not come in time, or went away.
    """
    return max(msgspec.json.decode(each, type=int) for each in _gather(value, one_stage, wait_s))


def first_error(text: str | None, *, one_stage: bool = False, wait_s: float = _WAIT_S) -> str | None:
    """What the lowest rank that failed says; None when no rank did. Arguments and errors as of `largest`."""
    said = (msgspec.json.decode(each, type=str | None) for each in _gather(text, one_stage, wait_s))
    return next((each for each in said if each is not None), None)


def from_first(value: T, kind: Any = Any, *, one_stage: bool = False, wait_s: float = _WAIT_S) -> T:
    """The lowest rank's value, on every rank; what the others give is not looked at.

    It travels as JSON and is made into `kind`, on the lowest rank, too: all have equal values. Errors as of `largest`.
    """
    decoded: T = msgspec.json.decode(_gather(value, one_stage, wait_s)[0], type=kind)
    return decoded


def _gather(value: object, one_stage: bool, wait_s: float) -> list[bytes]:
    """Every rank's value as JSON, in the order of ranks."""
    ours = msgspec.json.encode(value)
    group = _group(one_stage)
    if group is None:
        return [ours]
    sizes = [int(each) for each in _exchange(torch.tensor([len(ours)]), group, wait_s)]
    padded = torch.frombuffer(bytearray(ours.ljust(max(sizes))), dtype=torch.uint8)
    given = _exchange(padded, group, wait_s)
    return [bytes(each.tolist())[:size] for each, size in zip(given, sizes, strict=True)]


def _exchange(ours: torch.Tensor, group: dist.ProcessGroup, wait_s: float) -> list[torch.Tensor]:
    given = [torch.empty_like(ours) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(given, ours, group=group, async_op=True)
        work.wait(timedelta(seconds=wait_s))
    except RuntimeError as exc:
        raise ModelExpressError(
            f"the {len(given)} ranks of this engine could not agree within {wait_s:g} s ({describe(exc)}); "
            "the log of the rank that is missing says why"
        ) from exc
    return given


def _group(one_stage: bool) -> dist.ProcessGroup | None:
    """Whom to ask, over the CPU; None when there is nobody else."""
    if not (dist.is_available() and dist.is_initialized()) or _joins_running_ranks():
        return None
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

    found = get_tp_group() if one_stage and get_pp_group().world_size > 1 else get_world_group()
    group: dist.ProcessGroup | None = found.cpu_group if found.world_size > 1 else None
    return group


def _joins_running_ranks() -> bool:
    """Elastic expert parallelism: the other ranks serve already, and are at no meeting."""
    try:
        from sglang.srt.runtime_context import get_exec

        return bool(get_exec().moe.is_ep_joiner)
    except (ImportError, AttributeError):  # a release without it
        return False
