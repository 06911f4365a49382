"""Registry URLs as people may see them: without their passwords."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_SECRET_OPTION = re.compile(r"(?i)([?&][^=&#]*password=)[^&#]*")


def redact(url: str) -> str:
    """The URL with `***` where it has a password, in the user part or in an option.

    Nothing is kept of a URL that cannot be parsed: a password with an unescaped `/` or `@` makes such URLs.
    """
    scheme, mark, _ = url.partition("://")
    if scheme.lower() == "file":
        return url
    hidden = f"{scheme}://***" if mark and scheme.replace("+", "").isalnum() else "***"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return hidden
    if "@" in parts.path + parts.query + parts.fragment:
        return hidden
    user, at, place = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    shown = parts._replace(netloc=name + (":***" if colon else "") + at + place).geturl()
    return _SECRET_OPTION.sub(r"\1***", shown)
