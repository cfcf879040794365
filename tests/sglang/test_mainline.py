"""Mainline SGLang's own wrapper of experts, unchanged, with ktk as kt_kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang_checkpoints as checkpoints
import sglang_mainline
import torch
from sglang_cuda import Cuda
from sglang_expected import METHODS, check_sum, check_weights, on_cpu, on_gpu
from sglang_mainline import Layer

from ktk.testing.reference import Uncertain


def check(layer: Layer, kind: str, tokens: int) -> None:
    """Call a layer, and compare both parts' sum."""
    inputs = checkpoints.inputs(tokens, seed=tokens)
    given = [one.clone() for one in inputs]
    mask, method = layer.cpu.gpu_experts_mask, layer.quant_method.gpu_method
    got = layer(*given)
    # This client writes to the ids as soon as it has submitted them.
    assert not torch.equal(given[1], inputs[1])
    other = on_gpu(method, kind, layer.layer_id, inputs, mask)
    check_sum(got, on_cpu(layer.cpu, kind, inputs, mask), other, f"{tokens} tokens")
    assert layer.cpu.moe is not None
    assert torch.equal(got, method.given + layer.cpu.moe(*inputs, mask=mask))


@pytest.mark.parametrize(("method", "kind"), METHODS)
def test_experts_of_both_add_up(
    method: str, kind: str, cuda: Cuda, patch: pytest.MonkeyPatch, mainline: Path, tmp_path: Path
) -> None:
    sglang_mainline.on_one_stream(cuda, patch)
    path = checkpoints.write(tmp_path / "model", kind)
    for layer in sglang_mainline.model(patch, mainline, path, method, kind):
        check_weights(layer.cpu, kind)
        assert layer.cpu.gpu_experts_mask.tolist() == [n < 3 for n in range(checkpoints.E)]
        check(layer, kind, 17)


def test_deferred_experts_arrive_one_layer_later(
    cuda: Cuda, patch: pytest.MonkeyPatch, mainline: Path, tmp_path: Path
) -> None:
    sglang_mainline.on_one_stream(cuda, patch)
    path = checkpoints.write(tmp_path / "model", "bf16")
    more = {"kt_max_deferred_experts_per_token": 1, "kt_num_gpu_experts": 2}
    first, last = sglang_mainline.model(patch, mainline, path, "BF16", "bf16", **more)
    one, two = checkpoints.inputs(9), checkpoints.inputs(9, seed=1)
    mask = first.cpu.gpu_experts_mask
    now, later = first.cpu.select_deferred_experts(one[1], one[2], checkpoints.TOP - 1)
    results = [layer(*(t.clone() for t in given)) for layer, given in ((first, one), (last, two))]
    parts = [
        on_cpu(layer.cpu, "bf16", given, mask)
        for layer, given in (
            (first, (one[0], now, one[2])),
            (last, two),
            (first, (one[0], later, one[2])),
        )
    ]
    carried = Uncertain(parts[1].value + parts[2].value, parts[1].error + parts[2].error)
    for layer, given, got, cpu in zip(
        (first, last), (one, two), results, (parts[0], carried), strict=True
    ):
        own = layer.quant_method.gpu_method
        other = on_gpu(own, "bf16", layer.layer_id, given, mask)
        check_sum(got, cpu, other, f"layer {layer.layer_id}")
