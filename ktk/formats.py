"""Names of formats."""

from __future__ import annotations

import copyreg
import re
from typing import Any

from ktk._core import Format

#: Elements that are floats as they are.
FLOATS = ("f32", "f16", "bf16")
#: What torch calls the dtypes of elements of floats; `dtypes` has them themselves.
TORCH_NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "ue8m0": "float8_e8m0fnu",
}
# What str() of a Format gives.
_SENTENCE = re.compile(
    r"([\w:]+) with (\w+) scales(?: and (\w+) zero points)? per (\d+|n) x (\d+|k)"
)
_GROUP = re.compile(r"(?P<row>row)|g(?P<columns>\d+)|(?P<n>\d+|n)x(?P<k>\d+|k)")
# Of rows and columns, what the core counts to.
_MOST = 2**32 - 1
_USUAL_SCALE = {"e2m1": "ue8m0", "u4": "bf16", "i4": "bf16"}


def _reduced(fmt: Format) -> tuple[type[Format], tuple[str, str, str, int, int]]:
    """Say what a format is made of again, for pickle and copy."""
    return Format, (fmt.element, fmt.scale, fmt.zero, fmt.group_n, fmt.group_k)


copyreg.pickle(Format, _reduced)


def label(fmt: Format) -> str:
    """Return a short name: ``bf16``, ``u4-bf16-g32``, ``u4-f16-zero-u8-g128``, ``e4m3-f32-row``."""
    if fmt.scale == "none":
        return fmt.element
    words = [fmt.element, fmt.scale]
    if fmt.zero != "none":
        words += ["zero", fmt.zero]
    if fmt.group_n == 1:
        words.append(f"g{fmt.group_k}" if fmt.group_k else "row")
    else:
        words.append(f"{fmt.group_n or 'n'}x{fmt.group_k or 'k'}")
    return "-".join(words)


def format_named(text: str | Format) -> Format:
    """Return the format of a name.

    Parameters
    ----------
    text : str or Format
        What `label` or str() gives; words may be divided by blanks, and the scale left out where it
        is the usual one: f32 of 8-bit elements, bf16 of 4-bit integers, ue8m0 of e2m1.

    Raises
    ------
    ValueError
        No format has this name.
    """
    if isinstance(text, Format):
        return text
    try:
        sentence = _SENTENCE.fullmatch(text)
        if sentence is not None:
            element, scale, zero, n, k = sentence.groups()
            return Format(element, scale, zero or "none", _extent(n), _extent(k))
        element, *words = re.split(r"[-\s]+", text.strip())
        return _of_words(element, words) if words else Format(element)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not the name of a format ({error}); names are such as bf16, i8-f32-row, "
            "u4-bf16-g32, u4-f16-zero-u8-g128, e4m3-f32-128x128, e4m3-ue8m0-g32 and q4_k"
        ) from None


def formats_named(name: str, formats: Any) -> Any:
    """Return a format, or a list of them, of what may be names; Nones stay.

    Raises
    ------
    TypeError
        With the argument's name, for what is neither.
    ValueError
        No format has this name.
    """
    if isinstance(formats, (list, tuple)):
        return [formats_named(name, one) for one in formats]
    if formats is None or isinstance(formats, (str, Format)):
        return None if formats is None else format_named(formats)
    raise TypeError(f"{name} must be a Format, its name or a list of such, got {formats!r}")


def formats_of_parts(name: str, formats: Any) -> Any:
    """Return a format for gate, up and down, or a tuple with one for each, of what may be names.

    Raises
    ------
    TypeError, ValueError
        As `formats_named`, or for a list of another length.
    """
    found = formats_named(name, formats)
    if not isinstance(found, list):
        return found
    if len(found) != 3:
        raise ValueError(
            f"{name} must be one format, or three, for gate, up and down, got {len(found)}"
        )
    return tuple(found)


def _of_words(element: str, words: list[str]) -> Format:
    *words, last = words
    group = _GROUP.fullmatch(last)
    if group is None:
        raise ValueError(f"{last!r} is no group: row, g and columns, or rows x columns")
    zero = "none"
    if "zero" in words:
        at = words.index("zero")
        if at + 1 == len(words):
            raise ValueError("zero is followed by an element, as in zero-u8")
        zero = words[at + 1]
        del words[at : at + 2]
    if len(words) > 1:
        raise ValueError(f"{words[1]!r} is one word too many")
    scale = words[0] if words else _USUAL_SCALE.get(element, "f32")
    if group["n"]:
        return Format(element, scale, zero, _extent(group["n"]), _extent(group["k"]))
    return Format(element, scale, zero, 1, _extent(group["columns"] or "k"))


def _extent(text: str) -> int:
    """Return rows or columns of a group; 0 for a letter, which means all of them."""
    if not text.isdigit():
        return 0
    # Python makes no integer of thousands of digits.
    if len(text) > len(str(_MOST)) or int(text) > _MOST:
        raise ValueError(f"a group has at most {_MOST} rows and columns")
    return int(text)


def is_blocks(fmt: Format) -> bool:
    """Whether a format is blocks of ggml: of others, two columns at most share bytes."""
    columns, _ = fmt.block
    # A type that the core does not know keeps its number for a name.
    return columns > 2 or fmt.element.startswith("ggml:")
