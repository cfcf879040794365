"""Random matrices as GPTQ, bitsandbytes and HQQ write them, by descriptions of these formats."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from schemes import SIZES, E, Tensors

RNG = np.random.default_rng(1)

# --- integers, and GPTQ -------------------------------------------------------------------------


@dataclass
class Integers:
    """A matrix of random integers: codes [n, k], scales and zero points [n, groups], order [k]."""

    codes: np.ndarray
    scale: torch.Tensor
    zero: np.ndarray
    order: np.ndarray

    @property
    def values(self) -> np.ndarray:
        scale = self.scale.double().numpy()[:, self.order]
        values: np.ndarray = (self.codes - self.zero[:, self.order]) * scale
        return values


def random(
    shape: tuple[int, int],
    bits: int,
    group: int,
    rng: np.random.Generator,
    *,
    zeros: bool = False,
    sort: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Integers:
    n, k = shape
    columns = group or k
    groups = -(-k // columns)
    scale = torch.from_numpy(rng.uniform(0.001, 0.01, (n, groups))).to(dtype)
    middle = 1 << bits - 1
    zero = rng.integers(1, 1 << bits, (n, groups)) if zeros else np.full((n, groups), middle)
    order = np.arange(k) // columns
    if sort:
        order = rng.permutation(order)
    return Integers(rng.integers(0, 1 << bits, (n, k)), scale, zero, order)


def stream(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack each row as one number, code i at bit bits * i, in words of 32 bits."""
    n, k = codes.shape
    words = -(-k * bits // 32)
    rows = [int("".join(f"{code:0{bits}b}" for code in row[::-1]), 2) for row in codes]
    packed = b"".join(row.to_bytes(4 * words, "little") for row in rows)
    return torch.from_numpy(np.frombuffer(packed, "<i4").reshape(n, words).copy())


def gptq(one: Integers, bits: int, *, zeros: bool = True, order: bool = True) -> Tensors:
    """AutoGPTQ's first format: words along the depth, zero points less one, along the rows."""
    found = {
        ".qweight": stream(one.codes, bits).T.contiguous(),
        ".scales": one.scale.T.contiguous(),
    }
    if zeros:
        found[".qzeros"] = stream(one.zero.T - 1, bits)
    if order:
        found[".g_idx"] = torch.from_numpy(one.order).int()
    return found


def all_random(bits: int, group: int, **options: Any) -> dict[tuple[str, int], Integers]:
    rng = np.random.default_rng(bits * 1000 + group)
    return {
        (part, e): random(size, bits, group, rng, **options)
        for part, size in SIZES.items()
        for e in range(E)
    }


def values(made: dict[tuple[str, int], Integers]) -> dict[tuple[str, int], np.ndarray]:
    return {key: one.values for key, one in made.items()}


# --- bitsandbytes --------------------------------------------------------------------------------

BNB_4BIT: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BNB_8BIT: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
#: The quantiles of a normal distribution, QLoRA, appendix E; and E2M1 with a tiny subnormal number.
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}


def json_tensor(entries: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(entries).encode()), dtype=torch.uint8)


def four_bits(
    kind: str, size: tuple[int, int], block: int, *, nested: bool
) -> tuple[Tensors, np.ndarray]:
    """A random matrix, code by code, and its values in f32."""
    count = math.prod(size)
    table = np.asarray(TABLES[kind], np.float32)
    codes = RNG.integers(0, 16, count)
    blocks = -(-count // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "shape": list(size)}
    state["dtype"] = "bfloat16"
    made: Tensors = {".weight.quant_map": torch.from_numpy(table)}
    if nested:
        nested_map = np.sort(RNG.uniform(-1, 1, 256).astype(np.float32))
        coded = RNG.integers(0, 256, blocks)
        scale = RNG.uniform(0.01, 0.02, -(-blocks // 256)).astype(np.float32)
        offset = np.float32(0.05)
        absmax = np.asarray(
            [nested_map[code] * scale[i // 256] + offset for i, code in enumerate(coded)]
        )
        made[".weight.absmax"] = torch.from_numpy(coded.astype(np.uint8))
        made[".weight.nested_absmax"] = torch.from_numpy(scale)
        made[".weight.nested_quant_map"] = torch.from_numpy(nested_map)
        state |= {"nested_blocksize": 256, "nested_offset": float(offset)}
        state["nested_dtype"] = "float32"
    else:
        absmax = RNG.uniform(0.01, 0.1, blocks).astype(np.float32)
        made[".weight.absmax"] = torch.from_numpy(absmax)
    halves = codes.reshape(-1, 2)
    data = (halves[:, 0] << 4 | halves[:, 1]).astype(np.uint8)
    made[".weight"] = torch.from_numpy(data).unsqueeze(1)
    made[f".weight.quant_state.bitsandbytes__{kind}"] = json_tensor(state)
    values = [table[code] * absmax[i // block] for i, code in enumerate(codes)]
    return made, np.asarray(values, np.float32).reshape(size)


def llm_int8(size: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
    """A random matrix of LLM.int8, and its values."""
    n, k = size
    codes = RNG.integers(-127, 128, (n, k))
    largest = RNG.uniform(0.01, 1, n).astype(np.float32)
    made = {
        ".weight": torch.from_numpy(codes).to(torch.int8),
        ".SCB": torch.from_numpy(largest),
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    scale = (largest / np.float32(127)).astype(np.float64)
    return made, codes * scale[:, None]


# --- HQQ -----------------------------------------------------------------------------------------

HQQ: dict[str, Any] = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {}}}
#: By bits: the packing, codes of a word, and the word.
PACKINGS = {
    8: ("8bit_u8", 1, np.uint8),
    4: ("4bit_u8", 2, np.uint8),
    3: ("3bit_32", 10, np.int32),
    2: ("2bit_u8", 4, np.uint8),
    1: ("1bit_u8", 8, np.uint8),
}


def letters(text: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in text], dtype=torch.uint8)


def packed(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Rows that are R / codes_of_word apart share words, the first in the highest bits."""
    _, count, word = PACKINGS[bits]
    rows = -(-len(codes) // count)
    words = np.zeros((rows, codes.shape[1]), np.int64)
    for row, one in enumerate(codes):
        place, at = divmod(row, rows)
        words[at] |= one.astype(np.int64) << bits * (count - 1 - place)
    return torch.from_numpy(words.astype(word))


def hqq(
    size: tuple[int, int], bits: int, axis: int, group: int | None, dtype: torch.dtype
) -> tuple[Tensors, np.ndarray]:
    """A random matrix and its exact values; without a group, a row or column is one."""
    n, k = size
    extent = group or (n, k)[axis]
    shape = (extent, n * k // extent) if axis == 0 else (n * k // extent, extent)
    codes = RNG.integers(0, 1 << bits, shape)
    by_group = (1, shape[1]) if axis == 0 else (shape[0], 1)
    scale = torch.from_numpy(RNG.uniform(0.001, 0.01, by_group)).to(dtype)
    # Also beyond the codes, as groups on one side of zero have them. None is so small that f32
    # would not hold its distance to a code.
    drawn = RNG.uniform(-0.2, 1.2, by_group) * (1 << bits)
    zero = torch.from_numpy(np.where(np.abs(drawn) < 0.25, 0.3, drawn)).to(dtype)
    made = {
        ".W_q": packed(codes, bits),
        ".scale": scale,
        ".zero": zero,
        ".shape": torch.tensor(size),
        ".packing": letters(PACKINGS[bits][0]),
        ".axis": torch.tensor(axis, dtype=torch.int32),
        ".nbits": torch.tensor(bits, dtype=torch.int32),
        ".compute_dtype": letters(str(dtype)),
        ".unpack_view_dtype": letters("torch.uint8"),
        **{
            f".{name}": torch.tensor(0, dtype=torch.uint8)
            for name in (
                *("view_as_float", "channel_wise", "optimize", "round_zero", "quant_scale"),
                *("quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config"),
            )
        },
    }
    if group is not None:
        made[".group_size"] = torch.tensor(group, dtype=torch.int32)
    values = (codes - zero.double().numpy()) * scale.double().numpy()
    return made, values.reshape(size)
