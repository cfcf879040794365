"""sglang-kt's long prompts: whole layers written for the GPU, and experts that move there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_checkpoints as checkpoints
import sglang_fork
import sglang_gpu as gpu
import torch
from sglang_cuda import Cuda
from sglang_expected import Inputs, check_sum, on_cpu, on_gpu
from sglang_fork import Layer
from sglang_stage import put

from ktk.testing.reference import Uncertain

LONG, SHORT = 12, 5
PREFILL: dict[str, Any] = {"kt_gpu_prefill_token_threshold": 8}
UPDATE = {**PREFILL, "kt_enable_dynamic_expert_update": True}
#: The methods that have a writer.
WRITTEN = {
    "BF16": "bf16",
    "FP8": "fp8 by blocks",
    "FP8_PERCHANNEL": "fp8 by rows",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}
pytestmark = pytest.mark.parametrize("cuda", ["pool"], indirect=True)


@pytest.fixture
def closing(cuda: Cuda) -> Iterator[None]:
    """Close what a client has of shared memory."""
    yield
    if context := sys.modules[sglang_fork.NAME]._SHARED_FULL_CONTEXT:
        context.close()


def check_long(layer: Layer, kind: str, seed: int) -> Inputs:
    """Call a layer with a long prompt: all of it is computed on the GPU."""
    inputs = checkpoints.inputs(LONG, seed)
    check_long_result(layer, kind, inputs, layer(*inputs))
    return inputs


def check_long_result(layer: Layer, kind: str, inputs: Inputs, got: torch.Tensor) -> None:
    everywhere = torch.ones(checkpoints.E, dtype=torch.bool)
    nothing = np.zeros((LONG, checkpoints.H))
    method = layer.quant_method.gpu_method
    expected = on_gpu(method, kind, layer.layer_id, inputs, everywhere)
    check_sum(got, Uncertain(nothing, nothing), expected, f"a long prompt, {kind}")


def check_short(layer: Layer, kind: str, seed: int) -> None:
    """Call a layer with few tokens: both sides compute."""
    inputs = checkpoints.inputs(SHORT, seed)
    mask, method = layer.quant_method.gpu_experts_mask, layer.quant_method.gpu_method
    assert torch.equal(layer.cpu.gpu_experts_mask, mask)
    assert torch.equal(layer.quant_method.gpu_experts_mask_cuda, mask)
    got = layer(*inputs)
    cpu = on_cpu(layer.cpu, kind, inputs, mask)
    check_sum(got, cpu, on_gpu(method, kind, layer.layer_id, inputs, mask), "few tokens")
    assert layer.cpu.moe is not None
    assert torch.equal(got, method.given + layer.cpu.moe(*inputs, mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("method", WRITTEN)
@pytest.mark.usefixtures("closing")
def test_whole_layers_reach_the_gpu_and_hot_experts_stay_there(
    method: str, cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    kind = WRITTEN[method]
    path = checkpoints.write(tmp_path / "model", kind)
    # For MXFP8 this client copies tensors of int4, which are not there; of MXFP4 it moves none.
    moves = not method.startswith("MX")
    layers = sglang_fork.model(patch, fork, path, method, kind, **(UPDATE if moves else PREFILL))
    moved = False
    for seed in range(2):
        for layer in layers:
            check_short(layer, kind, seed)
            before = layer.gpu_slots
            ids = check_long(layer, kind, seed)[1]
            check_written(layer, kind)
            if moves:
                counts = torch.bincount(ids.flatten().long(), minlength=checkpoints.E)
                kept = counts[layer.gpu_slots]
                assert int(kept.sum()) == int(counts.topk(len(before)).values.sum())
                moved |= before != layer.gpu_slots
            check_short(layer, kind, seed + 100)
    assert moved == moves


@pytest.mark.slow
@pytest.mark.usefixtures("closing")
def test_four_bits_reach_the_gpu(
    cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "model", "int4")
    for layer in sglang_fork.model(patch, fork, path, "RAWINT4", "int4", **UPDATE):
        check_short(layer, "int4", 0)
        inputs = checkpoints.inputs(LONG)
        # This client computes the layer, moves experts, and then makes a Parameter of int32 that
        # requires grad, which no torch does. It has its result by then.
        with pytest.raises(RuntimeError, match="Only Tensors of floating point"):
            layer(*inputs)
        check_written(layer, "int4")
        module: Any = sys.modules[sglang_fork.NAME]
        check_long_result(layer, "int4", inputs, module._SHARED_FULL_CONTEXT.gpu_method.given)
        check_short(layer, "int4", 100)
        module._SHARED_FULL_CONTEXT.close()
        module._SHARED_FULL_CONTEXT = None


def check_written(layer: Layer, kind: str) -> None:
    """Check that the GPU's copy of a layer had the bytes of the checkpoint."""
    own = sys.modules[sglang_fork.NAME]._SHARED_FULL_CONTEXT.gpu_method
    for number, parts in enumerate(checkpoints.sources(kind, layer.layer_id)):
        for name, wanted in own.tensors_of(parts).items():
            pair = own.had[name][number].flatten(), wanted.flatten()
            got, wanted = (one.contiguous().view(torch.uint8) for one in pair)
            assert torch.equal(got, wanted), f"{name} of expert {number}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"), [("AMXINT4", "fp8 by blocks"), ("FP8", "fp8 by rows"), ("BF16", "int4")]
)
@pytest.mark.usefixtures("closing")
def test_what_is_not_the_methods_format_is_never_written(
    method: str, kind: str, cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "model", kind)
    layer = sglang_fork.model(patch, fork, path, method, kind, **PREFILL)[0]
    check_short(layer, kind, 0)
    with pytest.raises(NotImplementedError, match="without --kt-gpu-prefill-token-threshold"):
        layer(*checkpoints.inputs(LONG))
    check_short(layer, kind, 1)


NAMES = ("w13", "w13_scale", "w2", "w2_scale")


def _allocated(**sizes: Any) -> SimpleNamespace:
    """Stand in for what Marlin's kernel needs of a layer: the same tensors once more."""
    e, h, inner = sizes["num_experts"], sizes["hidden_size"], sizes["intermediate_size"]
    shapes = (2 * inner, h // 2), (2 * inner, h // 32), (h, inner // 2), (h, inner // 32)
    made = (
        torch.empty((e, *shape), dtype=dtype)
        for shape, dtype in zip(shapes, (torch.int8, torch.float32) * 2, strict=True)
    )
    return SimpleNamespace(**dict(zip(NAMES, made, strict=True)))


def _prepare(*tensors: torch.Tensor, out: SimpleNamespace) -> None:
    for name, tensor in zip(NAMES, tensors, strict=True):
        getattr(out, name).copy_(tensor)


class Prepared(gpu.DeepSeekMxfp4MoEMethod):
    """The GPU's method once the client has bound a slot of its own to the layer."""

    def expert(self, layer: torch.nn.Module, slot: int) -> Any:
        if bound := getattr(layer, "_v4_marlin_weights", None):
            for tensor, name in zip(NAMES, sum(self.names, ()), strict=True):
                getattr(layer, name).data = getattr(bound, tensor)
        return super().expert(layer, slot)


Prepared.__name__ = gpu.DeepSeekMxfp4MoEMethod.__name__  # what the client goes by


@pytest.mark.usefixtures("closing")
def test_the_two_slots_of_mxfp4_get_the_next_layer_while_one_is_computed(
    cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    patch.setitem(gpu.METHODS, "mxfp4", Prepared)
    path = checkpoints.write(tmp_path / "model", "mxfp4")
    layers = sglang_fork.model(patch, fork, path, "MXFP4", "mxfp4", **PREFILL)
    marlin: dict[str, Any] = {"allocate_v4_mxfp4_marlin": lambda **s: _allocated(**s)}
    marlin["prepare_v4_mxfp4_marlin"] = _prepare
    put(patch, "sglang.srt.layers.quantization.v4_marlin_moe", marlin)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    registered = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 0, cudaHostUnregister=lambda address: 0
    )
    patch.setattr(torch.cuda, "cudart", lambda: registered)
    patch.delenv("SGLANG_V4_USE_TRITON_KERNELS", raising=False)
    written: list[int] = []
    for layer in layers:
        submit = layer.cpu.submit_write_weight_scale_to_buffer

        def record(*arguments: Any, number: int = layer.layer_id, submit: Any = submit) -> None:
            written.append(number)
            submit(*arguments)

        patch.setattr(layer.cpu, "submit_write_weight_scale_to_buffer", record)
    for seed in range(2):
        written.clear()
        check_long(layers[0], "mxfp4", seed)
        assert set(written) == {0, 1}, "the next layer is written ahead"
        count = len(written)
        check_long(layers[1], "mxfp4", seed)
        assert len(written) == count, "it was there"
        for layer in layers:
            check_short(layer, "mxfp4", seed)
