"""What safetensors calls dtypes, and packed files, which are such."""

from __future__ import annotations

import torch

from ktk.dtypes import DTYPES

#: Floats, in ktk's words.
ELEMENTS = {
    "F16": "f16",
    "BF16": "bf16",
    "F32": "f32",
    "F8_E4M3": "e4m3",
    "F8_E5M2": "e5m2",
    "F8_E8M0": "ue8m0",
}
#: Floats by their names in ktk.
NAMES = {element: name for name, element in ELEMENTS.items()}
#: All that are read.
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F64": torch.float64,
    **{name: DTYPES[element] for name, element in ELEMENTS.items()},
}
