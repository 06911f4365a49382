"""One file's header: what is accepted, what is refused, and with which words."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from modelexpress.checkpoint.header import DTYPES, parse_header
from modelexpress.checkpoint.index import open_index
from modelexpress.errors import CheckpointError
from modelexpress.manifest import DTYPE_NBYTES
from tests.checkpoint.destination import TORCH, assert_same, empty_like, load
from tests.support.safetensors_writer import SIZES, entry, raw, write_file, write_raw

U8X4 = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'

REFUSED = {
    "overlap (A01)": (
        json.dumps({"a": entry("U8", (16,), 0, 16), "b": entry("U8", (16,), 8, 24)}),
        24,
        r"tensor 'b': its bytes \[8, 24\) overlap those of tensor 'a', \[0, 16\)",
    ),
    "same bytes twice (A01)": (
        json.dumps({"a": entry("U8", (4,), 0, 4), "b": entry("U8", (4,), 0, 4)}),
        4,
        "tensor 'b': .* overlap .* 'a'",
    ),
    "hole": (
        json.dumps({"a": entry("U8", (4,), 0, 4), "b": entry("U8", (4,), 8, 12)}),
        12,
        "tensor 'b': it begins at byte 8 .* 4 bytes belong to no tensor",
    ),
    "hole at the start": (json.dumps({"a": entry("U8", (4,), 4, 8)}), 8, "'a': it begins at byte 4"),
    "shape larger than range (A02)": (
        json.dumps({"w": entry("F32", (1000,), 0, 16)}),
        16,
        r"tensor 'w': shape \[1000\] of F32 needs 4,000 bytes, its range \[0, 16\) has 16",
    ),
    "range larger than shape (A02)": (json.dumps({"w": entry("F32", (4,), 0, 4000)}), 4000, "needs 16 bytes"),
    "begin after end": (json.dumps({"w": entry("U8", (4,), 4, 0)}), 4, r"'w': data_offsets \[4, 0\]"),
    "three offsets": (U8X4.join(['{"w":', "}"]).replace("[0,4]", "[0,4,4]"), 4, r"'w': data_offsets \[0, 4, 4\]"),
    "product overflows": (json.dumps({"w": entry("U8", (1 << 32, 1 << 32), 0, 4)}), 4, "'w': shape .* overflows"),
    "empty, product overflows": (json.dumps({"w": entry("U8", (0, 1 << 62), 0, 0)}), 0, "'w': shape .* overflows"),
    "size beyond int64": (json.dumps({"w": entry("U8", (1 << 63, 0), 0, 0)}), 0, "'w': shape"),
    "negative size": (json.dumps({"w": entry("U8", (-4,), 0, 4)}), 4, r"'w': shape \[-4\]"),
    "fraction": (f'{{"w":{U8X4.replace("[4]", "[4.0]")}}}', 4, r"'w': shape \[4.0\]"),
    "minus zero": (f'{{"w":{U8X4.replace("[0,", "[-0,")}}}', 4, r"'w': data_offsets \[-0.0"),
    "true as a size": (f'{{"w":{U8X4.replace("[4]", "[true]")}}}', 4, r"'w': shape \[True\]"),
    "no shape": ('{"w":{"dtype":"U8","data_offsets":[0,4]}}', 4, "'w': shape None"),
    "unknown dtype (A07)": (json.dumps({"w": entry("F9", (4,), 0, 4)}), 4, "tensor 'w': unknown dtype 'F9'"),
    "dtype in lower case": (json.dumps({"w": entry("u8", (4,), 0, 4)}), 4, "tensor 'w': unknown dtype 'u8'"),
    "6-bit float": (json.dumps({"w": entry("F6_E2M3", (4,), 0, 3)}), 3, "'w': dtype F6_E2M3 has no torch type"),
    "odd 4-bit": (json.dumps({"w": entry("F4", (3,), 0, 1)}), 1, "'w': .* does not fill whole bytes"),
    "odd last size 4-bit": (json.dumps({"w": entry("F4", (2, 1), 0, 1)}), 1, "'w': .* the last size must be even"),
    "not an object": ('{"w":["U8",[4],[0,4]]}', 4, "'w': described by something else"),
    "extra key, number out of range": (f'{{"w":{U8X4[:-1]},"x":1e999}}}}', 4, "'w': .*'x' holds a number"),
    "extra key, nested": (f'{{"w":{U8X4[:-1]},"x":{"[" * 200}{"]" * 200}}}}}', 4, "'w': .*'x' is nested"),
    "nested without end": (f'{{"w":{"[" * 99999}', 4, "nested too deeply"),
    "same name twice": (f'{{"a":{U8X4},"a":{U8X4}}}', 4, "'a' occurs twice"),
    "same name twice, escaped": (f'{{"a":{U8X4},"\\u0061":{U8X4}}}', 4, "'a' occurs twice"),
    "same key twice": (f'{{"a":{U8X4[:-1]},"dtype":"U8"}}}}', 4, "'dtype' occurs twice"),
    "metadata no text": (f'{{"__metadata__":{{"a":1}},"a":{U8X4}}}', 4, "__metadata__"),
    "half a surrogate": (f'{{"\\ud800":{U8X4}}}', 4, "surrogate"),
    "control character": (f'{{"a\n":{U8X4}}}', 4, "Invalid control character"),
    "NaN": (f'{{"a":{U8X4.replace("[4]", "[NaN]")}}}', 4, "NaN is no JSON"),
    "NUL padding": (f'{{"a":{U8X4}}}\0', 4, "Extra data"),
    "leading space": (f' {{"a":{U8X4}}}', 4, "it starts with"),
    "no header": ("", 0, "it starts with ''"),
    "a list": ("[]", 0, "it starts with"),
    "data without tensors": ("{}", 1, "longer than its header says: expected 10 bytes, found 11"),
    "too much data": (f'{{"a":{U8X4}}}', 5, "longer than its header says"),
}


@pytest.mark.parametrize(("header", "data_nbytes", "words"), REFUSED.values(), ids=REFUSED)
def test_broken_headers_are_refused_with_file_tensor_and_reason(tmp_path, header, data_nbytes, words):
    path = write_raw(tmp_path / "model.safetensors", header, bytes(data_nbytes))

    with pytest.raises(CheckpointError, match=rf"^model\.safetensors: .*{words}"):
        open_index(path)


def test_invalid_utf8_is_refused(tmp_path):
    path = write_raw(tmp_path / "model.safetensors", b'{"a\xff":' + U8X4.encode() + b"}", bytes(4))

    with pytest.raises(CheckpointError, match="no valid UTF-8 at byte 3"):
        open_index(path)


def test_our_stricter_refusals_are_the_only_difference_to_the_library():
    """If this fails after an upgrade, the library changed what it accepts: read its release notes."""
    accepted = [
        name for name, (header, nbytes, _) in REFUSED.items() if library_accepts(header.encode(), bytes(nbytes))
    ]

    assert accepted == [
        "empty, product overflows", "size beyond int64", "6-bit float", "odd last size 4-bit", "not an object",
        "same name twice", "same name twice, escaped", "leading space",
    ]  # fmt: skip


@pytest.mark.parametrize("header", ["{}", f'{{"a":{U8X4}}}  \t\r\n', f'{{"a":{U8X4[:-1]},"x":[1,{{"y":null}}]}}}}'])
def test_what_the_library_accepts_besides_plain_entries(header):
    data = bytes(4 if "a" in header else 0)

    assert library_accepts(header.encode(), data)
    assert len(parse_header(header.encode(), len(data), "x")) == header.count("dtype")


@pytest.mark.parametrize(("start", "hint"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 976\n", "git lfs pull"),
    (b"\n<!DOCTYPE html><html><body>404 Not Found</body></html>", "HTML .* download failed"),
    (b'{"error":"Invalid username or password."}', "failed download"),
    (b"PK\x03\x04\x00\x00\x08\x08" + bytes(50), "zip archive .* can run code"),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P" + bytes(50), "pickle"),
    (b"GGUF\x03\x00\x00\x00" + bytes(50), "GGUF"),
    (b"tiny", "4 bytes"),
])  # fmt: skip
def test_another_kind_of_file_is_named_for_what_it_is(tmp_path, start, hint):
    """A04: a pointer or an error page saved as a shard."""
    (tmp_path / "model.safetensors").write_bytes(start)

    with pytest.raises(CheckpointError, match=rf"^model.safetensors: not a safetensors file.*{hint}"):
        open_index(tmp_path)


def test_a_header_whose_length_is_the_sign_of_a_web_page_is_no_web_page(tmp_path):
    """60 is "<" in ASCII; the check for HTML must not look at a length that is possible."""
    tensors = {"w": raw("U8", 3)}
    path = write_file(tmp_path / "model.safetensors", tensors, header_nbytes=60)
    into = empty_like(tensors)

    load(path, into)

    assert path.read_bytes()[0:1] == b"<"
    assert_same(into, tensors)


def test_header_longer_than_the_file_says_both_sizes(tmp_path):
    path = write_raw(tmp_path / "model.safetensors", f'{{"a":{U8X4}}}', bytes(4), length=5000)

    with pytest.raises(CheckpointError, match="cut short inside its header: expected at least 5,008 bytes, found 65"):
        open_index(path)


def test_every_dtype_has_the_same_size_in_torch_and_in_a_manifest():
    for theirs, ours in DTYPES.items():
        dtype = getattr(torch, ours)
        assert dtype.itemsize == DTYPE_NBYTES[ours]
        assert theirs == "F4" or TORCH[theirs] == dtype


ODD = st.sampled_from(
    [0, 1, 2, 4, 8, -1, 1 << 62, 1 << 63, 1 << 64, 1.0, 1e999, True, None, "4", [], [1], {"U8": None}]
)
KINDS = st.lists(st.tuples(st.sampled_from([*TORCH, "F6_E2M3"]), st.lists(st.integers(0, 3), max_size=3)), max_size=3)
FIELDS = st.tuples(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]), st.integers(0, 3), ODD)
EDITS = st.tuples(st.integers(0, 1 << 16), st.sampled_from(list(b'{}[]",:-0184eE. \\un\0\xff\n')))


@settings(max_examples=1000, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(KINDS, st.lists(FIELDS, max_size=1), st.lists(EDITS, max_size=1), st.sampled_from([0, 0, 0, 1, -1]))
def test_never_accepts_what_the_library_refuses(kinds, fields, edits, more):
    """A good header with one field replaced, one byte overwritten, or a byte of data too many or too few."""
    described, nbytes = laid_out(kinds)
    for (field, at, value), name in zip(fields, described, strict=False):
        replace(described[name], field, at, value)
    header = bytearray(json.dumps(described).encode())
    for at, byte in edits:
        header[at % len(header)] = byte
    data = bytes(max(0, nbytes + more))

    try:
        entries = parse_header(bytes(header), len(data), "x")
    except CheckpointError as exc:
        assert str(exc).startswith("x: ")  # noqa: PT017 - only the form of what is refused
        return

    theirs = {name: (DTYPES[info["dtype"]], len(info["data"])) for name, info in deserialized(bytes(header), data)}
    assert {each.name: (each.dtype, each.end - each.begin) for each in entries} == theirs


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(KINDS, st.integers(0, 9))
def test_accepts_every_good_file_the_library_accepts(kinds, padding):
    kinds = [kind for kind in kinds if kind[0] in TORCH]
    described, nbytes = laid_out(kinds)
    header = json.dumps(described).encode() + b" " * padding

    entries = parse_header(header, nbytes, "x")

    assert library_accepts(header, bytes(nbytes))
    assert {each.name: list(each.shape) for each in entries} == {name: d["shape"] for name, d in described.items()}


def laid_out(kinds):
    """A header whose tensors lie one after the other, and the bytes of their data."""
    described, begin = {}, 0
    for at, (dtype, shape) in enumerate(kinds):
        nbytes = SIZES.get(dtype, 0) * math.prod(shape)
        described[f"t{at}"] = entry(dtype, tuple(shape), begin, begin + nbytes)
        begin += nbytes
    return described, begin


def replace(info, field, at, value):
    """Set a whole field, or one number in it."""
    if isinstance(info.get(field), list) and at < len(info[field]):
        info[field][at] = value
    else:
        info[field] = value


def deserialized(header: bytes, data: bytes):
    return deserialize(len(header).to_bytes(8, "little") + header + data)


def library_accepts(header: bytes, data: bytes) -> bool:
    try:
        deserialized(header, data)
    except SafetensorError:
        return False
    return True
