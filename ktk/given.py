"""What the arrays of a weight matrix hold: told by dtypes and by the shapes of scales, or said."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktk._core import Format
from ktk.arrays import Array, is_tensor, readable
from ktk.expert import Expert, Matrix
from ktk.formats import FLOATS, TORCH_NAMES, format_named, label

_Named = Format | str | None
#: What somebody says that arrays hold: a format or its name for gate, up and down, or for each one.
GivenFormats = Format | str | tuple[_Named, _Named, _Named]

#: Elements of the dtypes of torch; a byte may hold many things, and tells none.
_WIDE = {**{TORCH_NAMES[element]: element for element in FLOATS}, "int8": "i8"}
_SMALL = {
    **{name: element for element, name in TORCH_NAMES.items() if element not in FLOATS},
    "float4_e2m1fn_x2": "e2m1",
}
# What scales and zero points in bytes are.
_BYTES = ("u8", "ue8m0", "e4m3")


def formats_of(given: Any) -> tuple[Format | None, Format | None, Format | None]:
    """Return the formats of gate, up and down that an argument `given` means."""
    each = given if isinstance(given, tuple) else (given,) * 3
    if len(each) != 3 or not all(one is None or isinstance(one, (str, Format)) for one in each):
        raise TypeError(f"given must be a Format, or a tuple of one for each matrix, got {given!r}")
    gate, up, down = (None if one is None else format_named(one) for one in each)
    return gate, up, down


def experts_of_slots(
    stacks: Mapping[str, Any], slots: int, order: Sequence[int] | Array | None
) -> list[int]:
    """Return the expert of stacked arrays that each slot of a layer is filled with.

    Parameters
    ----------
    stacks : mapping of names to arrays or sequences
        Each with an entry for each expert.
    slots : int
        Experts of the layer.
    order : sequence of int, optional
        The argument `physical_to_logical_map`.

    Raises
    ------
    TypeError, ValueError
        The stacks, or the map, are none, or their lengths do not go together.
    """
    for name, stack in stacks.items():
        if not hasattr(stack, "__len__"):
            raise TypeError(f"{name} must have an entry for each expert, got {stack!r}")
    first = next(iter(stacks))
    count = len(stacks[first])
    for name, stack in stacks.items():
        if len(stack) != count:
            raise ValueError(f"{name} has {len(stack)} experts, {first} has {count}")
    if order is None:
        if count != slots:
            raise ValueError(f"{first} has {count} experts, expected {slots}")
        return list(range(slots))
    if not hasattr(order, "__len__"):
        raise TypeError(f"physical_to_logical_map must be a sequence of ints, got {order!r}")
    if len(order) != slots:
        raise ValueError(f"physical_to_logical_map has {len(order)} entries, expected {slots}")
    for expert in (experts := [_whole(expert) for expert in order]):
        if not 0 <= expert < count:
            raise ValueError(f"physical_to_logical_map names expert {expert} of {count}")
    return experts


def _whole(expert: Any) -> int:
    try:
        return operator.index(expert)
    except TypeError:
        raise TypeError(
            f"physical_to_logical_map must be a sequence of ints, got {expert!r} in it"
        ) from None


def expert_of(
    arguments: Mapping[str, tuple[Any, Any, Any, Any, Any]],
    given: GivenFormats | None,
    parts: Sequence[str],
) -> Expert:
    """Return the expert that the arguments of `MoE.load_expert` mean.

    Parameters
    ----------
    arguments : mapping of str to tuple
        For gate, up and down: what that argument is, its scale, zero points, bias and factor. An
        `Expert` for gate is all there is.
    given : Format, its name, or tuple of three, optional
        What the arrays hold, if somebody said it.
    parts : sequence of str
        The matrices that experts of the layer have.

    Raises
    ------
    TypeError
        A matrix is missing, or there is more beside an expert, or there is a gate too many.
    ValueError
        Something is said twice.
    """
    (expert, *beside), up, down = arguments.values()
    if isinstance(expert, Expert):
        if given is not None or any(one is not None for one in (*beside, *up, *down)):
            raise TypeError("an Expert has all that belongs to it: give nothing else")
        check_gate("gate" in parts, expert.gate is not None)
        return expert
    check_gate("gate" in parts, any(one is not None for one in arguments["gate"]))
    found = {}
    for (name, (data, *more)), fmt in zip(arguments.items(), formats_of(given), strict=True):
        if name not in parts:
            continue
        if data is None:
            given_by = "gate, up and down" if "gate" in parts else "up and down"
            raise TypeError(f"{name} is missing: give {given_by}, or an Expert")
        scale, zero, bias, factor = more
        found[name] = matrix_of(name, data, scale, zero, bias, factor, fmt)
    return Expert(**found)


def check_gate(wanted: bool, given: bool) -> None:
    """Raise a TypeError unless a gate is given just where the experts of a layer have one."""
    if given and not wanted:
        raise TypeError("the experts of this layer have no gate (gated=False): gate must be None")
    if wanted and not given:
        raise TypeError(
            "gate is missing, and the experts of this layer have one: those without are of a layer "
            "with gated=False"
        )


def matrix_of(
    name: str,
    data: Array | Matrix,
    scale: Array | None,
    zero: Array | None,
    bias: Array | None,
    factor: Array | None,
    given: Format | None,
) -> Matrix:
    """Put together what the arguments of a matrix say; a `Matrix` brings what belongs to it."""
    if not isinstance(data, Matrix):
        return Matrix(given, data, scale, zero, bias, factor)
    kind = type(data).__name__
    if scale is not None or zero is not None or factor is not None:
        raise ValueError(f"{name} is {kind} and has its scales: {name}_scale is too much")
    if given is not None and given != data.format:
        raise ValueError(f"{name} is {kind} in {data.format}, but given says {given}")
    if bias is None:
        return data
    if data.bias is not None:
        raise ValueError(f"{name} is {kind} and has its bias: {name}_bias is too much")
    return replace(data, bias=bias)


def read_matrix(name: str, matrix: Matrix, backend: str, accepts: Sequence[Format]) -> Matrix:
    """Make a matrix of arrays ready for the core, without a copy where their rows are contiguous.

    Parameters
    ----------
    name : str
        Of the argument, for messages.
    matrix : Matrix
        Its format may be missing: then the dtypes tell.
    backend : str
        Name of the backend, for messages.
    accepts : sequence of Format
        What it takes, the preferred ones first: where the dtypes say the elements, that format of
        these is found whose groups are as many as there are scales.

    Raises
    ------
    TypeError
        ktk does not know the elements.
    ValueError
        No format of `accepts` fits, or several do; or the format contradicts the arrays.
    """
    data, scale, zero, given = matrix.data, matrix.scale, matrix.zero, matrix.format
    element = element_of(name, data)
    small = element in _SMALL.values()
    if given is None:
        if small or (element and scale is not None):
            given = _find(name, data, element, scale, zero, backend, accepts, must=small)
        elif _dtype(data) == "uint8" and not any(fmt.element == "u8" for fmt in accepts):
            raise ValueError(
                f"{name} is uint8, which may be 8-bit floats, pairs of 4-bit codes or blocks: say "
                f"what by given=, as in given={_example(accepts)!r}; {backend} takes "
                f"{_listed(accepts)}"
            )
    elif small and element != given.element:
        raise ValueError(f"{name} holds {element}, but given says {given}")
    return Matrix(
        given,
        _prepared(name, data),
        _prepared(f"{name}_scale", scale),
        _prepared(f"{name}_zero", zero),
        _prepared(f"{name}_bias", matrix.bias),
        _prepared(f"{name}_factor", matrix.factor),
        _prepared(f"{name}_order", matrix.order),
    )


def _prepared(name: str, array: Array) -> Array:
    """Return what the core reads: small floats as bytes, and the elements of a row side by side."""
    if array is None:
        return None
    if is_tensor(array):
        if element_of(name, array) in _SMALL.values():
            array = array.view(sys.modules["torch"].uint8)
        strided = array.layout == sys.modules["torch"].strided
        if strided and array.ndim and array.shape[-1] > 1 and array.stride(-1) != 1:
            array = array.contiguous()
        return readable(name, array)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(array, numpy.ndarray) or not array.ndim:
        return array
    ordered = array.shape[-1] < 2 or array.strides[-1] == array.itemsize
    return array if ordered and min(array.strides) >= 0 else numpy.ascontiguousarray(array)


def element_of(name: str, array: Array) -> str | None:
    """Return the element that an array's dtype tells; None for bytes, and for what is no array."""
    dtype = _dtype(array)
    if dtype.startswith(("float8", "float4")) and dtype not in _SMALL:
        raise TypeError(
            f"{name} has dtype {dtype}; of such small floats ktk reads {', '.join(_SMALL)}"
        )
    return _SMALL.get(dtype) or _WIDE.get(dtype)


def _find(
    name: str,
    data: Array,
    element: str | None,
    scale: Array | None,
    zero: Array | None,
    backend: str,
    accepts: Sequence[Format],
    *,
    must: bool,
) -> Format | None:
    """Return the accepted format that dtypes and shapes fit; None if none does, or an error."""
    mine = [fmt for fmt in accepts if fmt.element == element]
    if len(data.shape) != 2:
        return mine[0] if must and mine else None  # the core says which shape it wants
    n, k = data.shape[0], data.shape[1] * (2 if element == "e2m1" else 1)
    fitting: list[Format] = []
    for fmt in mine:
        fits = all(
            _holds(f"{name}_{what}", array, wanted, fmt.groups(n, k))
            for what, array, wanted in (("scale", scale, fmt.scale), ("zero", zero, fmt.zero))
        )
        if fits and not any(fmt.same_as(other, n, k) for other in fitting):
            fitting.append(fmt)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(
            f"{name}: scales {_described(scale)} of a matrix {[n, k]} may mean "
            f"{' or '.join(map(str, fitting))}; say which by given="
        )
    if not must:
        return None
    if not mine:
        raise ValueError(
            f"{backend} does not take {element} for {name}; it takes {_listed(accepts)}. "
            "Floats can be made by ktk.quantize.Quantized(format, data, scale).dequantize()"
        )
    shapes = (f"{fmt}, which is scales {list(fmt.groups(n, k))}" for fmt in mine)
    raise ValueError(
        f"{name} is {element} {[n, k]} with scales {_described(scale)}"
        f"{'' if zero is None else f' and zero points {_described(zero)}'}, but {backend} takes "
        f"{'; or '.join(shapes)}"
    )


def _holds(name: str, array: Array | None, element: str, counts: tuple[int, int]) -> bool:
    """Whether an array can be the scales or the zero points of a format."""
    if array is None or element == "none":
        return array is None and element == "none"
    told = element_of(name, array)
    kinds = _BYTES if told is None and _dtype(array) == "uint8" else (told,)
    shape = tuple(array.shape)
    return element in kinds and (shape if len(shape) == 2 else (*shape, 1)) == counts


def _dtype(array: Array) -> str:
    return str(getattr(array, "dtype", "")).removeprefix("torch.")


def _described(array: Array | None) -> str:
    return "missing" if array is None else f"{list(array.shape)} {_dtype(array)}"


def _example(accepts: Sequence[Format]) -> str:
    coded = [fmt for fmt in accepts if fmt.element not in _WIDE.values()]
    return label((coded or list(accepts))[0])


def _listed(accepts: Sequence[Format]) -> str:
    return "; ".join(dict.fromkeys(map(str, accepts)))
