"""How hostile inputs are made: something valid, and then a little wrong; or any bytes at all.

`FUZZ_EXAMPLES` is the number of inputs for each target (200 where it is not set). Without it the inputs are the same
in every run, so that no unrelated change fails by chance; with it they are new ones.
"""

import os
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_DEFAULT_EXAMPLES = 200
_EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "")

fuzzed = settings(
    max_examples=int(_EXAMPLES or _DEFAULT_EXAMPLES),
    derandomize=not _EXAMPLES,
    deadline=None,
    database=None,
    print_blob=bool(_EXAMPLES),
    suppress_health_check=list(HealthCheck),
)


@contextmanager
def allocates_less_than(nbytes: int) -> Iterator[None]:
    """Whatever the block ends with, a return too: Python's peak in it was below this."""
    tracemalloc.start()
    try:
        yield
    finally:
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_nbytes < nbytes


BORDERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    63,
    64,
    65,
    1 << 31,
    1 << 32,
    1 << 47,
    1 << 48,
    (1 << 48) + 1,
    1 << 62,
    (1 << 63) - 1,
]
INTEGERS = st.sampled_from([*BORDERS, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 31), -(1 << 63)]) | st.integers(-9, 99)
TEXTS = st.sampled_from(
    ["", "a", "w", "cpu", "cuda", "cuda:0", "cuda:99999", "meta", "float32", "uint8", "F32", "..", "../x", "/", "a\0b",
     "line\nbreak", "\x1b[31m", "\u202ereversed", "x" * 5000, "\u2028", "\ud7ff", "NaN", "1e400", "\u0663"]
) | st.text(max_size=8)  # fmt: skip
ODD = st.one_of(
    INTEGERS,
    TEXTS,
    st.sampled_from([None, True, False, 0.5, -0.0, float("nan"), float("inf"), b"", b"\0" * 100, [], {}, [[]]]),
    st.lists(INTEGERS, max_size=4),
    st.integers(1, 200).map(lambda n: [1] * n),
    st.integers(1, 200).map(lambda n: [(1 << 63) - 1] * n + [0]),
)

# What is done to the bytes of something valid: overwrite, insert, remove, repeat, cut, and lengths that lie.
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["overwrite", "overwrite", "insert", "remove", "repeat", "cut", "length"]),
        st.integers(0, 1 << 16),
        st.integers(1, 40),
        st.sampled_from([b"\0", b"\xff", b"\xdd", b"\xdf", b"\xc6", b"\x91", b"\x7f\xff\xff\xff", b'"', b"{", b"["])
        | st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=3,
)


def bytes_near(valid: bytes) -> st.SearchStrategy[bytes]:
    """These bytes, damaged in one to three places."""
    return _EDITS.map(lambda edits: _damaged(valid, edits))


def anything_near(valid: bytes) -> st.SearchStrategy[bytes]:
    """The same, the bytes themselves, or any at all."""
    return st.one_of(bytes_near(valid), bytes_near(valid), st.just(valid), st.binary(max_size=200))


def values_near(valid: object) -> st.SearchStrategy[object]:
    """A value as JSON or msgpack would give it, with up to two places in it replaced, removed or doubled.

    `valid` is not changed. Structs are taken as the maps and lists that they are encoded as.
    """
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(valid))
    step = st.tuples(
        st.sampled_from(list(_places(plain))),
        st.sampled_from(["alike", "alike", "alike", "alike", "alike", "replace", "remove", "double"]),
        st.tuples(ODD, INTEGERS, TEXTS),
    )
    return st.lists(step, max_size=2).map(lambda steps: _edited(plain, steps))


def packed_near(valid: object) -> st.SearchStrategy[bytes]:
    """msgpack of something near `valid`: its fields changed, or its bytes."""
    encoded = msgspec.msgpack.encode(valid)
    return st.one_of(values_near(valid).map(_packed), values_near(valid).map(_packed), anything_near(encoded))


def json_near(valid: object) -> st.SearchStrategy[bytes]:
    """JSON of something near `valid`: its fields changed, or its bytes."""
    return st.one_of(values_near(valid).map(_json), values_near(valid).map(_json), anything_near(_json(valid)))


def frame(data: bytes) -> bytes:
    """As messages travel to and from a memory service."""
    return struct.pack(">I", len(data)) + data


def _damaged(valid: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    data = bytearray(valid)
    for what, place, length, new in edits:
        at = place % (len(data) + 1)
        match what:
            case "overwrite":
                data[at : at + len(new)] = new
            case "insert":
                data[at:at] = new * (length if length > 35 else 1)
            case "remove":
                del data[at : at + length]
            case "repeat":
                data[at:at] = data[at : at + length]
            case "cut":
                del data[at:]
            case "length":
                width = 8 if length % 2 else 4
                data[at : at + width] = (1 << length).to_bytes(8, "little" if length % 3 else "big")[:width]
    return bytes(data)


_Place = tuple[object, ...]  # keys and list indices, from the outermost
_New = tuple[object, int, str]  # of any kind, or of the kind of what it replaces


def _places(value: object, above: _Place = ()) -> Iterator[_Place]:
    if not isinstance(value, list | dict):
        yield above
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*above, key)
        yield from _places(each, (*above, key))


def _edited(value: object, steps: list[tuple[_Place, str, _New]]) -> object:
    for place, what, new in steps:
        value = _edited_at(value, place, what, new)
    return value


def _edited_at(value: object, place: _Place, what: str, new: _New) -> object:
    if not place or not isinstance(value, list | dict):
        return _replaced(value, what, new)
    key, copy = place[0], value.copy()
    if key not in (copy if isinstance(copy, dict) else range(len(copy))):
        return copy  # an earlier step removed it
    if len(place) > 1 or what in ("alike", "replace"):
        copy[key] = _edited_at(copy[key], place[1:], what, new)
    elif what == "remove":
        del copy[key]
    elif isinstance(copy, list):
        copy.insert(key, copy[key])
    else:
        copy[f"{key}2"] = copy[key]
    return copy


def _replaced(value: object, what: str, new: _New) -> object:
    if what == "alike" and type(value) is int:
        return new[1]
    if what == "alike" and isinstance(value, str):
        return new[2]
    if what == "alike" and isinstance(value, list) and value:
        return value[::-1]
    return new[0]


def _packed(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, TypeError):
        return b"\xc0"


def _json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (OverflowError, ValueError, TypeError):  # keys that JSON has not
        return b"{}"
