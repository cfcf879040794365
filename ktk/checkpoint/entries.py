"""Takes apart JSON that somebody else wrote: every value has the type and range it must have.

Messages begin with the entry's name. Whoever knows the file puts its name before them.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# The largest extent that `MoE` takes.
LARGEST = 1 << 24
# The most bytes of JSON that are read: what safetensors allows for a header.
MOST_JSON = 100_000_000
# Characters of a name that a message shows.
_MOST_SHOWN = 300
# Halves of characters beyond 16 bits. On its own, one can be neither printed nor in a file's name.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class EntryError(ValueError):
    """A document is not what it should be."""


def parse_object(data: bytes) -> dict[str, Any]:
    """Read a JSON object in UTF-8."""
    try:
        text = data.decode("utf-8")
        document = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise EntryError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise EntryError(f"it is no JSON: {error}") from error
    return table("it", document)


def object_bytes(document: dict[str, Any]) -> bytes:
    """Return an object as `parse_object` reads it.

    Names of files may be no text; what is not becomes question marks.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "replace")


def integer(name: str, value: Any, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, value, f"an integer from {least} to {most}")
    return value


def number(name: str, value: Any) -> float:
    """Return a finite number."""
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise _wrong(name, value, "a number")
    return found


def text(name: str, value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def items(name: str, value: Any, count: int | None = None) -> list[Any]:
    """Return a list, of `count` items if that is given."""
    if not isinstance(value, list) or count not in (None, len(value)):
        raise _wrong(name, value, "a list" if count is None else f"a list of {count}")
    return value


def integers(
    name: str, value: Any, count: int | None = None, least: int = 0, most: int = LARGEST
) -> tuple[int, ...]:
    """Return a list of integers, each from `least` to `most`."""
    listed = items(name, value, count)
    for one in listed:
        if type(one) is not int or not least <= one <= most:  # headers have many thousands
            integer(f"an item of {name}", one, least, most)
    return tuple(listed)


def table(name: str, value: Any) -> dict[str, Any]:
    """Return an object."""
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    return value


def printable(name: str) -> str:
    """Return a name that came from a file, or its beginning, for a message of one line."""
    begin = name[:_MOST_SHOWN]
    shown = begin if begin.isprintable() else ascii(begin)
    return shown if len(name) <= _MOST_SHOWN else f"{shown}... ({len(name)} characters)"


def _wrong(name: str, value: Any, expected: str) -> EntryError:
    name = printable(name)
    try:
        shown = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        shown = "a huge number"
    if len(shown) > 80:
        shown = f"{shown[:60]}... ({type(value).__name__})"
    return EntryError(f"{name} is {shown}, expected {expected}")
