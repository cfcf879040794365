"""How much a correct float32 computation may lose.

The error of a quantized product has two independent sources, and the kit bounds them apart, so
that neither hides in the tolerance of the other: the codecs, from what the declared formats can
represent (``formats``), and the arithmetic, from the roundings of one dot product (here).
No number in this module is tuned: each one counts roundings.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Relative error of one rounding to float32, its smallest normal number, and its largest.
UNIT = 2.0**-24
TINY = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)

#: Roundings of a dot product that do not grow with its depth: the values that unpacking returns
#: (two), the conversion of an integer sum, its act scale, its weight scale, sums of partial sums.
EXTRA_ROUNDINGS = 8


def gamma(roundings: float, unit: float = UNIT) -> float:
    """Return Higham's gamma, the bound of that many successive roundings."""
    return roundings * unit / (1 - roundings * unit)


def relative_error(got: Array, expected: Array) -> float:
    """Return the L2 norm of the difference over that of `expected`."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def dot(act: Array, weight: Array, extra: int = 0, reach: Array | float = 0.0) -> Array:
    """Bound ``act @ weight.T`` computed in float32, in any order of summation.

    The second term allows what the bf16 instructions of CPUs do: operands and results below the
    smallest normal number may count as zero, at each of the steps and before the scale of either
    operand is applied.

    Parameters
    ----------
    act : array of shape (m, k)
        Activations as they are stored.
    weight : array of shape (n, k)
        Weights as they are stored.
    extra : int
        Further roundings, of a bias for example.
    reach : array of shape (n, k)
        Sizes of the parts of weights that are sums, where these are larger than the weights.

    Returns
    -------
    array of shape (m, n)
        Infinite where the sum of the sizes may leave the range of float32.
    """
    weight = np.maximum(np.abs(weight), reach)
    size = np.abs(act) @ weight.T
    steps = act.shape[1] + EXTRA_ROUNDINGS + extra
    reach = 1 + np.abs(act).sum(1)[:, np.newaxis] + weight.sum(1)[np.newaxis, :]
    bound: Array = gamma(steps) * size + steps * TINY * reach
    return np.where(size + bound < LARGEST / 2, bound, np.inf)


def check(actual: npt.ArrayLike, expected: npt.ArrayLike, bound: npt.ArrayLike, what: str) -> None:
    """Fail with the worst element where ``|actual - expected|`` exceeds ``bound``."""
    got, want, allowed = np.broadcast_arrays(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        np.asarray(bound, np.float64),
    )
    if got.size == 0:
        return
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
        # A NaN is no error that a bound could allow, unless nothing is promised.
        excess = np.where(np.isinf(allowed) | (got == want), -np.inf, error - allowed)
    excess = np.where(np.isnan(excess), np.inf, excess)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    assert excess[worst] <= 0, (
        f"{what}: {got[worst]:.9g} at {tuple(map(int, worst))} is {error[worst]:.3g} away from"
        f" {want[worst]:.9g}; {allowed[worst]:.3g} is allowed"
    )


def check_same_bits(actual: npt.ArrayLike, expected: npt.ArrayLike, what: str) -> None:
    """Fail where two arrays differ in any bit; one NaN is as good as another."""
    got, want = np.asarray(actual), np.asarray(expected)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    if got.size == 0:
        return
    as_int = np.dtype(f"i{got.dtype.itemsize}")
    differs = np.ascontiguousarray(got).view(as_int) != np.ascontiguousarray(want).view(as_int)
    if got.dtype.kind == "f":
        differs &= ~(np.isnan(got) & np.isnan(want))
    where = np.argwhere(differs)
    assert len(where) == 0, (
        f"{what}: {len(where)} of {got.size} elements differ, the first at"
        f" {tuple(map(int, where[0]))}: {got[tuple(where[0])]!r} instead of"
        f" {want[tuple(where[0])]!r}"
    )
