"""Client ids as people write them: on the command line and in a certificate's common name."""

from __future__ import annotations

import re

from ..algorithm import ClientId

MAX_IDS = 100_000  # of one process or certificate
_NUMBERS = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")


def is_client_id(value: object) -> bool:
    """Whether a value is an id: an int of at least 0, or a name.

    By type, as a message may hold anything: True and 1.0 equal 1 and are none.
    """
    if type(value) is int:
        return 0 <= value < 10**18
    return type(value) is str and is_name(value)


def is_name(text: str) -> bool:
    """Whether a client can be called so: 1 to 64 printable characters that are not numbers."""
    return 0 < len(text) <= 64 and text.isprintable() and not _NUMBERS.fullmatch(text)


def parse_ids(text: str) -> list[ClientId]:
    """Read "7", "0-24", "1,3,8-9" or one name; ValueError says what is wrong."""
    if not _NUMBERS.fullmatch(text):
        if not is_name(text):
            raise ValueError(f"got {text!r}; must be a number, ranges such as 0-24, or a name")
        return [text]
    ids: list[ClientId] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if high and int(high) < int(low):
            raise ValueError(f"got {part!r}; a range must go upwards")
        if len(ids) + int(high or low) - int(low) >= MAX_IDS:
            raise ValueError(f"got {text!r}; must be at most {MAX_IDS} ids")
        ids += range(int(low), int(high or low) + 1)
    if len(set(ids)) < len(ids):
        raise ValueError(f"got {text!r}; an id occurs twice")
    return ids


def certificate_covers(common_name: str, client_id: ClientId) -> bool:
    """Whether a certificate of that common name speaks for a client."""
    try:
        return client_id in parse_ids(common_name)
    except ValueError:
        return False
