"""What storing values in a format may change: its resolution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktk.testing import bounds, ggml
from ktk.testing.bounds import Array
from ktk.testing.elements import ELEMENTS, Float, Format, Integer, is_known, per_group

#: Elements with few levels: what chooses a scale for them may trade single values for their group.
COARSE_BITS = 4


def has_resolution(fmt: Format) -> bool:
    """Whether `codec_bound` knows the format: how values become ggml's blocks is free."""
    return is_known(fmt) and not ggml.is_block(fmt.element)


def _unit(name: str) -> float:
    """Relative error of a rounding to an element that may be an integer, which has none."""
    element = ELEMENTS[name]
    return element.unit if isinstance(element, Float) else 0.0


def codec_bound(fmt: Format, size: Array, up_to: bool = False) -> Array:
    """Bound for what storing values of this size in the format may change.

    Half a step of the element, plus what rounding the scale and dividing by it add.

    Parameters
    ----------
    fmt : Format
        The format that is stored.
    size : array of shape (n, k)
        Magnitudes of the values.
    up_to : bool
        The sizes are only upper bounds of the magnitudes.

    Returns
    -------
    array of shape (n, k)
    """
    element = ELEMENTS[fmt.element]
    if fmt.scale == "none":
        if isinstance(element, Float):
            return element.rounding(size, up_to)
        return np.where(size > element.levels, np.inf, 0.5)

    top = per_group(fmt, size, np.maximum)
    # Relative error of the scale itself, and by how much it may exceed the ideal one.
    if fmt.scale == "ue8m0":
        scale_unit, scale_tiny, growth = 0.0, 2.0**-127, 2.0
    else:
        scale_type = ELEMENTS[fmt.scale]
        assert isinstance(scale_type, Float)
        scale_unit, scale_tiny, growth = scale_type.unit, scale_type.tiny, 1.0
    slack = scale_unit + 4 * bounds.UNIT
    if isinstance(element, Integer):
        # With zero points the range is at most twice the largest magnitude, in all the codes. What
        # a rounded scale shifts adds up from one end of the codes in use to the other, and so
        # does what rounds a zero point, which is one of the codes or lies between two.
        span = element.highest - element.lowest
        levels, reach = float(element.levels), element.levels
        if fmt.zero != "none":
            levels, reach = span / 2, span
            slack += _unit(fmt.zero)
        step = top / levels
        error = step * (growth / 2 + reach * slack)
        return np.asarray(error + reach * scale_tiny)
    # Floating point: the error grows with the value, down to half of the subnormal step.
    scale = growth * top / element.largest
    error = np.maximum(size * element.unit * growth, scale * element.tiny * element.unit)
    return np.asarray(error + size * slack + element.largest * scale_tiny)


def check_codec(stored: Format, given: Format, unpacked: npt.ArrayLike, values: Array) -> None:
    """Fail where storing weights lost more than the stored format explains.

    Half a step for each value, if the backend takes the scale from the largest magnitude. With four
    bits it does better to search the scale of the least squared error: that scale may cut off the
    largest value to make the steps finer for all others, so no bound on a single value remains. One
    for the group does: the scale of the largest magnitude is one that the search may choose, so the
    squared error of its best is at most

        sum over the group of (half a step of the largest magnitude) ** 2.

    Rounding to that scale keeps this bound too, value by value, so it holds either way; and a scale
    that belongs to another extent than the declared group breaks it.

    Parameters
    ----------
    stored, given : Format
        What the backend stores, and what it was given. Where they are the same there is nothing to
        choose.
    unpacked, values : array of shape (n, k)
        What came back, and the numbers that were given.
    """
    bound = codec_bound(stored, np.abs(values))
    chosen = stored != given and stored.scale != "none"
    if not chosen or ELEMENTS[stored.element].bits > COARSE_BITS:
        bounds.check(unpacked, values, bound, "unpacked weight")
        return
    with np.errstate(invalid="ignore", over="ignore"):
        error = group_norm(stored, np.asarray(unpacked, np.float64) - values)
        allowed = group_norm(stored, bound)
    bounds.check(error, 0.0, allowed, "norm of a group's error")


def group_norm(fmt: Format, values: Array) -> Array:
    """L2 norm of each group, spread over the group; of any size that float64 holds."""
    top = per_group(fmt, np.abs(values), np.maximum)
    size = np.where((top > 0) & np.isfinite(top), top, 1.0)
    norm = size * np.sqrt(per_group(fmt, (values / size) ** 2, np.add))
    return np.where(np.isfinite(top), norm, top)
