"""Tiny models as somebody has them: files of weights, and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_model
import quantized
import text_models
from tiny import FAMILIES, Family, float32


def _of_family(family: Family) -> Callable[[Path], tuple[Path, Any]]:
    def write(folder: Path) -> tuple[Path, Any]:
        return family.save(folder), float32(folder)

    return write


# What is written, and what computes its experts where nobody says.
MODELS: dict[str, tuple[Callable[[Path], tuple[Path, Any]], str]] = {
    **{name: (_of_family(family), "BF16") for name, family in FAMILIES.items()},
    "gpt-oss in MXFP4": (quantized.gpt_oss, "MXFP4"),
    "Kimi-K2 in int4": (quantized.kimi_k2, "RAWINT4"),
    "FP8 by blocks": (quantized.fp8_everywhere, "FP8"),
    "GGUF": (gguf_model.write, "LLAMAFILE"),
}


def write(name: str, folder: Path) -> tuple[Path, Any]:
    """Write a model of `MODELS`; return its folder or file, and the model in float32."""
    folder.mkdir()
    path, exact = MODELS[name][0](folder)
    if path.is_dir():  # GGUF files have their own
        text_models.tokenizer(words=300, first=("<pad>", "<s>")).save_pretrained(path)
    return path, exact
