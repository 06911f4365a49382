"""Registry URLs as people may see them: without their passwords."""

from __future__ import annotations

import re

_SECRET_OPTION = re.compile(r"(?i)([?&][^=&#]*password=)[^&#]*")
_PLACE = re.compile(r"(\[[0-9a-fA-F:.%]*\]|[^:\[\]@]*)(:[0-9]*)?")


def redact(url: str) -> str:
    """The URL with `***` where it has a password, in the user part or in an option.

    Nothing is kept of a URL with an `@` or a port that cannot be: an unescaped `/` or `@` in a password
    makes such URLs.
    """
    scheme, mark, rest = url.partition("://")
    if scheme.lower() == "file" or not (mark or "@" in url):
        return url
    hidden = f"{scheme}://***" if mark and re.fullmatch(r"[\w+.-]+", scheme) else "***"
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(authority) :]
    user, at, place = authority.rpartition("@")
    if not mark or "@" in tail or not url.isprintable() or _PLACE.fullmatch(place) is None:
        return hidden
    name, colon, _ = user.partition(":")
    return f"{scheme}://{name}{':***' if colon else ''}{at}{place}" + _SECRET_OPTION.sub(r"\1***", tail)
