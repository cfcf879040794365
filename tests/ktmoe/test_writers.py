"""What the writers give to GPUs is what the checkpoint had, byte by byte."""

from __future__ import annotations

import functools
import sys
import types

import numpy as np
import pytest
import torch
from ktmoe_buffers import Guarded, wanted

from ktk import Format, KTMoEWrapper
from ktk.quantize import Quantized, quantize

E, H, INNER = 2, 256, 512
FORMATS = {
    "BF16": Format("bf16"),
    "FP8": Format("e4m3", "f32", "none", 128, 128),
    "FP8_PERCHANNEL": Format("e4m3", "f32", "none", 1, 0),
    "RAWINT4": Format("u4", "bf16", "none", 1, 32),
    "MXFP4": Format("e2m1", "ue8m0", "none", 1, 32),
    "NVFP4": Format("e2m1", "e4m3", "none", 1, 16),
    "MXFP8": Format("e4m3", "ue8m0", "none", 1, 32),
}


@functools.cache
def experts(method: str) -> list[dict[str, Quantized]]:
    """Make experts; the first one has every byte, NaN and both zeros among them."""
    torch.manual_seed(0)
    stored = FORMATS[method]
    shapes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
    made = [
        {part: quantize(torch.randn(shape) / 16, stored) for part, shape in shapes.items()}
        for _ in range(E)
    ]
    data = made[0]["gate"].data
    if data.dtype == torch.uint8:
        data[0, :64], data[1, :64] = torch.arange(64), torch.arange(64, 128)
        data[2, :64], data[3, :64] = torch.arange(128, 192), torch.arange(192, 256)
    if method == "NVFP4":
        # Every scale that is a number, and gate and up with factors of their own.
        numbers = torch.tensor([code for code in range(256) if code & 127 != 127])
        for part in ("gate", "up", "down"):
            scale = made[0][part].scale
            assert scale is not None
            scale.view(-1)[: len(numbers)] = numbers.to(scale.dtype)
        factors = [made[0][part].factor for part in ("gate", "up", "down")]
        assert len({float(one) for one in factors if one is not None}) == 3
    return made


def loaded(method: str, made: list[dict[str, Quantized]], shards: int) -> KTMoEWrapper:
    layer = KTMoEWrapper(0, E, 2, H, INNER, method=method)
    moe = layer.backend.moe(
        num_experts=E,
        num_experts_per_tok=2,
        hidden_size=H,
        intermediate_size=INNER,
        shards=shards,
        pool=layer.cpu_infer.pool,
    )
    for number, parts in enumerate(made):
        arrays = {part: matrix.data for part, matrix in parts.items()}
        arrays |= {f"{part}_scale": m.scale for part, m in parts.items() if m.scale is not None}
        arrays |= {f"{part}_factor": m.factor for part, m in parts.items() if m.factor is not None}
        moe.load_expert(number, **arrays, given=FORMATS[method])
    layer._use((moe, (FORMATS[method],) * 3))
    return layer


@pytest.mark.parametrize("shards", [1, 2, 3, 8])  # with 3 and 8, inside groups of 128
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("method", FORMATS)
def test_ranks_get_the_bytes_of_the_checkpoint(method: str, ranks: int, shards: int) -> None:
    made = experts(method)
    layer = loaded(method, made, shards)
    for expert in range(E):
        expected = [wanted(made[expert], ranks, rank) for rank in range(ranks)]
        sizes = [[None if part is None else part.size for part in parts] for parts in expected]
        buffers = Guarded(sizes)
        layer.submit_write_weight_scale_to_buffer(ranks, expert, *buffers.pointers)
        layer.sync_write_weight_scale_to_buffer()
        for parts, got in zip(expected, buffers.contents(), strict=True):
            for part, buffer in zip(parts, got, strict=True):
                if part is None or buffer is None:
                    assert part is buffer
                    continue
                np.testing.assert_array_equal(buffer, part.ravel())


def test_nvfp4_is_not_written_for_an_engine_that_has_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sglang-kt 0.7.2 has a byte for each scale: such buffers stay as they are."""
    made = experts("NVFP4")
    layer = loaded("NVFP4", made, 1)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe.kt_ep_wrapper", types.ModuleType("kt"))
    w13, w13_scale, w2, w2_scale = (part.size for part in wanted(made[0], 1, 0) if part is not None)
    buffers = Guarded([[w13, w13_scale // 2, w2, w2_scale // 2]])
    with pytest.raises(NotImplementedError, match="method NVFP4 writes scales as bf16"):
        layer.submit_write_weight_scale_to_buffer(1, 0, *buffers.pointers)
    assert buffers.untouched()


def test_factors_that_no_gpu_is_told_are_refused() -> None:
    made = experts("MXFP8")
    layer = loaded("MXFP8", made, 1)
    assert layer.moe is not None
    arrays = {part: matrix.data for part, matrix in made[0].items()}
    arrays |= {f"{part}_scale": m.scale for part, m in made[0].items() if m.scale is not None}
    layer.moe.load_expert(
        0, **arrays, up_factor=np.array([0.5], np.float32), given=FORMATS["MXFP8"]
    )
    with pytest.raises(ValueError, match="expert 0 has a factor beside the scales"):
        layer.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])


def test_what_cannot_be_written_says_why() -> None:
    layer = loaded("FP8", experts("FP8"), 1)
    write = layer.submit_write_weight_scale_to_buffer
    with pytest.raises(ValueError, match="w2_scale_ptrs has 1 addresses, gpu_tp_count is 2"):
        write(2, 0, [1, 1], [1, 1], [1, 1], [1])
    with pytest.raises(ValueError, match="w13_scale_ptrs has an address of 0"):
        write(1, 0, [1], [0], [1], [1])
    with pytest.raises(ValueError, match=r"gets 64 intermediate columns, .* multiples of 128 only"):
        write(8, 0, *[[1] * 8] * 4)
    with pytest.raises(ValueError, match="512 cannot be divided among 3 GPUs"):
        write(3, 0, *[[1] * 3] * 4)
    with pytest.raises(IndexError, match="expert 2 is not one of 2"):
        write(1, 2, [1], [1], [1], [1])
    with pytest.raises(IndexError, match="expert -1 is not one of 2"):
        write(1, -1, [1], [1], [1], [1])
    assert layer.moe is not None
    layer.moe.leave_out(1)
    with pytest.raises(ValueError, match="expert 1 is not loaded"):
        write(1, 1, [1], [1], [1], [1])
    layer.sync_write_weight_scale_to_buffer()  # nothing was submitted
    other = KTMoEWrapper(0, E, 2, H, INNER, method="AMXINT8")
    with pytest.raises(RuntimeError, match="layer 0 has no weights"):
        other.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])
    parts = (torch.randn(E, INNER, H), torch.randn(E, INNER, H), torch.randn(E, H, INNER))
    other.load_weights_from_tensors(*parts)
    with pytest.raises(NotImplementedError, match=r"method AMXINT8 has no writer; BF16, FP8, .*"):
        other.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])
