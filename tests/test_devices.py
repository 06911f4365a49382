"""The driver's list of GPUs, what a process sees of it, and lists that differ."""

from __future__ import annotations

import pytest

from modelexpress.devices import Device, devices, parse_list, require_same_devices, visible
from modelexpress.errors import SnapshotError

LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa-1)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb-2)
  MIG 1g.18gb     Device  0: (UUID: MIG-cccc-3)
GPU 2: NVIDIA H200 (UUID: GPU-bbcc-4)
"""
A, B, PART, C = (Device(0, "GPU-aaaa-1"), Device(1, "GPU-bbbb-2"), Device(1, "MIG-cccc-3"), Device(2, "GPU-bbcc-4"))


def program(folder, text, status=0):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    path.chmod(0o700)
    return str(path)


def test_the_driver_s_list_in_its_order(tmp_path):
    assert devices(program(tmp_path, LISTED)) == (A, B, PART, C)


def test_without_a_driver_there_is_no_device(tmp_path):
    assert devices(str(tmp_path / "missing")) == ()
    assert devices(program(tmp_path, "couldn't communicate with the NVIDIA driver", 9)) == ()


def test_a_driver_that_fails_is_no_empty_list(tmp_path):
    with pytest.raises(SnapshotError, match=r"ended with 15: GPU is lost"):
        devices(program(tmp_path, "GPU is lost", 15))


@pytest.mark.parametrize("text", ["GPU 0: NVIDIA H200", "  MIG 1g.18gb Device 0: (UUID: MIG-1)", "something else"])
def test_a_line_that_names_no_device_is_refused(text):
    with pytest.raises(SnapshotError, match="names no device"):
        parse_list(text)


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, (A, B, PART, C)),
        ("", ()),
        ("2,0", (C, A)),
        (" 1 , 0 ", (B, A)),
        ("GPU-bbbb,GPU-aaaa-1", (B, A)),
        ("MIG-cccc-3", (PART,)),
        ("0,7,1", (A,)),
        ("GPU-bb", ()),
        ("-1", ()),
    ],
)
def test_what_a_process_sees(setting, seen):
    assert visible((A, B, PART, C), setting) == seen


def test_the_same_devices_are_no_error():
    require_same_devices((A, B), [A, B])
    require_same_devices((), ())


def test_a_difference_names_both_lists():
    with pytest.raises(SnapshotError, match=r"are others: recorded 0: GPU-aaaa-1; found none"):
        require_same_devices((A,), ())
    swapped = (Device(0, B.uuid), Device(1, A.uuid))
    with pytest.raises(
        SnapshotError, match=r"same in another order: recorded 0: GPU-aaaa-1, 1: GPU-bbbb-2; found 0: GPU-b"
    ):
        require_same_devices((A, B), swapped)
