"""sglang-kt's own wrapper of experts, unchanged, with ktk as kt_kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_checkpoints as checkpoints
import sglang_fork
import sglang_gpu as gpu
import torch
from sglang_cuda import Cuda
from sglang_expected import METHODS, check_sum, check_weights, on_cpu, on_gpu
from sglang_fork import Layer, RunnerConfig

from ktk import BackendNotFound
from ktk.testing.reference import Uncertain


def check(layer: Layer, kind: str, tokens: int, seed: int = 0) -> None:
    """Call a layer, and compare both parts' sum."""
    inputs = checkpoints.inputs(tokens, seed)
    mask = layer.quant_method.gpu_experts_mask
    assert torch.equal(layer.cpu.gpu_experts_mask, mask)
    # Padding, as in graphs. The client itself takes -1 for the last expert where it is the GPU's.
    if not mask[-1]:
        inputs[1][0, 0] = -1
    got = layer(*inputs)
    method = layer.quant_method.gpu_method
    other = on_gpu(method, kind, layer.layer_id, inputs, mask)
    check_sum(got, on_cpu(layer.cpu, kind, inputs, mask), other, f"{tokens} tokens")
    # The bound of activations in int8 is wide. What ktk alone gives, its kit has checked.
    assert layer.cpu.moe is not None
    assert torch.equal(got, method.given + layer.cpu.moe(*inputs, mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), METHODS)
def test_experts_of_both_add_up(
    method: str, kind: str, cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "model", kind)
    layers = sglang_fork.model(patch, fork, path, method, kind)
    assert sum(int(layer.cpu.gpu_experts_mask.sum()) for layer in layers) == 3 * len(layers)
    for layer in layers:
        check_weights(layer.cpu, kind)
        assert layer.cpu.method == method
        for tokens in (1, 17):
            check(layer, kind, tokens)


@pytest.mark.parametrize("experts", [0, checkpoints.E])
def test_all_experts_may_be_on_one_side(
    experts: int, cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "model", "bf16")
    layers = sglang_fork.model(patch, fork, path, "BF16", "bf16", kt_num_gpu_experts=experts)
    inputs = checkpoints.inputs(5)
    for layer in layers:
        mask = torch.full((checkpoints.E,), experts > 0)
        assert torch.equal(layer.cpu.gpu_experts_mask, mask)
        got, method = layer(*inputs), layer.quant_method.gpu_method
        other = on_gpu(method, "bf16", layer.layer_id, inputs, mask)
        check_sum(got, on_cpu(layer.cpu, "bf16", inputs, mask), other, f"{experts} on the GPU")


@pytest.mark.parametrize("cuda", ["pool"], indirect=True)
def test_the_transport_of_kt_kernel_is_missed_and_nothing_else(
    cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path
) -> None:
    module = sglang_fork.client(patch, fork, sglang_fork.arguments(fork, "FP8"))
    found, reason = module._load_glm5_next_fp8_native_transport_api()
    assert found is None
    # With another reason the client would not fall back to the writer.
    assert reason.startswith("kt_kernel_ext is missing initialize_fp8_layerwise_control")


@pytest.mark.parametrize("cuda", ["pool"], indirect=True)
def test_a_method_that_ktk_lacks_is_refused_with_a_sentence(
    cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "model", "bf16")
    with pytest.raises(BackendNotFound, match="SYCL_GPTQ_INT4"):
        sglang_fork.model(patch, fork, path, "SYCL_GPTQ_INT4", "bf16")


@pytest.mark.parametrize(
    ("method", "kind", "runner"),
    [
        ("MXFP4", "mxfp4", RunnerConfig(swiglu_limit=0.75)),
        ("MXFP8", "mxfp8", RunnerConfig(gemm1_alpha=1.702, gemm1_clamp_limit=0.75)),
    ],
)
def test_the_activation_is_the_engines(
    method: str,
    kind: str,
    runner: RunnerConfig,
    cuda: Cuda,
    patch: pytest.MonkeyPatch,
    fork: Path,
    tmp_path: Path,
) -> None:
    path = checkpoints.write(tmp_path / "model", kind)
    for layer in sglang_fork.model(patch, fork, path, method, kind, runner):
        assert layer.cpu.moe is not None
        assert layer.cpu.moe.config == gpu.config_of(runner, checkpoints.E)
        check(layer, kind, 9)


@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        ("uniform", {"kt_num_gpu_experts": 3}, [[0, 1, 2], [0, 1, 2]]),
        ("front-loading", {"kt_num_gpu_experts": 5}, [[*range(8)], [0, 1]]),
        ("frequency", {"kt_gpu_experts_ratio": 0.25}, [[3], [1, 6, 7]]),
    ],
)
@pytest.mark.parametrize("cuda", ["pool"], indirect=True)
def test_masks_are_what_the_strategy_of_placement_says(
    strategy: str,
    more: dict[str, Any],
    expected: list[list[int]],
    cuda: Cuda,
    patch: pytest.MonkeyPatch,
    fork: Path,
    tmp_path: Path,
) -> None:
    counts = torch.ones(2, checkpoints.LAYERS, checkpoints.E, dtype=torch.int64)
    counts[:, 0, 3], counts[:, 1, [1, 6, 7]] = 9, torch.tensor([5, 6, 8])
    torch.save({"logical_count": counts}, tmp_path / "counts.pt")
    path = checkpoints.write(tmp_path / "model", "bf16")
    more |= {"kt_expert_placement_strategy": strategy}
    more |= {"init_expert_location": str(tmp_path / "counts.pt")}
    layers = sglang_fork.model(patch, fork, path, "BF16", "bf16", **more)
    for layer, own in zip(layers, expected, strict=True):
        assert layer.cpu.gpu_experts_mask.nonzero().flatten().tolist() == own == layer.gpu_slots
        check(layer, "bf16", 7)


@pytest.mark.parametrize(("method", "kind"), [("BF16", "bf16"), ("AMXINT8", "bf16")])
def test_deferred_experts_arrive_one_layer_later(
    method: str, kind: str, cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "model", kind)
    more: dict[str, Any] = {"kt_max_deferred_experts_per_token": 1}
    first, last = sglang_fork.model(patch, fork, path, method, kind, **more)
    assert first.cpu.max_deferred_experts_per_token == 1
    assert last.cpu.max_deferred_experts_per_token == 0
    for step in range(3):
        one, two = checkpoints.inputs(9, seed=step), checkpoints.inputs(9, seed=10 + step)
        now, later = first.cpu.select_deferred_experts(one[1], one[2], checkpoints.TOP - 1)
        assert (later >= 0).any()
        results = first(*one), last(*two)
        parts = [
            on_cpu(first.cpu, kind, (one[0], now, one[2]), first.cpu.gpu_experts_mask),
            on_cpu(last.cpu, kind, two, last.cpu.gpu_experts_mask),
            on_cpu(first.cpu, kind, (one[0], later, one[2]), first.cpu.gpu_experts_mask),
        ]
        carried = Uncertain(parts[1].value + parts[2].value, parts[1].error + parts[2].error)
        for layer, inputs, got, cpu in (
            (first, one, results[0], parts[0]),
            (last, two, results[1], carried),
        ):
            own = layer.quant_method.gpu_method
            other = on_gpu(own, kind, layer.layer_id, inputs, layer.cpu.gpu_experts_mask)
            check_sum(got, cpu, other, f"layer {layer.layer_id} of step {step}")


@pytest.mark.parametrize("cuda", ["streams"], indirect=True)
def test_captured_sizes_are_replayed_with_new_inputs_and_masks(
    cuda: Cuda, patch: pytest.MonkeyPatch, fork: Path, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "model", "bf16")
    layer = sglang_fork.model(patch, fork, path, "BF16", "bf16")[0]
    sizes = [1, 2, 4]
    layer.cpu.set_capture_batch_sizes(sizes)
    stream, driver = layer.quant_method._cpu_stream, cuda.driver
    assert driver is not None
    # What the client adds to the GPU's part, in the graph.
    given: list[torch.Tensor] = []
    sync = layer.cpu.sync_forward

    def record(*arguments: Any) -> torch.Tensor:
        given.append(sync(*arguments))
        return given[-1]

    patch.setattr(layer.cpu, "sync_forward", record)
    graphs = []
    for tokens in sizes:
        inputs = checkpoints.inputs(tokens)
        layer(*inputs)
        stream.capturing = True
        driver.begin_capture(stream.cuda_stream)
        layer(*inputs)
        graphs.append((driver.end_capture(stream.cuda_stream), inputs, given[-1]))
        stream.capturing = False
    moe = layer.cpu.moe
    assert moe is not None
    for seed in range(4):
        for graph, inputs, output in reversed(graphs):
            fresh = checkpoints.inputs(len(output), seed + 20)
            # In a graph the copies of inputs are nodes; here the test makes them.
            layer.quant_method._shared_staging_buffer.get_slice(len(output)).copy_(fresh[0])
            for old, new in zip(inputs[1:], fresh[1:], strict=True):
                old.copy_(new)
            mask = torch.arange(checkpoints.E) % 4 == seed
            layer.cpu.gpu_experts_mask.copy_(mask)
            driver.replay(graph, stream.cuda_stream)
            stream.synchronize()
            assert torch.equal(output, moe(*fresh, mask=mask))
            check_sum(
                output,
                on_cpu(layer.cpu, "bf16", fresh, mask),
                np.zeros(output.shape),
                f"{len(output)} tokens, replayed",
            )
