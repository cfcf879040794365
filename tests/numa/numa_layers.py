"""Layers of every backend whose halves can be told apart in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import ktk
from ktk import Format

SIZE = 512
EXPERTS = 4
SIZES: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
}
PARTS = ("gate", "up", "down")
#: Takes every shard, and experts of any number of bytes.
BACKENDS = ("AMXINT4", "AMXINT8", "BF16", "BF16Z", "FP8", "LLAMAFILE", "MXFP4", "RAWINT4")


@dataclass(frozen=True)
class Stored:
    """How codes of a backend that does not quantise are given: bytes of `per_byte` elements."""

    format: Format
    per_byte: int
    scale: Any
    zero_code: int
    codes: int


STORED = {
    "FP8": Stored(Format("e4m3", "f32", group_n=128, group_k=128), 1, np.float32(1), 0, 0x70),
    "MXFP4": Stored(Format("e2m1", "ue8m0", group_n=1, group_k=32), 2, np.uint8(120), 0, 256),
    # bf16's 1/2.
    "RAWINT4": Stored(Format("u4", "bf16", group_n=1, group_k=32), 2, np.uint16(0x3F00), 0x88, 256),
}


def weights(name: str, blank: slice | None = None, seed: int = 0) -> dict[str, Any]:
    """Return what load() takes: random experts whose `blank` intermediate columns are zero."""
    more: dict[str, Any] = {}
    rng = np.random.default_rng(seed)
    shape = (EXPERTS, SIZE, SIZE)
    if name not in STORED:
        arrays: dict[str, np.ndarray] = {
            part: rng.standard_normal(shape, np.float32) / 8 for part in ("gate", "up", "down")
        }
        zero, per_byte = 0, 1
    else:
        stored = STORED[name]
        zero, per_byte = stored.zero_code, stored.per_byte
        packed = (EXPERTS, SIZE, SIZE // per_byte)
        arrays = {part: rng.integers(0, stored.codes, packed, dtype=np.uint8) for part in PARTS}
        group_n, group_k = stored.format.group_n, stored.format.group_k
        scale = np.full((EXPERTS, SIZE // group_n, SIZE // group_k), stored.scale)
        more = {f"{part}_scale": scale for part in PARTS}
        more["given"] = (stored.format,) * 3
    if blank is not None:
        arrays["gate"][:, blank] = arrays["up"][:, blank] = zero
        columns = slice(blank.start // per_byte, blank.stop // per_byte)
        arrays["down"][:, :, columns] = zero
    return arrays | more


def layer(name: str, pool: ktk.WorkerPool | None = None, **options: Any) -> ktk.MoE:
    """Return a layer without experts."""
    return ktk.load_backend(name).moe(**SIZES, pool=pool, **options)


def compute(moe: ktk.MoE, tokens: int) -> np.ndarray:
    """Return what a layer makes of tokens that are always the same."""
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(EXPERTS) for _ in range(tokens)])
    weight = rng.random((tokens, EXPERTS), np.float32)
    return np.asarray(moe(rng.standard_normal((tokens, SIZE), np.float32), ids, weight))
