"""Small models of every kind that ktk reads, and what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf_files
import torch
from safetensors.torch import save_file

from ktk import Format
from ktk.checkpoint import open_checkpoint
from ktk.conversion import convert
from ktk.quantize import quantize

E, H, I = 3, 64, 96  # noqa: E741 - the names the table of families uses
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": E,
    "num_experts_per_tok": 2,
    "hidden_size": H,
    "moe_intermediate_size": I,
    "hidden_act": "silu",
}
PARTS = {"gate": (I, H), "up": (I, H), "down": (H, I)}


def weight(part: str, expert: int, layer: int = 0) -> torch.Tensor:
    """Random weights."""
    seed = torch.Generator().manual_seed(100 * layer + 10 * expert + len(part))
    return torch.randn(PARTS[part], generator=seed) / 8


def safetensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder of bf16 experts, one layer, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tensors or {
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight": weight(part, e).bfloat16()
        for e in range(E)
        for part in PARTS
    }
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    save_file(dict(made), folder / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(made, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fp8(folder: Path) -> Path:
    """Write a folder of FP8 by blocks."""
    blocks = Format("e4m3", "f32", "none", 128, 128)
    made = {}
    for e in range(E):
        for part in PARTS:
            stem = f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"
            matrix = quantize(weight(part, e), blocks)
            assert matrix.scale is not None
            made[stem] = matrix.data.contiguous().view(torch.float8_e4m3fn)
            made[f"{stem}_scale_inv"] = matrix.scale
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return safetensors(folder, made, {**CONFIG, "quantization_config": quantization})


def gguf(folder: Path) -> Path:
    """Write a folder with a GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf_files.write(folder / "m.gguf", gguf_files.stacked(gguf_files.experts("Q4_0", bias=True)))
    return folder


def packed(folder: Path) -> Path:
    """Convert the first of these."""
    source = safetensors(folder.parent / f"{folder.name}-source")
    convert(source, folder, backend="AMXINT8")
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "safetensors": safetensors,
    "fp8": fp8,
    "gguf": gguf,
    "packed": packed,
}


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read what the first and the last expert of each layer mean."""
    found = {}
    with open_checkpoint(path) as checkpoint:
        for number in checkpoint.layers():
            layer = checkpoint.layer(number)
            for expert in {0, layer.config.num_experts - 1}:
                for name, tensor in layer.values(expert).arrays().items():
                    found[f"{number}.{expert}.{name}"] = tensor
    return found
