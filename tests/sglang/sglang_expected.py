"""What a layer of an engine may give: float64, with the bounds of ktk's backend and of bf16."""

from __future__ import annotations

import numpy as np
import sglang_checkpoints as checkpoints
import sglang_gpu as gpu
import torch
from sglang_checkpoints import SHAPES, E

from ktk import KTMoEWrapper
from ktk.testing import bounds, formats, reference
from ktk.testing.formats import as_float64
from ktk.testing.reference import Uncertain
from ktk.testing.subject import Subject

#: Methods of kt-kernel, each with the kinds of checkpoints that it reads.
METHODS = [
    ("BF16", "bf16"),
    ("BF16", "fp8 by blocks"),
    ("BF16", "gguf"),
    ("FP8", "fp8 by blocks"),
    ("FP8_PERCHANNEL", "fp8 by rows"),
    ("RAWINT4", "int4"),
    ("AMXINT4", "int4"),
    ("AMXINT4", "bf16"),
    ("AMXINT4", "fp8 by blocks"),
    ("AMXINT8", "bf16"),
    ("AMXINT8", "fp8 by blocks"),
    ("MOE_INT4", "bf16"),
    ("MOE_INT8", "bf16"),
    ("GPTQ_INT4", "gptq"),
    ("MXFP4", "mxfp4"),
    ("MXFP8", "mxfp8"),
    ("NVFP4", "nvfp4"),
    ("LLAMAFILE", "gguf"),
    ("LLAMAFILE", "gguf, mixed"),
    ("LLAMAFILE", "bf16"),
]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_weights(layer: KTMoEWrapper, kind: str) -> None:
    """Check that ktk holds what the checkpoint says, or what it makes of these floats."""
    moe = layer.moe
    assert moe is not None
    found = checkpoints.sources(kind, layer.layer_idx)
    if [moe.format, moe.up_format, moe.down_format] == [found[0][p].format for p in SHAPES]:
        for number, parts in enumerate(found):
            for part, got in zip(SHAPES, moe.unpack_expert(number), strict=True):
                values = parts[part].values
                # Two roundings: the scale's product, and a difference for zero points.
                error = bounds.gamma(2) * np.abs(parts[part].reach + np.abs(values))
                bounds.check(np.asarray(got), values, error, f"{part} of expert {number}")
        return
    floats = KTMoEWrapper(
        0,
        *(E, checkpoints.TOP, checkpoints.H, checkpoints.INNER),
        method=layer.method,
        cpuinfer_threads=2,
    )
    floats.load_weights_from_tensors(
        *(torch.from_numpy(np.stack([one[p].values for one in found])).float() for p in SHAPES)
    )
    assert floats.moe is not None
    for number in range(E):
        pairs = zip(moe.unpack_expert(number), floats.moe.unpack_expert(number), strict=True)
        for part, (got, want) in zip(SHAPES, pairs, strict=True):
            what = f"{part} of expert {number}"
            bounds.check_same_bits(np.asarray(got), np.asarray(want), what)


def on_cpu(layer: KTMoEWrapper, kind: str, inputs: Inputs, mask: torch.Tensor) -> Uncertain:
    """Compute the experts that are not the GPU's."""
    moe = layer.moe
    assert moe is not None
    hidden, ids, weights = inputs
    [variant] = [one for one in layer.backend.variants if one.name == moe.variant]
    subject = Subject(layer.backend, variant)
    stored = (moe.format, moe.up_format, moe.down_format)
    acts = [subject.act_of(one) for one in stored if one is not None]
    assert len(acts) == 3
    assert not [act for act in acts if not formats.has_resolution(act)]
    experts = []
    for number, parts in enumerate(checkpoints.sources(kind, layer.layer_idx)):
        gate, up, down = (np.asarray(part).astype(np.float64) for part in moe.unpack_expert(number))
        kept = [parts[part].format == one for part, one in zip(SHAPES, stored, strict=True)]
        reach = {part: parts[part].reach for part, same in zip(SHAPES, kept, strict=True) if same}
        experts.append(reference.Expert(gate=gate, up=up, down=down, reach=reach))
    return reference.bounded_layer(
        as_float64(hidden),
        ids.numpy().astype(np.int64),
        as_float64(weights),
        experts,
        moe.config,
        (acts[0], acts[1], acts[2]),
        [width for shard in moe._core.slices for width in shard],
        mask=mask.numpy(),
        out="bf16",
    )


def on_gpu(
    method: gpu.Method, kind: str, layer: int, inputs: Inputs, mask: torch.Tensor
) -> np.ndarray:
    """Compute the experts of the GPU, in float64."""
    hidden, ids, weights = inputs
    own = torch.where((ids >= 0) & mask[ids], ids, -1)
    experts = checkpoints.sources(kind, layer)
    config = gpu.config_of(method.runner_config, E)
    return reference.layer(
        hidden, own.numpy(), weights, lambda number: method.meant(experts[number]), config
    )


def _rounded(value: np.ndarray, error: np.ndarray | float) -> Uncertain:
    """Round to bf16, which has 8 bits: what is on the GPU, and the sum of both parts."""
    made = Uncertain(value, np.zeros_like(value) + error)
    element = formats.ELEMENTS["bf16"]
    assert isinstance(element, formats.Float)
    return made.widened(element.rounding(made.size, up_to=True))


def check_sum(got: torch.Tensor, cpu: Uncertain, other: np.ndarray, what: str) -> None:
    """Check the sum of both parts; `other` is the GPU's in float64."""
    gpu = _rounded(other, 0.0)
    total = _rounded(cpu.value + gpu.value, cpu.error + gpu.error)
    assert got.dtype == torch.bfloat16
    assert np.isfinite(total.error).all()
    bounds.check(as_float64(got), total.value, total.error, what)
