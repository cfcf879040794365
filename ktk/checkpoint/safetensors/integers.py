"""Decodes integers of 2 to 8 bits, as compressed-tensors and GPTQ store them.

All of them pack codes without gaps, the lowest bits first, so that the bytes of a row are one
stream of bits, whatever words they are called. Seven codes of three bits, and one of the next:

    bit   0     3     6     9     12    15    18    21    24
          | c0  | c1  | c2  | c3  | c4  | c5  | c6  | c7 ...
    byte  |       0       |       1       |       2       |

A value is ``(code - zero) * scale``, with zero = 2 ** (bits - 1) where none is stored. What a
matrix becomes:

    2 to 4 bits          u4, with the zero points as they are, or the middle moved to 8
    5 to 8 bits          i8: code - zero
    5 to 8 bits, zeros   decoded

Where the columns of a group are no neighbours (desc_act, or actorder), they are put side by side,
and the matrix has an order; groups that are not of one size are decoded.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ktk._core import Format
from ktk.checkpoint.safetensors.scheme import (
    Layout,
    StorageError,
    Tensors,
    as_bytes,
    decoded,
)
from ktk.dtypes import FLOAT_NAMES
from ktk.expert import Matrix

_U4_MIDDLE = 8


def unpack(rows: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` codes of each row: uint8 [n, bytes] to uint8 [n, count]."""
    if bits == 8:
        return rows[:, :count]
    if bits == 4:
        return torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2)[:, :count]
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    stream = (rows.unsqueeze(-1) >> places & 1).flatten(-2)[:, : count * bits]
    codes = stream.reshape(len(rows), count, bits) << places[:bits]
    return codes.sum(-1, dtype=torch.uint8)


def pack_u4(codes: torch.Tensor) -> torch.Tensor:
    """Return codes up to 15 in bytes, the even column in the low half: [n, k] to [n, k / 2]."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def out_of_order(order: torch.Tensor, layout: Layout) -> bool:
    """Whether groups have other columns than neighbours: desc_act, or actorder, of GPTQ."""
    # Minus one everywhere is how compressed-tensors says that nothing was reordered.
    return not torch.equal(order.long(), _neighbours(layout)) and not bool((order == -1).all())


def uneven(order: torch.Tensor, layout: Layout) -> bool:
    """Whether groups cannot be put side by side: not all of them have as many columns."""
    return out_of_order(order, layout) and not torch.equal(
        order.long().sort().values, _neighbours(layout)
    )


def _neighbours(layout: Layout) -> torch.Tensor:
    """Return the group of each column where groups are neighbours, [k]."""
    return torch.arange(layout.k, device="cpu") // (layout.group or layout.k)


def integers(
    layout: Layout,
    rows: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> Matrix:
    """Return the matrix of packed integers.

    Parameters
    ----------
    layout
        Its sizes.
    rows
        Codes, uint8 [n, bytes].
    scale, zero
        By group, [n, groups]; zero points in codes.
    order
        The group of each column, [k]; by default neighbours make a group.

    Raises
    ------
    StorageError
        Columns belong to groups that are none, or the codes have more or fewer bits than ktk reads.
    """
    bits, middle = layout.bits, 1 << layout.bits - 1
    if not 2 <= bits <= 8:
        raise StorageError(f"has integers of {bits} bits; ktk reads those of 2 to 8")
    sort = None
    if order is not None and not out_of_order(order, layout):
        order = None
    if (order is not None and uneven(order, layout)) or (bits > 4 and zero is not None):
        group = _neighbours(layout) if order is None else order
        if not 0 <= int(group.min()) <= int(group.max()) < scale.shape[1]:
            raise StorageError(
                f"sorts columns into groups {int(group.min())} to {int(group.max())}, and has "
                f"{scale.shape[1]} of them: it is damaged, or made with another group_size"
            )
        group = group.long()

        def values() -> torch.Tensor:
            least = middle if zero is None else zero.float()[:, group]
            return (unpack(rows, bits, layout.k).float() - least) * scale.float()[:, group]

        return decoded(layout, rows, values)
    if order is not None:
        sort = order.long().argsort(stable=True)
    made = _stored(layout, rows, scale, zero, sort)
    return made if sort is None else replace(made, order=sort.int())


def _stored(
    layout: Layout,
    rows: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    sort: torch.Tensor | None,
) -> Matrix:
    """Return what backends take of codes, whose columns are sorted first if `sort` says how."""
    bits, middle = layout.bits, 1 << layout.bits - 1

    def codes() -> torch.Tensor:
        found = unpack(rows, bits, layout.k)
        return found if sort is None or found.is_meta else found[:, sort]

    if bits > 4:
        signed = (codes() - middle).view(torch.int8)
        return Matrix(Format("i8", "f32", "none", 1, layout.group), signed, scale.float())
    data = rows[:, : -(-layout.k // 2)]
    if bits < 4 or sort is not None:
        moved = 0 if zero is not None else _U4_MIDDLE - middle
        data = pack_u4(codes() + moved)
    kind = "none" if zero is None else "u8"
    fmt = Format("u4", FLOAT_NAMES[scale.dtype], kind, 1, layout.group)
    return Matrix(fmt, data, scale.contiguous(), None if zero is None else zero.contiguous())


def compressed_tensors(t: Tensors, layout: Layout) -> Matrix:
    """Decode ``pack-quantized``: rows of codes; zero points are packed along the rows."""
    if layout.quantization.is_float:
        raise StorageError(
            "holds 4-bit floats, as config.json says, with scales of no format ktk knows"
        )
    if "shape" in t and t["shape"].tolist() != [layout.n, layout.k]:
        raise StorageError(
            f"holds a matrix of {t['shape'].tolist()}, but config.json means {[layout.n, layout.k]}"
        )
    zero = None
    if "zero" in t:
        zero = unpack(as_bytes(t["zero"].T.contiguous()), layout.bits, layout.n).T
    elif layout.quantization.symmetric is False:
        raise StorageError("has no zero points, though config.json says that it is not symmetric")
    return integers(layout, as_bytes(t["data"]), t["scale"], zero, t.get("order"))


def gptq(t: Tensors, layout: Layout) -> Matrix:
    """Decode GPTQ's packing: words of codes run along the depth, those of zero points along N."""
    quantization = layout.quantization
    zero = None
    if "zero" in t:
        codes = unpack(as_bytes(t["zero"]), layout.bits, layout.n)
        zero = zeros(layout, codes.int() + quantization.zero_offset)
    elif quantization.symmetric is False:
        raise StorageError("has no zero points, though config.json says that it is not symmetric")
    data = as_bytes(t["data"].T.contiguous())
    return integers(layout, data, t["scale"].T, zero, t.get("order"))


def zeros(layout: Layout, zero: torch.Tensor) -> torch.Tensor | None:
    """Return zero points [n, groups] of [groups, n]; None if config.json says: the middle."""
    if not layout.quantization.symmetric:
        # One more than the highest code, as GPTQ stores them, is 256 at most.
        return zero.T.to(torch.uint8 if layout.bits < 8 else torch.int32)
    if not (zero == 1 << layout.bits - 1).all():
        raise StorageError("has zero points, though config.json says that it is symmetric")
    return None


def int8(t: Tensors, layout: Layout) -> Matrix:
    """Decode ``int-quantized``: int8 as such, with a scale for rows, groups or all.

    Zero points may be for all where scales are for rows or groups, and so on.

    Raises
    ------
    StorageError
        Zero points and scales are for other groups or rows, or zero points are missing.
    """
    scale = _by_group(t["scale"], layout.n).contiguous()
    fmt = Format("i8", "f32", "none", 1, layout.group if scale.shape[1] > 1 else 0)
    if "zero" not in t and layout.quantization.symmetric is False:
        raise StorageError("has no zero points, though config.json says that it is not symmetric")
    if "zero" not in t or not t["zero"].any():
        return Matrix(fmt, t["data"], scale)
    zero = _by_group(t["zero"], layout.n)
    if zero.shape[1] not in (1, scale.shape[1]):
        raise StorageError(f"has {scale.shape[1]} scales and {zero.shape[1]} zero points in a row")
    zero = zero.expand(-1, scale.shape[1])

    def values() -> torch.Tensor:
        columns = -(-layout.k // scale.shape[1]) if not fmt.group_k else fmt.group_k
        group = torch.arange(layout.k, device="cpu") // columns
        return (t["data"].float() - zero[:, group]) * scale[:, group]

    return decoded(layout, t["data"], values)


def _by_group(one: torch.Tensor, n: int) -> torch.Tensor:
    """Return scales or zero points [n, groups] of a tensor that has them for rows, groups or all.

    Raises
    ------
    StorageError
        They are for other rows.
    """
    found = one.float().reshape(-1, one.shape[-1] if one.ndim > 1 else 1)
    if len(found) not in (1, n):
        raise StorageError(f"has scales or zero points for {len(found)} rows, and {n} rows")
    return found.expand(n, -1)
