"""The GPUs of this machine or container, in the order in which the driver lists them.

A process that was captured knows its GPUs by ordinals. After a restore in another container the same ordinals may
mean other devices, so the list is written down before and compared after.

The list comes from `nvidia-smi -L` in a process of its own: what NVML opens stays open in its process, and CRIU
cannot capture that. Needs neither torch nor CUDA.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

import msgspec

from modelexpress.errors import SnapshotError

_LINE = re.compile(r"\s*(?P<kind>GPU|MIG)\b.*?\(UUID: (?P<uuid>[^)\s]+)\)\s*$")
_GPU = re.compile(r"\s*GPU (\d+):")
_LIST_S = 60.0
_NO_DRIVER = (9, 12)  # nvidia-smi(1): the driver is not loaded; its library is not found


class Device(msgspec.Struct, frozen=True, array_like=True):
    """One GPU, or one MIG part of it: the GPU's ordinal in the driver's list, and the UUID of either."""

    ordinal: int
    uuid: str


def devices(program: str = "nvidia-smi") -> tuple[Device, ...]:
    """What the driver lists for the calling process's container; empty on a machine without a driver.

    Raises:
        SnapshotError: the driver is there and does not answer, or in a form that is not known.
    """
    path = shutil.which(program)
    if path is None:
        return ()
    try:
        done = subprocess.run(
            [path, "-L"], capture_output=True, text=True, errors="replace", timeout=_LIST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SnapshotError(f"the GPUs cannot be listed: {path} -L: {exc}") from exc
    if done.returncode in _NO_DRIVER:
        return ()
    if done.returncode:
        said = " ".join((done.stderr + done.stdout).split())
        raise SnapshotError(f"the GPUs cannot be listed: {path} -L ended with {done.returncode}: {said}")
    return parse_list(done.stdout)


def parse_list(text: str) -> tuple[Device, ...]:
    """What `nvidia-smi -L` printed. MIG parts follow their GPU and have its ordinal.

    Raises:
        SnapshotError: a line has no UUID, or parts come before their GPU.
    """
    found: list[Device] = []
    ordinal = None
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("No devices"):
            continue
        matched = _LINE.match(line)
        if gpu := _GPU.match(line):
            ordinal = int(gpu[1])
        if matched is None or ordinal is None:
            raise SnapshotError(f"nvidia-smi -L says {line.strip()!r}, which names no device")
        found.append(Device(ordinal, matched["uuid"]))
    return tuple(found)


def visible(listed: Sequence[Device], setting: str | None) -> tuple[Device, ...]:
    """The devices that a process with this CUDA_VISIBLE_DEVICES has, in its order; None: all of them.

    As CUDA reads it: ordinals or beginnings of UUIDs, and nothing behind the first one that is no device. Its
    ordinals are those of the driver's list where all GPUs are alike, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if setting is None:
        return tuple(listed)
    chosen: list[Device] = []
    for word in (each.strip() for each in setting.split(",")):
        of_word = [each for each in listed if _is_named(each, word)]
        if len(of_word) != 1:
            break
        chosen += of_word
    return tuple(chosen)


def _is_named(device: Device, word: str) -> bool:
    if word.isdecimal():
        return device.ordinal == int(word) and device.uuid.startswith("GPU-")
    return bool(word) and device.uuid.startswith(word)


def require_same_devices(recorded: Sequence[Device], found: Sequence[Device], *, what: str = "devices") -> None:
    """Refuse to go on with other devices than before, or with the same in another order.

    Raises:
        SnapshotError: names both lists.
    """
    if tuple(recorded) == tuple(found):
        return
    kind = (
        "the same in another order"
        if sorted(each.uuid for each in recorded) == sorted(each.uuid for each in found)
        else "others"
    )
    raise SnapshotError(
        f"the {what} are {kind}: recorded {shown(recorded)}; found {shown(found)}. "
        "Restore with the recorded devices in the recorded order"
    )


def shown(listed: Sequence[Device]) -> str:
    """One line for people."""
    return ", ".join(f"{each.ordinal}: {each.uuid}" for each in listed) or "none"


def bind_thread(device: str) -> None:
    """Bind the calling thread to a device ("cuda:1"), before its first call that touches one; nothing for "cpu".

    The device of CUDA's runtime belongs to a thread: a thread that never said which it uses has device 0.
    """
    kind, _, ordinal = device.partition(":")
    if kind == "cuda":
        import torch

        torch.cuda.set_device(int(ordinal or 0))
