"""What kt-kernel accepts is accepted, or refused for a reason that the README gives."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ktmoe_layers import INNER, E, H, K, inputs, weights, wrapper

import ktk
from ktk import KTMoEWrapper, generate_gpu_experts_masks
from ktk.ktmoe.arguments import warn_once

SIZES: dict[str, Any] = {
    "num_experts": E,
    "num_experts_per_tok": K,
    "hidden_size": H,
    "moe_intermediate_size": INNER,
    "method": "BF16",
}
# All arguments of kt-kernel's constructor in its order, with their defaults from number 11 on.
BY_POSITION = (
    *(0, E, K, H, INNER, None, 2, 1, None, 64),
    *(False, None, "BF16", None, "inference", 0),
    *(16, 32.0, 0.0, 1, 128, True, False, 0.25, 1.5),
)


@pytest.fixture(autouse=True)
def forget() -> None:
    """Let what is said once in a process be said in each test."""
    warn_once.cache_clear()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("ktk.ktmoe")]


def test_all_arguments_may_come_by_position() -> None:
    layer = KTMoEWrapper(*BY_POSITION)
    layer.load_weights_from_tensors(*weights())
    same = wrapper(swiglu_limit=0.25, swiglu_alpha=1.5)
    call = inputs(3)
    assert torch.equal(layer.forward(*call), same.forward(*call))
    with pytest.raises(ValueError, match="lora_rank=8: an argument of the fine-tuning mode"):
        KTMoEWrapper(*BY_POSITION[:16], 8)


def test_messages_of_python_name_the_class() -> None:
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((*BY_POSITION, 1), {}),
        ((0,), {}),
        ((0,), {**SIZES, "lora_rnak": 8}),
    ]
    for args, keywords in wrong:
        with pytest.raises(TypeError, match=r"^KTMoEWrapper\.__init__\(\) "):
            KTMoEWrapper(*args, **keywords)


def test_sizes_may_be_integers_of_any_library() -> None:
    sizes: list[Any] = [torch.tensor(4), *(np.int64(n) for n in (E, K, H)), torch.tensor(INNER)]
    layer = KTMoEWrapper(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], method="BF16")
    layer.load_weights_from_tensors(*weights())
    assert (layer.layer_idx, layer.num_experts, layer.moe_intermediate_size) == (4, E, INNER)
    call = inputs(3)
    assert torch.equal(layer.forward(*call), wrapper().forward(*call))
    with pytest.raises(ValueError, match=r"num_experts must be an integer from 1 to .*, got '8'"):
        KTMoEWrapper(0, **{**SIZES, "num_experts": "8"})
    for wrong in (-1, "0", 1.0, None):
        with pytest.raises(ValueError, match="layer_idx must be an integer of at least 0, got"):
            KTMoEWrapper(wrong, **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16),
        torch.uint32,
        torch.uint64,
    ],
)
def test_ids_are_integers_of_any_size(dtype: torch.dtype) -> None:
    layer = wrapper()
    x, ids, w = inputs(5)
    assert torch.equal(layer.forward(x, ids.to(dtype), w), layer.forward(x, ids, w))


def test_ids_of_nobody_stay_so_in_any_size() -> None:
    layer = wrapper()
    x, ids, w = inputs(5)
    nobody = ids.clone()
    nobody[:, 0] = -1
    expected = layer.forward(x, nobody, w)
    assert torch.equal(layer.forward(x, nobody.to(torch.int8), w), expected)
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):  # -1 is their largest
        assert torch.equal(layer.forward(x, nobody.to(dtype), w), expected)


def test_floats_of_any_size_are_converted() -> None:
    layer = wrapper()
    x, ids, w = inputs(5)
    double = layer.forward(x.double(), ids, w)
    assert double.dtype == torch.float64
    assert torch.equal(double, layer.forward(x.float(), ids, w).double())
    assert torch.equal(layer.forward(x, ids, w.double()), layer.forward(x, ids, w))
    eighth = x.to(torch.float8_e4m3fn)
    result = layer.forward(eighth, ids, w)
    assert torch.equal(
        result.float(), layer.forward(eighth.float(), ids, w).to(eighth.dtype).float()
    )


@pytest.mark.parametrize(
    ("position", "dtype", "message"),
    [
        (0, torch.int32, "hidden_states must be floats, got torch.int32"),
        (0, torch.complex64, "hidden_states must be floats, got torch.complex64"),
        (1, torch.float32, "topk_ids must be integers, got torch.float32"),
        (1, torch.bool, "topk_ids must be integers, got torch.bool"),
        (2, torch.int64, "topk_weights must be floats, got torch.int64"),
        (2, torch.bool, "topk_weights must be floats, got torch.bool"),
    ],
)
def test_kinds_of_numbers_are_not_mixed(position: int, dtype: torch.dtype, message: str) -> None:
    call: list[Any] = list(inputs(5))
    call[position] = call[position].to(dtype)
    with pytest.raises(TypeError, match=message):
        wrapper().forward(*call)


def test_one_token_needs_no_dimension_of_its_own() -> None:
    layer = wrapper()
    x, ids, w = inputs(1)
    expected = layer.forward(x, ids, w)
    assert torch.equal(layer.forward(x[0], ids, w), expected)
    assert torch.equal(layer.forward(x[0], ids[0], w[0]), expected)
    with pytest.raises(ValueError, match=r"hidden_states must be \[..., 64\], got \[\]"):
        layer.forward(x[0, 0], ids, w)


def test_a_result_is_given_once_and_an_error_in_asking_loses_nothing() -> None:
    layer = wrapper()
    x, ids, w = inputs(2)
    layer.submit_forward(x, ids, w)
    with pytest.raises(ValueError, match="tensors on cpu, but sync_forward names one on meta"):
        layer.sync_forward(x.to("meta"))
    first = layer.sync_forward(x)
    assert torch.equal(first, layer.forward(x, ids, w))
    with pytest.raises(RuntimeError, match="layer 0 was called without a submit_forward"):
        layer.sync_forward(x)


def test_the_number_of_the_gpus_experts_follows_the_mask() -> None:
    layer = wrapper(num_gpu_experts=2)
    layer.num_gpu_experts = 2
    with pytest.raises(AttributeError, match="what gpu_experts_mask says, 2; change the mask"):
        layer.num_gpu_experts = 3
    layer.gpu_experts_mask[5] = True
    assert layer.num_gpu_experts == 3


def test_tasks_of_addresses_are_not_there() -> None:
    cpu_infer = wrapper().cpu_infer
    for name in ("submit", "submit_with_cuda_stream", "sync_with_cuda_stream", "backend_"):
        assert not hasattr(cpu_infer, name)
    with pytest.raises(AttributeError, match=r"no 'submit' here: .* use submit_forward"):
        cpu_infer.submit(())
    cpu_infer.sync(1)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_layers_are_not_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="KTMoEWrapper of layer 0 cannot be pickled or copied: "):
        copied(wrapper())


def test_variables_of_kt_kernel_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper()
    assert not warned(caplog)
    monkeypatch.setenv("KT_KERNEL_CPU_VARIANT", "avx2")
    monkeypatch.setenv("KT_RAWINT4_BACKEND", "avx2")
    wrapper()
    wrapper()
    [message] = warned(caplog)
    assert message.startswith("KT_KERNEL_CPU_VARIANT, KT_RAWINT4_BACKEND are set, but ktk does not")
    assert "KTK_ISA" in message


def test_a_path_that_is_not_there_is_named_before_it_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = tmp_path / "nope"
    layer = KTMoEWrapper(0, **SIZES, weight_path=nowhere)
    assert warned(caplog) == [f"weight_path {nowhere} does not exist: load_weights will fail"]
    with pytest.raises(ktk.CheckpointError, match=str(nowhere)):
        layer.load_weights()
    layer.load_weights_from_tensors(*weights())  # which needs no path
    caplog.clear()
    KTMoEWrapper(0, **SIZES, weight_path=tmp_path)
    assert not warned(caplog)


@pytest.mark.parametrize("name", ["SYCL_GPTQ_INT4", "AMXINT"])
def test_methods_that_are_none_say_what_comes_near(name: str) -> None:
    with pytest.raises(ktk.BackendNotFound) as caught:
        KTMoEWrapper(0, **{**SIZES, "method": name})
    hint = "Did you mean" in str(caught.value)
    assert hint == (name == "AMXINT")
    with pytest.raises(TypeError, match="by its name, a str"):
        KTMoEWrapper(0, **{**SIZES, "method": None})


def test_frequencies_may_be_lists_and_nan_is_never_the_most_used() -> None:
    nan, inf = math.nan, math.inf
    lists = [[0.1, 0.5], [0.2, 0.4]]
    assert generate_gpu_experts_masks(lists, 2).tolist() == [[False, True], [False, True]]
    array: Any = np.array(lists)
    assert torch.equal(generate_gpu_experts_masks(array, 1), generate_gpu_experts_masks(lists, 1))
    strange = torch.tensor([[nan, 0.0, inf], [nan, 3.0, -1.0]])
    for count, chosen in ((1, {2}), (2, {2, 4}), (3, {1, 2, 4}), (4, {1, 2, 4, 5})):
        mask = generate_gpu_experts_masks(strange, count).flatten()
        assert set(torch.nonzero(mask).flatten().tolist()) == chosen
    with pytest.raises(ValueError, match=r"must be \[layers, experts\], got \[2\]"):
        generate_gpu_experts_masks([1.0, 2.0], 1)  # type: ignore[list-item]


def test_capture_sizes_may_come_from_anywhere() -> None:
    KTMoEWrapper.set_capture_batch_sizes(n for n in (1, 2))
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2]
    KTMoEWrapper.set_capture_batch_sizes([])


def test_weights_need_not_be_contiguous() -> None:
    layer = KTMoEWrapper(0, **SIZES)
    layer.load_weights_from_tensors(
        *(part.transpose(1, 2).contiguous().transpose(1, 2) for part in weights())
    )
    call = inputs(4)
    assert torch.equal(layer.forward(*call), wrapper().forward(*call))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cpuinfer_threads", "2", "cpuinfer_threads must be an integer of at least 1, got '2'"),
        ("threadpool_count", 1.5, "threadpool_count must be an integer of at least 1, got 1.5"),
        ("numa_nodes", [], "numa_nodes names no node"),
        ("max_deferred_experts_per_token", 0.5, "must be an integer of at least 0, got 0.5"),
        ("num_gpu_experts", 1.5, "num_gpu_experts must be an integer of at least 0, got 1.5"),
        ("gpu_experts_mask", "x", r"gpu_experts_mask must be a bool tensor \[8\], got str"),
        ("gpu_experts_mask", True, r"gpu_experts_mask must be a bool tensor \[8\], got \[\]"),
        ("gpu_experts_mask", list(range(E)), r"must be a bool tensor \[8\], got \[8\] torch.int64"),
        ("swiglu_limit", "7", "swiglu_limit must be a number and not negative, got '7'"),
        ("swiglu_alpha", math.nan, "swiglu_alpha must be a number and not negative, got nan"),
    ],
)
def test_arguments_of_the_constructor_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        KTMoEWrapper(0, **{**SIZES, name: value})


def test_counts_may_come_from_any_library() -> None:
    two: Any = np.int64(2)
    layer = KTMoEWrapper(0, E, K, H, INNER, two, two, method="BF16")
    assert layer.num_gpu_experts == 2


def test_tensors_that_cannot_be_read_are_named() -> None:
    layer = wrapper()
    x, ids, w = inputs(2)
    for given in (x.to("meta"), x.float().to_sparse()):
        with pytest.raises(TypeError, match="hidden_states must be a dense tensor in CPU memory"):
            layer.forward(given, ids, w)
    gate, up, down = weights()
    for wrong, message in (
        (up.to("meta"), r"up_proj must have three .* on meta"),
        (up[0], r"up_proj must have three dimensions, .* got \[96, 64\]"),
        ("up", "up_proj must be a tensor, got str"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            layer.load_weights_from_tensors(gate, wrong, down)  # type: ignore[arg-type]
    expected = layer.forward(x, ids, w)
    arrays: list[Any] = [part.float().numpy() for part in weights()]
    layer.load_weights_from_tensors(*arrays)
    assert torch.equal(layer.forward(x, ids, w), expected)


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, 0, "gpu_tp_count must be an integer of at least 1, got 0"),
        (1, "0", "expert 0 is not one of 8"),
        (2, None, "w13_weight_ptrs must be a list of addresses, got None"),
        (3, [-4096], r"w13_scale_ptrs has an address that is none: \[-4096\]"),
        (4, [4096.0], r"w2_weight_ptrs must be a list of addresses, got \[4096.0\]"),
        (5, [1 << 64], "w2_scale_ptrs has an address that is none"),
    ],
)
def test_addresses_are_checked(position: int, wrong: Any, message: str) -> None:
    arguments: list[Any] = [1, 0, [4096], [0], [4096], [0]]
    arguments[position] = wrong
    layer = wrapper()
    layer._given = (ktk.Format("bf16"),) * 3
    with pytest.raises((IndexError, TypeError, ValueError), match=message):
        layer.submit_write_weight_scale_to_buffer(*arguments)
