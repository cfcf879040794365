"""Writes small GGUF files of experts with gguf's own writer and encoders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ktk import ik_types
from ktk.ik_types import IkType

E, TOP, H, I = 4, 2, 256, 512  # noqa: E741 - the names the layouts use
PARTS = ("gate", "up", "down")
#: Types that gguf can both encode and decode.
ENCODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")
PLAIN = ("F32", "F16", "BF16")
FIELDS: dict[str, Any] = {
    "expert_count": E,
    "expert_used_count": TOP,
    "embedding_length": H,
    "expert_feed_forward_length": I,
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is written: values of plain types, uint8 rows of blocks otherwise."""

    data: np.ndarray
    type: Type | IkType

    @functools.cached_property
    def values(self) -> np.ndarray:
        """What it means, by gguf's decoder or ktk's of ik_llama.cpp's types, in float64."""
        if isinstance(self.type, IkType):
            rows = self.type.blocks_of(self.data.reshape(-1, self.data.shape[-1]))
            return self.type.values(rows).reshape(self.shape).astype(np.float64)
        with np.errstate(all="ignore"):  # random blocks have scales beyond all numbers
            return gguf.quants.dequantize(self.data, self.type).astype(np.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents, if it has one of ik_llama.cpp's types."""
        assert isinstance(self.type, IkType)
        blocks = (self.data.shape[-1] - self.type.row_prefix) // self.type.file_nbytes
        return (*self.data.shape[:-1], blocks * self.type.columns)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(np.ascontiguousarray(self.data[index]), self.type)


def tensor(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    """Make random weights of a trained model's size; of types without encoder, random blocks."""
    rng = np.random.default_rng(seed)
    if ik_type := ik_types.TYPES.get(kind.lower()):
        return Tensor(ik_rows(ik_type, shape, rng), ik_type)
    known = Type[kind]
    values = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
    try:
        return Tensor(gguf.quants.quantize(values, known), known)
    except NotImplementedError:
        blocks = gguf.quants.quant_shape_to_byte_shape(shape, known)
        return Tensor(rng.integers(0, 256, blocks, dtype=np.uint8), known)


def ik_rows(kind: IkType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Make random rows of a type of ik_llama.cpp as files have them, with values below one."""
    rows = rng.integers(0, 256, (*shape[:-1], kind.row_nbytes(shape[-1])), dtype=np.uint8)
    step = rows.shape[-1] if kind.row_prefix else kind.nbytes
    each = rows.reshape(-1, step)
    d = rng.uniform(2.0**-15, 2.0**-14, (len(each), 1)).astype(kind.d)
    each[:, : d.itemsize] = d.view(np.uint8)
    return rows


def experts(
    gate: str = "Q8_0", up: str | None = None, down: str | None = None, *, bias: bool = False
) -> dict[str, Tensor]:
    """Make the experts of a layer, stacked."""
    parts = {
        "gate": tensor((E, I, H), gate, 1),
        "up": tensor((E, I, H), up or gate, 2),
        "down": tensor((E, H, I), down or gate, 3),
    }
    if bias:
        parts["gate_bias"] = tensor((E, I), "F32", 4)
        parts["up_bias"] = tensor((E, I), "F32", 5)
        parts["down_bias"] = tensor((E, H), "F32", 6)
    return parts


def stacked(parts: Mapping[str, Tensor], layer: int = 0) -> dict[str, Tensor]:
    """Name the experts as files have them since 2024."""
    tensors = {}
    for part, stack in parts.items():
        name, _, bias = part.partition("_")
        tensors[f"blk.{layer}.ffn_{name}_exps.{bias or 'weight'}"] = stack
    return tensors


def single(parts: Mapping[str, Tensor], layer: int = 0) -> dict[str, Tensor]:
    """Name them as the first Mixtral files did: a tensor per expert."""
    return {
        f"blk.{layer}.ffn_{part}.{e}.weight": parts[part][e] for part in PARTS for e in range(E)
    }


def fused(parts: Mapping[str, Tensor], layer: int = 0) -> dict[str, Tensor]:
    """Put gate and up into one tensor."""
    tensors = stacked(parts, layer)
    for suffix in ("weight", "bias"):
        names = [f"blk.{layer}.ffn_{part}_exps.{suffix}" for part in ("gate", "up")]
        if names[0] in tensors:
            gate, up = (tensors.pop(name) for name in names)
            both = np.concatenate([gate.data, up.data], axis=1)
            tensors[f"blk.{layer}.ffn_gate_up_exps.{suffix}"] = Tensor(both, gate.type)
    return tensors


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    arch: str = "qwen3moe",
    fields: Mapping[str, Any] = FIELDS,
    shard_tensors: int = 0,
) -> Path:
    """Write a file, or `path`'s shards with at most `shard_tensors` each; returns the first."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=shard_tensors)
    # What surrounds experts in real files, in front of and behind what is read.
    writer.add_type("model")
    writer.add_token_list([f"token {i}" for i in range(50)])
    writer.add_token_scores([0.5] * 50)
    for name, value in fields.items():
        scalar = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_array if isinstance(value, list) else scalar)(f"{arch}.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((3, H), np.float32))
    for name, one in tensors.items():
        if isinstance(one.type, IkType):
            # The writer looks the sizes of uint8 blocks up in a table that lacks these.
            number: Any = one.type.number
            writer.add_tensor(name, one.data.view(np.int8), raw_shape=one.shape, raw_dtype=number)
        else:
            writer.add_tensor(name, one.data, raw_dtype=one.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
    return shards[0] if shards else path
