"""JSON from outside, read so that no two programs can understand it differently.

The reference library and msgspec keep the last of two equal keys; others keep the first. A header that
names a tensor twice would load as two different models, so it is refused. msgspec cannot report duplicates,
which is why the standard library parses here (10 MB, 90,000 tensors: 0.3 s).
"""

from __future__ import annotations

import json
from typing import NoReturn


class NotStrictJson(ValueError):
    """The text is no JSON object, or one that could be understood in two ways. Says where."""


def parse_object(data: bytes) -> dict[str, object]:
    """The object in `data`: UTF-8, starting with `{`, then nothing but white space.

    Raises:
        NotStrictJson: anything else, a key that occurs twice in one object, NaN or Infinity, half a
            surrogate pair, or nesting beyond what the interpreter's stack takes.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise NotStrictJson(f"no valid UTF-8 at byte {exc.start}") from exc
    if not text.startswith("{"):
        raise NotStrictJson(f"it starts with {text[:8]!r}, not with '{{'")
    try:
        value: dict[str, object] = json.loads(
            text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=_no_constant
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise NotStrictJson("a name holds half a surrogate pair") from exc
    except RecursionError as exc:
        raise NotStrictJson("nested too deeply") from exc
    except ValueError as exc:  # JSONDecodeError, an integer of thousands of digits, and our own
        raise NotStrictJson(str(exc)) from exc
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # add() is None on purpose
        raise NotStrictJson(f"{again!r:.200} occurs twice")
    return found


def _integer(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)  # serde reads -0 as a float, so the library refuses it as a size


def _no_constant(text: str) -> NoReturn:
    raise NotStrictJson(f"{text} is no JSON")
