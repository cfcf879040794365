"""What kt-kernel's pages show runs with another import, on CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ktmoe_layers as layers
import pytest
import torch
from ktmoe_layers import INNER, E, H, K, inputs, weights, wrapper

import ktk
from ktk import KTMoEWrapper, generate_gpu_experts_masks
from ktk.ktmoe.pools import shared_pool


def expected(
    seed: int, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the layer by ktk's own interface."""
    moe = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=INNER
    )
    y: torch.Tensor = moe.load(*weights(seed))(x, ids, w, **options)
    return y


def test_columns_may_be_strided() -> None:
    layer = wrapper()
    given = inputs(5)
    strided: list[Any] = [tensor.t().contiguous().t() for tensor in given]
    assert all(tensor.stride(-1) == 5 for tensor in strided)
    assert torch.equal(layer.forward(*strided), layer.forward(*given))


@pytest.mark.parametrize("position", range(3))
def test_a_view_of_negated_memory_has_its_own_values(position: int) -> None:
    layer, given = wrapper(), inputs(5)
    call: list[Any] = list(given)
    call[position] = torch._neg_view(-call[position])
    assert torch.equal(layer.forward(*call), layer.forward(*given))


def test_the_readme_of_kt_kernel_runs() -> None:
    # Its section "Direct Python API Usage", with smaller sizes and CPU tensors.
    layer = KTMoEWrapper(
        layer_idx=0,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
        num_gpu_experts=2,
        cpuinfer_threads=32,
        threadpool_count=2,
        weight_path="/path/to/weights",
        chunked_prefill_size=512,
        method="AMXINT4",
        cpu_save=False,
        max_deferred_experts_per_token=0,
    )
    physical_to_logical_map = torch.arange(E)
    layer.load_weights_from_tensors(*weights(), physical_to_logical_map)
    hidden_states, topk_ids, topk_weights = inputs(5)
    cuda_stream = 0
    output = layer.forward(hidden_states, topk_ids, topk_weights, cuda_stream)
    layer.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
    again = layer.sync_forward(hidden_states, cuda_stream)
    assert torch.equal(output, again)
    assert output.shape == (5, H)
    assert output.dtype == torch.bfloat16

    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4, 8, 16])
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4, 8, 16]
    KTMoEWrapper.clear_buffer_cache()
    KTMoEWrapper.set_capture_batch_sizes([])


@pytest.mark.parametrize(
    "of_engine",
    [
        # SGLang's own wrapper, which still has the arguments of 2025, and its fork's.
        {"num_gpu_experts": 2},
        {
            "gpu_experts_mask": torch.arange(E) < 2,
            "numa_nodes": None,
            "swiglu_limit": 0.0,
            "swiglu_alpha": 0.0,
        },
    ],
    ids=["sglang", "sglang-kt"],
)
def test_engines_make_layers_with_their_keywords(of_engine: dict[str, Any]) -> None:
    layer = KTMoEWrapper(
        layer_idx=1,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
        cpuinfer_threads=60,
        threadpool_count=2,
        weight_path="/models/some",
        chunked_prefill_size=8192,
        method="BF16",
        max_deferred_experts_per_token=0,
        **of_engine,
    )
    sizes = (layer.num_experts, layer.num_experts_per_tok, layer.hidden_size)
    assert sizes == (E, K, H)
    assert (layer.moe_intermediate_size, layer.layer_idx, layer.method) == (INNER, 1, "BF16")
    layer.load_weights_from_tensors(*weights(), torch.arange(E))
    layer.force_release_loader()
    x, ids, w = inputs(4)
    masked = expected(0, x, ids, w, mask=torch.arange(E) < 2)
    assert torch.equal(layer.forward(x, ids.int(), w, 0), masked)


def test_results_are_those_of_the_layer() -> None:
    layer = wrapper(seed=3)
    x, ids, w = inputs(7)
    assert torch.equal(layer.forward(x, ids, w, None), expected(3, x, ids, w))
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(layer.forward(x.to(dtype), ids, w), expected(3, x.to(dtype), ids, w))
    assert torch.equal(layer.forward(x, ids.int(), w), expected(3, x, ids, w))
    deep = layer.forward(x[None], ids[None], w[None])
    assert torch.equal(deep, expected(3, x, ids, w))
    assert layer.forward(x[:0], ids[:0], w[:0]).shape == (0, H)


def test_inputs_may_be_overwritten_after_submit() -> None:
    layer = wrapper()
    x, ids, w = inputs(33)
    result = expected(0, x, ids, w)
    layer.submit_forward(x, ids, w, 0)
    x.zero_()
    ids.fill_(-1)
    w.zero_()
    assert torch.equal(layer.sync_forward(x, 0), result)


@pytest.mark.parametrize("generation", ["mask", "number", "position"])
def test_both_generations_of_the_constructor_mask_the_same_experts(generation: str) -> None:
    mask = torch.arange(E) < 3
    makers: dict[str, Callable[[], KTMoEWrapper]] = {
        "mask": lambda: KTMoEWrapper(0, E, K, H, INNER, method="BF16", gpu_experts_mask=mask),
        "number": lambda: KTMoEWrapper(0, E, K, H, INNER, method="BF16", num_gpu_experts=3),
        "position": lambda: KTMoEWrapper(0, E, K, H, INNER, 3, method="BF16"),
    }
    layer = makers[generation]()
    layer.load_weights_from_tensors(*weights())
    x, ids, w = inputs(16)
    assert torch.equal(layer.gpu_experts_mask, mask)
    assert layer.num_gpu_experts == 3
    assert torch.equal(layer.forward(x, ids, w), expected(0, x, ids, w, mask=mask))


def test_the_live_mask_is_obeyed() -> None:
    layer = wrapper(gpu_experts_mask=torch.zeros(E, dtype=torch.bool))
    x, ids, w = inputs(16)
    live = layer.gpu_experts_mask
    for _ in range(3):
        mask = torch.rand(E) < 0.5
        live.copy_(mask)
        assert torch.equal(layer.forward(x, ids, w), expected(0, x, ids, w, mask=mask))
    layer.gpu_experts_mask = torch.ones(E, dtype=torch.bool)
    assert layer.gpu_experts_mask is live
    assert not layer.forward(x, ids, w).any()


def test_the_map_says_what_fills_a_slot() -> None:
    order = torch.randperm(E)
    layer = wrapper()
    layer.load_weights_from_tensors(*weights(), order)
    sorted_by_slot = wrapper()
    sorted_by_slot.load_weights_from_tensors(*(part[order] for part in weights()))
    x, ids, w = inputs(9)
    assert torch.equal(layer.forward(x, ids, w), sorted_by_slot.forward(x, ids, w))


def test_experts_of_the_gpu_can_be_left_out_of_memory() -> None:
    mask = torch.arange(E) % 2 == 0
    layer = wrapper(gpu_experts_mask=mask, keep_gpu_experts=False)
    whole = wrapper(gpu_experts_mask=mask)
    assert layer.moe is not None
    assert whole.moe is not None
    assert 2 * layer.moe.nbytes == whole.moe.nbytes
    x, ids, w = inputs(9)
    assert torch.equal(layer.forward(x, ids, w), whole.forward(x, ids, w))
    layer.gpu_experts_mask[2] = False
    ids[0, 0] = 2
    with pytest.raises(RuntimeError, match=r"layer 0: expert 2 is not loaded \(token 0 wants it\)"):
        layer.forward(x, ids, w)


def test_an_error_in_a_call_is_raised_by_sync() -> None:
    layer = wrapper()
    assert layer.moe is not None
    fresh = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=INNER
    )
    layer.moe = fresh  # nothing is loaded
    x, ids, w = inputs(2)
    layer.submit_forward(x, ids, w)
    with pytest.raises(RuntimeError, match=r"layer 0: no expert is loaded"):
        layer.sync_forward(x)
    layer.cpu_infer.sync()  # it was raised once


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "sft"}, NotImplementedError, "inference only"),
        ({"method": "AMXINT8_SFT"}, NotImplementedError, "inference only"),
        ({"lora_rank": 8}, ValueError, "lora_rank=8: an argument of the fine-tuning mode"),
        ({"lora_rnak": 8}, TypeError, "lora_rnak"),
        ({"num_gpu_experts": E + 1}, ValueError, "num_gpu_experts must be between 0"),
        ({"gpu_experts_mask": torch.ones(3).bool()}, ValueError, r"bool tensor \[8\], got \[3\]"),
        (
            {"gpu_experts_mask": torch.ones(E).bool(), "num_gpu_experts": 2},
            ValueError,
            "has 8 experts on the GPU, but num_gpu_experts is 2",
        ),
        ({"numa_nodes": [0], "threadpool_count": 2}, ValueError, "names 1 nodes"),
        ({"numa_nodes": [77]}, ValueError, "numa_nodes has 77"),
        (
            {"cpuinfer_threads": 0},
            ValueError,
            "cpuinfer_threads must be an integer of at least 1, got 0",
        ),
        (
            {"max_deferred_experts_per_token": -1},
            ValueError,
            "must be an integer of at least 0, got -1",
        ),
        ({"deferral_policy": "batch"}, ValueError, "per-token, batch-union, got 'batch'"),
        ({"method": "AMXINT5"}, ktk.BackendNotFound, "AMXINT"),
        ({"num_experts_per_tok": E + 1}, ValueError, "only 8 experts"),
        ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit must be a number and not negative"),
    ],
)
def test_what_is_refused_says_why(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    sizes: dict[str, Any] = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": INNER,
        "method": "BF16",
    }
    with pytest.raises(error, match=message):
        KTMoEWrapper(0, **{**sizes, **arguments})


def test_calls_are_checked() -> None:
    layer = wrapper()
    x, ids, w = inputs(4)
    for wrong, message in (
        ((x[:, :-1], ids, w), r"hidden_states must be \[..., 64\]"),
        ((x, ids[:3], w), "topk_ids has 3 tokens, hidden_states has 4"),
        ((x, ids, w[:, :2]), r"topk_weights must be \[..., 3\], got \[4, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.forward(*wrong)
    with pytest.raises(TypeError, match=r"topk_ids must be integers, got torch.float32"):
        layer.forward(x, ids.float(), w)
    with pytest.raises(TypeError, match="cuda_stream must be a stream's handle"):
        layer.forward(x, ids, w, "stream")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="without a submit_forward"):
        layer.sync_forward(x)
    empty = KTMoEWrapper(0, E, K, H, INNER, method="BF16")
    with pytest.raises(RuntimeError, match="layer 0 has no weights"):
        empty.forward(x, ids, w)
    with pytest.raises(ValueError, match="needs the weight_path"):
        empty.load_weights()


def test_activations_follow_the_two_numbers() -> None:
    x, ids, w = inputs(6)
    plain = wrapper().forward(x, ids, w)
    for limit, alpha, config in (
        (0.25, 0.0, {"activation_limit": 0.25}),
        (
            0.25,
            1.7,
            {
                "activation": "swigluoai",
                "activation_alpha": 1.7,
                "activation_limit": 0.25,
                "clamp_gate_below": True,
            },
        ),
    ):
        moe = ktk.load_backend("BF16").moe(
            num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=INNER, **config
        )
        made = wrapper(swiglu_limit=limit, swiglu_alpha=alpha).forward(x, ids, w)
        assert torch.equal(made, moe.load(*weights())(x, ids, w))
        assert not torch.equal(made, plain)


def test_masks_take_the_most_used_experts_of_all_layers() -> None:
    frequency = torch.tensor([[5.0, 1, 9, 0], [2, 2, 8, 7]])
    masks = generate_gpu_experts_masks(frequency, 4)
    assert masks.tolist() == [[True, False, True, False], [False, False, True, True]]
    assert masks.dtype == torch.bool
    assert generate_gpu_experts_masks(frequency, 100).all()
    assert not generate_gpu_experts_masks(frequency, -1).any()
    assert generate_gpu_experts_masks(torch.ones(2, 4), 3).flatten().tolist()[:4] == [1, 1, 1, 0]


def test_layers_share_one_pool_and_other_settings_get_another() -> None:
    one, two = wrapper(0), wrapper(1)
    assert one.cpu_infer.pool is two.cpu_infer.pool
    assert shared_pool(1, 1, None) is not one.cpu_infer.pool
    assert shared_pool(2, 1, [0]).size <= 2


_PINNED = """
import os, torch, sys
sys.path.insert(0, sys.argv[1])
from ktmoe_layers import inputs, wrapper
import ktk
cpus = sorted(os.sched_getaffinity(0))
layer = wrapper(cpuinfer_threads=len(cpus))
pool = layer.cpu_infer.pool
threads = {int(t): os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")}
os.sched_setaffinity(0, cpus[-1:])  # as an engine does before it fills a GPU's layer
layer.forward(*inputs(64))
later = {int(t): os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")}
assert later.keys() == threads.keys(), "a call made threads, which inherit the mask of one core"
assert sorted(pool.cpus) == cpus, pool.cpus
moved = {t for t in later if later[t] != threads[t]} - {os.getpid()}
assert not moved, moved
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_pinning_the_main_thread_does_not_reach_the_workers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PINNED, os.path.dirname(layers.__file__)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_random_steps_over_two_models_lose_nothing() -> None:
    """The native test of this kind has more of them; here are masks, maps and Python's hands."""
    made = torch.Generator().manual_seed(0)

    def pick(limit: int) -> int:
        return int(torch.randint(limit, (), generator=made))

    models = [wrapper(seed=1), wrapper(seed=2, hidden_size=32)]
    plain = [layer.moe for layer in (wrapper(seed=1), wrapper(seed=2, hidden_size=32))]
    open_calls: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    finished = 0
    for step in range(600):
        which = pick(2)
        layer, what = models[which], pick(3)
        if what == 0:
            layer.gpu_experts_mask.copy_(torch.rand(E, generator=made) < 0.4)
        elif what == 1 and which not in open_calls:
            x, ids, w = inputs(1 + pick(5), seed=step, hidden=(H, 32)[which])
            moe = plain[which]
            assert moe is not None
            open_calls[which] = x, moe(x, ids, w, mask=layer.gpu_experts_mask)
            layer.submit_forward(x.clone(), ids, w, 0)
            ids.fill_(pick(E))
        elif which in open_calls:
            x, result = open_calls.pop(which)
            assert torch.equal(layer.sync_forward(x, 0), result)
            finished += 1
    assert finished > 50
