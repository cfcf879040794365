"""Which dtypes of torch elements of floats are.

This imports torch. What does without it, as layers of numpy's arrays do, has `formats.TORCH_NAMES`.
"""

from __future__ import annotations

import torch

from ktk.formats import FLOATS, TORCH_NAMES

#: By what `Format` calls them.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, TORCH_NAMES[name]) for name in TORCH_NAMES}
#: Of those that are floats as they are: unpacked as f32, each is again what is stored.
FLOAT_DTYPES = {name: DTYPES[name] for name in FLOATS}
#: The other way round.
FLOAT_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
