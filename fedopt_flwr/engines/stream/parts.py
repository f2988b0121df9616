"""Reading a peer's message, however many parts it says it has."""

from __future__ import annotations

from typing import Any, TypeVar

from ...errors import MessageError
from ...problems import foreign_text

MOST_PARTS = 4096  # fields of a message at all depths; ours have a few, and some for each metric
_LONGEST_VARINT = 10  # bytes
_LARGEST_TAG = 2**32 - 1
_Message = TypeVar("_Message")


def parse(data: bytes, kind: type[_Message]) -> _Message:
    """Parse what a peer sent; MessageError if it cannot be read.

    Parts are counted before they are parsed: one of two bytes takes 25 times as much memory.
    """
    reader: Any = kind  # the code that protoc made has no types
    try:
        _count(memoryview(data), reader.DESCRIPTOR, 0)
        parsed: _Message = reader.FromString(data)
        return parsed
    except Exception as error:  # many kinds, MemoryError and RecursionError among them
        raise MessageError(f"{type(error).__name__}: {foreign_text(error)}") from error


def _count(data: memoryview, kind: Any, parts: int) -> int:
    """Add the parts of one message, known by its descriptor, to those counted so far.

    Where data end too early this ends too: the parser then refuses them at the same place.
    """
    at = 0
    while at < len(data):
        parts += 1
        if parts > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS} parts")
        tag, at = _varint(data, at)
        if tag > _LARGEST_TAG:
            raise ValueError(f"it has a field of number {tag >> 3}")
        wire_type = tag & 7
        size = {1: 8, 5: 4}.get(wire_type, 0)
        if wire_type in (3, 4):
            raise ValueError("it has a group, which no message of Flower has")
        if wire_type in (0, 2):
            number, at = _varint(data, at)
            size = number if wire_type == 2 else 0
        field = kind.fields_by_number.get(tag >> 3)
        if wire_type == 2 and field is not None and field.message_type is not None:
            parts = _count(data[at : at + size], field.message_type, parts)
        at += size
    return parts


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and the place after it; 0 where the data end within it."""
    number = 0
    for index, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    if at + _LONGEST_VARINT <= len(data):
        raise ValueError("it has a number of more than 64 bits")
    return 0, len(data)
