"""Reads one matrix of the tensors it is stored in, wherever they come from.

The tables of `storage` say which tensors there can be. What follows the name of the matrix in a
checkpoint is here the *role* of a tensor: weight, weight_scale_inv, qweight, blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from ktk.checkpoint.quantization import Quantization
from ktk.checkpoint.safetensors.families import Stored
from ktk.checkpoint.safetensors.scheme import (
    Header,
    Layout,
    Part,
    Scheme,
    StorageError,
    fits,
    header_of,
)
from ktk.checkpoint.safetensors.split import split_matrix, split_tensor
from ktk.checkpoint.safetensors.storage import PLAIN, SCHEMES
from ktk.expert import Matrix

Tensors = Mapping[str, torch.Tensor]
#: Of a code, where neither config.json nor a shape says it.
USUAL_BITS = 4


def read_tensors(tensors: Tensors, n: int, k: int, quantization: Quantization) -> Matrix:
    """Return the matrix [n, k] that tensors, by their roles, hold.

    Raises
    ------
    StorageError
        They hold none that ktk reads; the message lacks the name of the matrix.
    """
    scheme, layout = scheme_of(_headers(tensors), n, k, quantization)
    return scheme.decode(_by_part(scheme, tensors), layout)


def read_part(
    part: str, tensors: Tensors, stored: Stored, n: int, k: int, quantization: Quantization
) -> dict[str, Matrix]:
    """Return the matrices of a part of an expert: of gate_up, these are gate and up.

    Parameters
    ----------
    part
        gate, up, down or gate_up.
    tensors
        By their roles.
    stored
        The axes of floats; those of codes are always [n, k], and only the order of rows counts.
    n, k
        Rows and columns of the part.
    quantization
        What config.json says of codes.

    Raises
    ------
    StorageError
        As of `read_tensors`.
    """
    headers = _headers(tensors)
    depth = "I" if part == "down" else "H"
    if has_roles(PLAIN, headers) and not stored.axes.endswith(depth):
        headers = {role: Header(dtype, shape[::-1]) for role, (dtype, shape) in headers.items()}
    scheme, layout = scheme_of(headers, n, k, quantization)
    return decoded_part(part, scheme, _by_part(scheme, tensors), layout, stored)


def decoded_part(
    part: str, scheme: Scheme, tensors: Tensors, layout: Layout, stored: Stored
) -> dict[str, Matrix]:
    """Return the matrices of a part whose tensors are given as its scheme calls them."""
    if scheme is not PLAIN:
        return split_matrix(part, scheme.decode(tensors, layout), stored)
    split = split_tensor(part, tensors["data"], stored.own)
    return {name: PLAIN.decode({"data": one}, layout) for name, one in split.items()}


def scheme_of(
    headers: Mapping[str, Header], n: int, k: int, quantization: Quantization
) -> tuple[Scheme, Layout]:
    """Return how a matrix [n, k] is stored in tensors that are known by their roles.

    Raises
    ------
    StorageError
        No row of the table has such tensors; the message says what is wrong with them.
    """
    named = [scheme for scheme in SCHEMES if has_roles(scheme, headers)]
    if quantization.refusal and named and named != [PLAIN]:
        raise StorageError(quantization.refusal)
    if not named:
        raise StorageError(f"is stored as {_listed(headers)}, and ktk knows no such scheme")
    typed = [scheme for scheme in named if not any(wrong_types(scheme, headers))]
    if not typed:
        raise StorageError(next(wrong_types(named[0], headers)))
    layouts = [(scheme, layout_of(scheme, headers, n, k, quantization)) for scheme in typed]
    for scheme, layout in layouts:
        if not any(wrong_shapes(scheme, layout, headers)):
            return scheme, layout
    raise StorageError(next(wrong_shapes(*layouts[0], headers)))


def has_roles(scheme: Scheme, roles: Collection[str]) -> bool:
    """Whether tensors of these roles, and no fewer or others, make a matrix of a scheme."""
    known = {role_of(part): part.optional for part in scheme.tensors.values()}
    return set(roles) <= known.keys() and all(
        optional or role in roles for role, optional in known.items()
    )


def role_of(part: Part) -> str:
    """Return what a tensor is called behind the name of its matrix."""
    return part.suffix.lstrip("._")


def layout_of(
    scheme: Scheme, headers: Mapping[str, Header], n: int, k: int, quantization: Quantization
) -> Layout:
    """Return the sizes of a matrix [n, k]: as config.json says, or else as its tensors have it."""
    group = _group_of(scheme, headers, k, quantization)
    return Layout(n, k, group, quantization, _bits_of(scheme, headers, n, k, quantization))


def _group_of(
    scheme: Scheme, headers: Mapping[str, Header], k: int, quantization: Quantization
) -> int:
    """Return the columns of a group; 0: all."""
    scale = scheme.tensors.get("scale")
    words = [] if scale is None else scale.shape.split()
    if scale is None or not {"K/G", "Z*8"} & set(words):
        return 0
    if quantization.group_size is not None or "K/G" not in words:
        return quantization.group_size or 0
    shape = headers[role_of(scale)].shape
    groups = shape[words.index("K/G")] if len(shape) == len(words) else 0
    return 0 if groups <= 1 else -(-k // groups)


def _bits_of(
    scheme: Scheme, headers: Mapping[str, Header], n: int, k: int, quantization: Quantization
) -> int:
    """Return the bits of a code."""
    if quantization.bits is not None:
        return quantization.bits
    data = scheme.tensors["data"]
    words, shape = data.shape.split(), headers[role_of(data)].shape
    for word, extent in zip(words, shape, strict=False):
        axis, _, rest = word.partition("*b/")
        if rest and len(words) == len(shape):
            return extent * int(rest) // {"N": n, "K": k}[axis]
    return USUAL_BITS


def wrong_types(scheme: Scheme, headers: Mapping[str, Header]) -> Iterator[str]:
    """Say which tensors have elements that a scheme does not."""
    for role, part, dtype, _ in _there(scheme, headers):
        if dtype not in part.dtypes:
            expected = " or ".join(part.dtypes)
            yield f"has a tensor {role} of type {dtype}, expected {expected}"


def wrong_shapes(scheme: Scheme, layout: Layout, headers: Mapping[str, Header]) -> Iterator[str]:
    """Say which tensors have another shape than sizes mean."""
    for role, part, _, shape in _there(scheme, headers):
        if not fits(shape, expected := layout.shapes(part)):
            listed = " or ".join(str(list(one)) for one in expected)
            yield f"has a tensor {role} of shape {list(shape)}, expected {listed} ({part.shape})"


def _headers(tensors: Tensors) -> dict[str, Header]:
    return {role: header_of(tensor) for role, tensor in tensors.items()}


def _by_part(scheme: Scheme, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {
        name: tensors[role_of(part)]
        for name, part in scheme.tensors.items()
        if role_of(part) in tensors
    }


def _there(
    scheme: Scheme, headers: Mapping[str, Header]
) -> Iterator[tuple[str, Part, str, tuple[int, ...]]]:
    for part in scheme.tensors.values():
        if (role := role_of(part)) in headers:
            yield role, part, *headers[role]


def _listed(headers: Mapping[str, Header]) -> str:
    each = (f"{role} ({dtype} {list(shape)})" for role, (dtype, shape) in headers.items())
    return ", ".join(each) or "no tensors"
