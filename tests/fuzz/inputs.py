"""How hostile inputs are made: something valid, and then a little wrong; or any bytes at all.

`FUZZ_EXAMPLES` is the number of inputs for each target (200 where it is not set). Without it the inputs are the same
in every run, so that no unrelated change fails by chance; with it they are new ones.
"""

import os
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_T = TypeVar("_T")

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


_INTEGERS = (
    *(0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 65, -1, -2),
    *(1 << 31, 1 << 32, 1 << 47, 1 << 48, (1 << 48) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *(-(1 << 31), -(1 << 63)),
)
_TEXTS = (
    *("", "a", "w", "cpu", "cuda", "cuda:0", "cuda:99999", "meta", "float32", "uint8", "F32", "..", "../x", "/"),
    *("a\0b", "line\nbreak", "\x1b[31m", "\u202ereversed", "x" * 5000, "\u2028", "\ud7ff", "NaN", "1e400", "\u0663"),
)
_OTHERS = (None, True, False, 0.5, -0.0, float("nan"), float("inf"), b"", b"\0" * 100)
_PIECES = (b"\0", b"\xff", b"\xdd", b"\xdf", b"\xc6", b"\x91", b"\x7f\xff\xff\xff", b'"', b"{", b"[")

# One choice of bytes is what Hypothesis makes fastest. So everything here is read out of words of this length; what a
# word means is worked out below, and all of it is a matter of the word alone.
_WORD_NBYTES = 12
_WORDS = st.binary(min_size=_WORD_NBYTES, max_size=_WORD_NBYTES)


def _integer(word: bytes) -> int:
    """A border of something, or a number between -9 and 99."""
    return _one_of(_INTEGERS, word) if word[0] % 2 else word[1] % 109 - 9


def _text(word: bytes) -> str:
    """A text that means something somewhere, or up to eight letters."""
    if word[0] % 2:
        return _one_of(_TEXTS, word)
    letters = word[3 : 3 + word[1] % 9]
    return letters.decode("utf-16-le", errors="replace") if word[2] % 2 else letters.decode("latin-1")


def _odd(word: bytes) -> object:
    """A value of any kind."""
    rest = word[1:]
    match word[0] % 7:
        case 0:
            return _integer(rest)
        case 1:
            return _text(rest)
        case 2:
            return _one_of(_OTHERS, rest)
        case 3:
            return [_integer(rest[at:]) for at in range(rest[9] % 5)]
        case 4:
            return [1] * (1 + rest[0] % 200)
        case 5:
            return {} if rest[0] % 2 else [[]]
        case _:
            return [(1 << 63) - 1] * (1 + rest[0] % 200) + [0]


def _one_of(values: Sequence[_T], word: bytes) -> _T:
    return values[word[1] % len(values)]


INTEGERS = _WORDS.map(_integer)
TEXTS = _WORDS.map(_text)
ODD = _WORDS.map(_odd)


def bytes_near(valid: bytes) -> st.SearchStrategy[bytes]:
    """These bytes, damaged in one to three places."""
    return st.binary(min_size=_WORD_NBYTES, max_size=3 * _WORD_NBYTES).map(lambda words: _damaged(valid, words))


def anything_near(valid: bytes) -> st.SearchStrategy[bytes]:
    """The same, the bytes themselves, or any at all."""
    return st.one_of(bytes_near(valid), bytes_near(valid), st.just(valid), st.binary(max_size=200))


def values_near(valid: object) -> st.SearchStrategy[object]:
    """A value as JSON or msgpack would give it, with up to two places in it replaced, removed or doubled.

    `valid` is not changed. Structs are taken as the maps and lists that they are encoded as.
    """
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(valid))
    places = tuple(_places(plain))
    steps = st.binary(min_size=_STEPS_NBYTES, max_size=_STEPS_NBYTES)
    return steps.map(lambda data: _edited(plain, list(_steps(places, data))))


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


_HARMS = ("overwrite", "overwrite", "insert", "remove", "repeat", "cut", "length")


def _damaged(valid: bytes, words: bytes) -> bytes:
    """Overwrite, insert, remove, repeat, cut, and lengths that lie: one for each word, the last may be cut."""
    data = bytearray(valid)
    for start in range(0, len(words), _WORD_NBYTES):
        word = words[start : start + _WORD_NBYTES].ljust(_WORD_NBYTES, b"\0")
        at = int.from_bytes(word[1:4], "little") % (len(data) + 1)
        length = 1 + word[4] % 40
        new = _one_of(_PIECES, word[5:]) if word[5] % 2 else word[-1 - word[6] % 6 :]
        match _HARMS[word[0] % len(_HARMS)]:
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


_STEP_NBYTES = 3 + _WORD_NBYTES
_STEPS_NBYTES = 1 + 2 * _STEP_NBYTES
_CHANGES = ("alike", "alike", "alike", "alike", "alike", "replace", "remove", "double")


def _steps(places: Sequence[_Place], data: bytes) -> Iterator[tuple[_Place, str, _New]]:
    """None to two changes: where, what, and a new value of any kind or of the kind of what it replaces."""
    for number in range((0, 1, 1, 1, 2, 2)[data[0] % 6]):
        step = data[1 + number * _STEP_NBYTES :][:_STEP_NBYTES]
        place = places[int.from_bytes(step[:2], "little") % len(places)]
        word = step[3:]
        yield place, _CHANGES[step[2] % len(_CHANGES)], (_odd(word), _integer(word), _text(word))


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
